"""``plan`` ends with what to add to the options, and the verdict."""

import json

import pytest
from msgspec.structs import replace
from planning_cases import WHOLE, make_table, make_workload

from megatron_ext.cli import main as cli
from megatron_ext.cost import cost_table as cost
from megatron_ext.planner.what_limits import LIMIT_UNKNOWN
from megatron_ext.workload import workload
from megatron_ext.workload.workload import Limits

NARROW = Limits(host_bytes=300_000)


@pytest.mark.parametrize("limits", [Limits(), NARROW, Limits(host_bytes=1 << 40), Limits(device_bytes=1 << 40)])
def test_the_last_lines_say_what_to_do(tmp_path, capsys, limits):
    work = replace(make_workload(pp=1, vp=1, microbatches=2, order="no_pipeline"), limits=limits)
    paths = {name: str(tmp_path / f"{name}.json") for name in ("w", "t", "s")}
    workload.save(paths["w"], work)
    cost.save(paths["t"], make_table(work, cpu=(1.0, 1e5), **WHOLE))
    files = ["--workload", paths["w"], "--cost-table", paths["t"], "--out", paths["s"]]
    assert cli.main(["plan", *files, "--explain", "no.such.parameter"]) == 2
    assert "--explain = 'no.such.parameter': no such group" in capsys.readouterr().err
    assert cli.main(["plan", *files, "--json", "--explain", "0"]) == 0
    out, error = capsys.readouterr()
    explained = json.loads(out)["explained"]["0"]
    assert explained in error and "\n  place: gathers per iteration: " in explained
    figures, (*said, fastest, host, add, last) = json.loads(out), error.splitlines()
    assert (
        last.startswith(f"verdict: {figures['answer']}") and sum("verdict" in line for line in error.splitlines()) == 1
    )
    ours, without = figures["iteration_time_us"], figures["without_plan"]
    helps_not = figures["helps"] is False and without["iteration_time_us"] <= ours * 1.01
    assert add == ("add: nothing" if helps_not else f"add: --user-defined-schedule {paths['s']}")
    first, second = sorted([(ours, "this schedule"), (without["iteration_time_us"], without["by"])])
    said_of = "; ".join(f"{us / 1e3:.3f} ms, {by}" for us, by in (first, second))
    assert fastest == f"fastest: {said_of}" and without["by"].startswith("stock Megatron with")
    held = figures["host_bytes_per_node"] if first[1] == "this schedule" else without["host_bytes"]
    assert host == f"host memory: {held / 2**30:.2f} GiB per node"
    near = limits.host_bytes is not None and figures["host_bytes_per_node"] > limits.host_bytes / 2
    assert (LIMIT_UNKNOWN in said) == near == (limits == NARROW)
    beside = "beyond the memory bill a device needs 0.9 GB for CUDA, 0.0 GB in a layer, and NCCL buffers"
    assert (beside in said) == (limits.device_bytes is not None)
