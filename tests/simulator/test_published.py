"""Published tables come out of the simulator and the planner, with no fitted constant but
those that the reference says to fit."""

import json
from pathlib import Path

import msgspec
import pytest

from megatron_ext.cost import model as cost
from megatron_ext.planner import plan
from megatron_ext.simulator import simulate
from megatron_ext.workload import model as workload
from megatron_ext.workload.parallel import Parallel

DATA = Path(__file__).parent.parent / "data"


def rows(name: str) -> list[dict]:
    return json.loads((DATA / f"published_{name}.json").read_text())["rows"]


def line(bytes_per_us: float, sizes=(1, 1 << 40)) -> cost.Curve:
    return cost.Curve(points=tuple(cost.Point(size_bytes=s, p50_us=s / bytes_per_us) for s in sizes))


def pipeline(row: dict, vp: int, order: str):
    """Workload without parameters and a table of compute and p2p only."""
    pp = row["pipeline_parallel_size"]
    work = workload.check(
        workload.Workload(
            schema_version=1, kind="workload", zero_stage=1, chunks=(), p2p_bytes=4096,
            parallel=Parallel(
                pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vp, data_parallel_size=1,
                num_microbatches=row["num_microbatches"], order=order,
            ),
        )
    )  # fmt: skip
    backward = row["backward_input_ms"] + row["backward_weight_ms"]
    table = cost.check(
        cost.CostTable(
            schema_version=1, kind="cost_table",
            compute=tuple(
                cost.Compute(pp_rank=r, model_chunk_id=c, forward_us=1e3 * row["forward_ms"] / vp, backward_us=1e3 * backward / vp)
                for r in range(pp) for c in range(vp)
            ),
            p2p=(cost.Point(size_bytes=4096, p50_us=1e3 * row["p2p_ms"]),),
        )
    )  # fmt: skip
    return work, table


@pytest.mark.parametrize("row", rows("bubble_rates"), ids=lambda r: f"{r['model']}-{r['num_microbatches']}")
def test_bubble_rates(row):
    one = simulate(*pipeline(row, 1, "1f1b"))
    assert one.bubble_rate == pytest.approx(row["bubble_rate_1f1b"], abs=1e-4)
    many = simulate(*pipeline(row, row["virtual_stages"], "interleaved"))
    assert many.bubble_rate == pytest.approx(row["bubble_rate_interleaved"], rel=0.05)


def layered(number: int, size: int, *, zero_stage: int, device_layers=None) -> workload.Workload:
    """One rank, one chunk of ``number`` layers with one parameter of ``size`` bytes each."""
    parameters = tuple(
        workload.Parameter(name=f"layers.{n}.weight", shape=(size // 2,), dtype="bfloat16", bytes=size, layer=n) for n in range(number)
    )
    limit = None if device_layers is None else device_layers * size
    return workload.check(
        workload.Workload(
            schema_version=1, kind="workload", zero_stage=zero_stage,
            chunks=(workload.Chunk(pp_rank=0, model_chunk_id=0, parameters=parameters),),
            parallel=Parallel(pipeline_model_parallel_size=1, data_parallel_size=8, num_microbatches=1, order="no_pipeline"),
            limits=workload.Limits(device_bytes=limit),
        )
    )  # fmt: skip


@pytest.mark.parametrize("row", rows("link_splits"), ids=lambda r: f"{r['collective']}-{r['world_size']}")
def test_link_splits(row):
    """With PCIe and NIC as the second link, the planner moves the published share and gains what
    the publication gains."""
    share = row["pcie_share"] + row["nic_share"]
    rate = row["nccl_gb_s"] * 1e3  # bytes a microsecond
    work = layered(200, 1 << 20, zero_stage=1)
    # All parameters at one layer: nothing but the links decides.
    one_layer = tuple(msgspec.structs.replace(parameter, layer=0) for parameter in work.chunks[0].parameters)
    work = msgspec.structs.replace(work, chunks=(msgspec.structs.replace(work.chunks[0], parameters=one_layer),))
    table = cost.check(
        cost.CostTable(
            schema_version=1, kind="cost_table", routes=cost.Routes(gpu=line(rate), cpu=line(rate * share / (1 - share))),
            publish=cost.Publish(cpu=line(1e12)),
            compute=(cost.Compute(pp_rank=0, model_chunk_id=0, forward_us=1e-3, backward_us=1e-3),),
        )
    )  # fmt: skip
    planned = plan(work, table)
    moved = sum(planned.groups[entry.group].bytes for entry in planned.publish)
    total = sum(g.bytes for g in planned.groups)
    assert moved / total == pytest.approx(share, abs=0.03)
    speed_up = planned.predicted.baselines_us["all-gpu"] / planned.predicted.step_time_us
    assert speed_up == pytest.approx(row["multi_link_gb_s"] / row["nccl_gb_s"], rel=0.04)
    assert speed_up == pytest.approx(1 / (1 - share), rel=0.04)


def zero3_step(gather_us: float, compute_us: float, *, overlap: bool) -> float:
    """Step time of 120 layers that are gathered twice an iteration; without room for a second
    layer nothing can overlap."""
    layers, size = 120, 1 << 20
    work = layered(layers, size, zero_stage=3, device_layers=3 if overlap else 1)
    table = cost.check(
        cost.CostTable(
            schema_version=1, kind="cost_table", routes=cost.Routes(gpu=line(2 * layers * size / gather_us)),
            compute=(cost.Compute(pp_rank=0, model_chunk_id=0, forward_us=compute_us / 3, backward_us=compute_us * 2 / 3),),
        )
    )  # fmt: skip
    return simulate(work, table).step_time_us


@pytest.mark.parametrize("row", rows("zero3_floor"), ids=lambda r: r["model"])
def test_zero3_floor(row):
    """Compute is fitted where it is the limit (4), the gather where it is (2); 1 is predicted."""
    us = {m: m / t * 1e6 for m, t in zip(row["microbatch"], row["tflops_per_gpu"])}
    predicted = zero3_step(us[2], us[4] / 4, overlap=True)
    assert predicted == pytest.approx(us[1], rel=0.03)
    # Twice the compute that fits beside the gathers is not hidden by them.
    assert zero3_step(us[2], 2 * us[4], overlap=True) == pytest.approx(2 * us[4], rel=0.03)


@pytest.mark.parametrize("row", rows("bandwidth_sweep"), ids=lambda r: r["model"])
def test_bandwidth_sweep(row):
    """Gathers in the way of compute: two figures fitted on 100 and 800 Gb/s, the others predicted."""
    us = {int(rate): 1e6 / t for rate, t in row["zero3"].items()}
    gather = (us[100] - us[800]) / (1 / 100 - 1 / 800)  # us times Gb/s
    compute = us[100] - gather / 100
    for rate in (200, 400):
        assert zero3_step(gather / rate, compute, overlap=False) == pytest.approx(us[rate], rel=0.12)
    for rate, tflops in row["zeropp_quarter_volume"].items():
        assert zero3_step(gather / 4 / int(rate), compute, overlap=False) == pytest.approx(1e6 / tflops, rel=0.20)
