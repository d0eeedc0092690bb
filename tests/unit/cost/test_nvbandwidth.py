"""nvbandwidth's output: what is read from it, and that a broken one is refused with its line."""

import json

import logs
import pytest

from megatron_ext.cost import importers
from megatron_ext.cost.curve import lookup
from megatron_ext.cost.estimates import Costs
from megatron_ext.formats.errors import InputError


def test_nvbandwidth(tmp_path):
    table = importers.read("nvbandwidth", logs.write(tmp_path, logs.nvbandwidth()))
    (cpu,), (publish,) = table.routes.cpu.points, table.publish.cpu.points
    assert cpu.size_bytes == 512 << 20
    assert cpu.p50_us == pytest.approx((512 << 20) / 55.3e3, rel=0.01)
    assert publish.size_bytes == 2 * (512 << 20)  # each of two ranks writes its shard
    assert Costs(table).slowdown("cpu", "publish") == pytest.approx(2.0, rel=0.01)
    half = lookup(table.routes.cpu, 256 << 20, extrapolate=True)
    assert half.us == pytest.approx(cpu.p50_us / 2) and half.extrapolated


def test_nvbandwidth_passes_over_tests_that_print_otherwise(tmp_path):
    other = """Running device_to_device_memcpy_read_ce.
memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0       N/A    276.07
 1    276.36       N/A

SUM device_to_device_memcpy_read_ce_total 552.43

Running host_device_latency_sm.
memory latency SM CPU(row) <-> GPU(column) (ns)
 0    772.58    772.62

"""
    alone = importers.read("nvbandwidth", logs.write(tmp_path, logs.nvbandwidth()))
    table = importers.read("nvbandwidth", logs.write(tmp_path, logs.nvbandwidth() + other))
    assert table.routes.cpu.points == alone.routes.cpu.points


NV = logs.nvbandwidth()


BROKEN_NV = {
    "cut off": (NV[: NV.index("SUM device_to_host")], "cut off"),
    "cut off in a row": (NV[: NV.index("55.00")], "cut off"),
    "cut off in a test's name": (NV[: NV.index("device_to_host_memcpy_ce.") + 1], "line [0-9]+ = 'Running d'.*cut off"),
    "another unit": (logs.nvbandwidth(unit="MB/s"), r"not in \(GB/s\)"),
    "zero rate": (NV.replace("55.20", " 0.00"), "must be a positive number"),
    "negative rate": (NV.replace("55.20", "-5.20"), "must be a positive number"),
    "not a number": (NV.replace("55.40", "  nan"), "must be a positive number"),
    "a part missing": (logs.nvbandwidth(total=443.2), "a part is missing"),
    "huge buffer": (f"Buffer Size: {'9' * 400} MiB\n{NV}", "line 1 = .*: is not a plausible size"),
    "buffer beyond Python": (f"Buffer Size: {'9' * 5001} MiB\n{NV}", "line 1 = .*: is not a plausible size"),
    "buffer beyond any machine": (f"Buffer Size: {'9' * 15} MiB\n{NV}", "nv.*routes.cpu.points.*not a plausible size"),
    "empty": ("", "is empty"),
    "another tool's": ("hello\n", "no nvbandwidth results"),
}


@pytest.mark.parametrize("case", BROKEN_NV)
def test_broken_nvbandwidth_logs(tmp_path, case):
    text, message = BROKEN_NV[case]
    with pytest.raises(InputError, match=message):
        importers.read("nvbandwidth", logs.write(tmp_path, text))


def as_json(sum_of_all=110.6, unit="GB/s", status="Passed", name="host_to_device_memcpy_ce") -> str:
    """In the form of json_output.cpp of nvbandwidth 0.8, whose rates are texts."""
    case = {"name": name, "status": status}
    if status == "Passed":
        case |= {
            "bandwidth_description": f"memcpy CE CPU(row) -> GPU(column) bandwidth ({unit})",
            "bandwidth_matrix": [["55.4", "55.2", "N/A"]],
            "sum": sum_of_all,
        }
    report = {
        "CUDA Runtime Version": 12040,
        "Driver Version": "550.54.15",
        "GPU Device list": [f"{n}: NVIDIA H200: 00000000:0{n}:00:(node-a)" for n in (0, 1)],
        "testcases": [case, {"name": "device_local_copy", "status": "Waived"}],
        "version": "v0.8",
    }
    return json.dumps({"nvbandwidth": report}, indent=3)


def test_json_is_read_like_text(tmp_path):
    of_text = importers.read("nvbandwidth", logs.write(tmp_path, logs.nvbandwidth()))
    of_json = importers.read("nvbandwidth", logs.write(tmp_path, as_json()))
    assert of_json.routes == of_text.routes
    assert of_json.metadata.hardware == of_text.metadata.hardware == {"device": "NVIDIA H200", "devices": 2}
    assert of_json.metadata.software == {"nvbandwidth": "v0.8", "driver": "550.54.15", "cuda": "12040"}
    assert of_json.publish.cpu is None
    assert of_json.metadata.notes[-1].endswith("has no device_to_host_memcpy_ce; run that test for the other direction")


SM = NV[: NV.index("Running")] + NV[NV.index("Running host_to_device_memcpy_ce") : NV.index("Running device_to_host")]
RUN = "run `nvbandwidth -t host_to_device_memcpy_ce device_to_host_memcpy_ce host_to_device_bidirectional_memcpy_ce`"


@pytest.mark.parametrize(
    "text, found",
    [
        (SM.replace("_ce", "_sm"), "holds host_to_device_memcpy_sm but no"),
        (as_json(name="host_to_device_memcpy_sm"), r"memcpy_sm \(passed\), device_local_copy \(waived\) but no"),
        (as_json(status="Waived"), r"holds host_to_device_memcpy_ce \(waived\), device"),
        ("hello\n", "no nvbandwidth results"),
    ],
)
def test_a_log_without_copies_of_the_copy_engine_says_what_it_has_and_what_to_run(tmp_path, text, found):
    with pytest.raises(InputError, match=f"{found}.*{RUN}"):
        importers.read("nvbandwidth", logs.write(tmp_path, text))


@pytest.mark.parametrize(
    "text, why",
    [
        (as_json()[:-40], "is not JSON of nvbandwidth, or is cut off"),
        (as_json(sum_of_all=221.2), "host_to_device_memcpy_ce.sum = 221.2: its rates add up to 110.60"),
        (as_json(unit="MB/s"), r"not in \(GB/s\)"),
        (as_json().replace("55.2", "nan"), "rate nan must be a positive number"),
        ('{"nvbandwidth": {"error": "no device"}}', "ended with an error: no device"),
        ("{}", "is not JSON of nvbandwidth"),
    ],
)
def test_broken_json(tmp_path, text, why):
    with pytest.raises(InputError, match=why):
        importers.read("nvbandwidth", logs.write(tmp_path, text))
