"""nvbandwidth's output: what is read from it, and that a broken one is refused with its line."""

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
    "huge buffer": (f"Buffer Size: {'9' * 400} MiB\n{NV}", "line 1 = .*: no plausible size"),
    "buffer beyond Python": (f"Buffer Size: {'9' * 5001} MiB\n{NV}", "line 1 = .*: no plausible size"),
    "buffer beyond any machine": (f"Buffer Size: {'9' * 15} MiB\n{NV}", "nv.*routes.cpu.points.*no plausible size"),
    "empty": ("", "is empty"),
    "another tool's": ("hello\n", "no nvbandwidth results"),
}


@pytest.mark.parametrize("case", BROKEN_NV)
def test_broken_nvbandwidth_logs(tmp_path, case):
    text, message = BROKEN_NV[case]
    with pytest.raises(InputError, match=message):
        importers.read("nvbandwidth", logs.write(tmp_path, text))
