"""What is timed is what the run does."""

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.measure import contention, nvme_route, operations
from megatron_ext.measure.nvme_route import NvmeRead, NvmeStage
from megatron_ext.measure.operations import Reduce
from megatron_ext.measure.options import Options
from megatron_ext.measure.run_step import RunStep, RunStepCastOnDevice
from megatron_ext.measure.timed_steps import DeviceStep, HostOptimizer, Optimizer, TimedHostStep
from megatron_ext.runtime.device import HostDevice


class Calls(TorchDispatchMode):
    """Names of what is called, with the elements of the first tensor; of copies dtypes and storages, to and from."""

    def __init__(self):
        super().__init__()
        self.made, self.dtypes, self.storages = [], [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        self.made.append((function.overloadpacket.__name__, 0 if first is None else first.numel()))
        if function.overloadpacket.__name__ == "copy_":
            self.dtypes.append((args[0].dtype, args[1].dtype))
            self.storages.append([one.untyped_storage().data_ptr() for one in args[:2]])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("parameter_bytes", (2, 4))
def test_gradients_are_divided_before_they_are_summed_and_do_not_fade(tmp_path, parameter_bytes):
    """They are float32, twice the bytes of 16-bit parameters."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        arena = torch.ones(4096)
        fabric = SimpleNamespace(
            data=dist.group.WORLD,
            instances=None,
            options=Options(parameter_bytes=parameter_bytes),
            arena=arena,
            window=lambda memory, size, round_index: memory[: size // 4],
            shard=lambda whole, ranks: whole,
        )
        reduce = Reduce(fabric)
        with Calls() as calls:
            for round_index in range(200):
                reduce.issue(4096, round_index).wait()
    finally:
        dist.destroy_process_group()
    made = [call for call in calls.made if call[0] == "mul_" or "reduce_scatter" in call[0]]
    assert made[::2] == [("mul_", 4096 // parameter_bytes)] * 200  # the whole group, every round
    assert len(made) == 400 and all("reduce_scatter" in name for name, _ in made[1::2])
    assert arena.eq(1.0).all()


@pytest.mark.parametrize("parameter_bytes", (2, 4))
def test_the_optimizer_steps_as_many_elements_as_the_parameters_have(parameter_bytes):
    """This rank's shard, half of them: gradients are scaled, parameters written; all gradients are zeroed."""
    options = Options(parameter_bytes=parameter_bytes, hidden_size=1024, device="cpu")
    operation = Optimizer(SimpleNamespace(options=options, torch_device=torch.device("cpu")))
    with Calls() as calls:
        operation.issue(8192, 0).wait()
    assert [call for call in calls.made if call[0] == "copy_"] == [("copy_", 4096 // parameter_bytes)] * 2
    assert ("zero_", 8192 // parameter_bytes) in calls.made


FULL, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "there", "back", "whole"),
    [
        (TimedHostStep, 4, [(HALF, FULL)], []),
        (DeviceStep, 0, [(HALF, FULL)], []),
        (HostOptimizer, 4, [(HALF, FULL)], [("zero_", 2048)]),
    ],
)
def test_the_step_of_this_rank_s_shard_of_16_bit_parameters(kind, there, back, whole):
    """Of two ranks, in tensors as large as a weight: gradients there, one fused step, parameters back through what they
    are cast in. The whole optimizer clips on the device and zeroes gradients."""
    fabric = SimpleNamespace(
        options=SimpleNamespace(data_parallel_size=2, hidden_size=16, whole_part=1.0),
        device=HostDevice(),
        torch_device=torch.device("cpu"),
    )
    operation = kind(fabric)
    operation.issue(4096, 0).wait()
    with Calls() as calls:
        operation.issue(4096, 1).wait()
    names = [name for name, _ in calls.made if name in ("copy_", "_fused_adamw_")]
    assert names == ["copy_"] * there + ["_fused_adamw_"] + ["copy_"] * 4 * len(back)
    assert all(call == ("copy_", 256) for call in calls.made if call[0] == "copy_")  # 1,024 elements
    assert calls.dtypes[there:] == back * 4
    assert [call for call in calls.made if call == ("zero_", 2048)] == whole
    assert operation.gradients[0].dtype == torch.float32


class Locks(HostDevice):
    """Notes what it page-locks."""

    def __init__(self):
        self.storages = []

    def host_tensor(self, numel, dtype):
        tensor = super().host_tensor(numel, dtype)
        self.storages.append(tensor.untyped_storage().data_ptr())
        return tensor


def test_of_megatron_s_host_step_gradients_alone_are_page_locked():
    """Parameters are fp32 copies that it makes of page-locked ones: 8 GB/s of them reach an H200, and not 55."""
    options, device = SimpleNamespace(data_parallel_size=1, hidden_size=16), Locks()
    operation = TimedHostStep(SimpleNamespace(options=options, device=device, torch_device=torch.device("cpu")))
    operation.issue(4096, 0).wait()
    with Calls() as calls:
        operation.issue(4096, 1).wait()
    there, back = calls.storages[: len(device.storages)], calls.storages[len(device.storages) :]
    assert [to for to, _ in there] == device.storages and len(back) == len(there)
    assert not {source for _, source in back} & {*device.storages}


def storages() -> dict[int, int]:
    """Bytes of the storages behind all tensors of this process."""
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    return {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}


@pytest.mark.parametrize("kind", [Optimizer, TimedHostStep, DeviceStep, HostOptimizer, RunStep, RunStepCastOnDevice])
def test_a_step_says_what_it_makes_and_holds_nothing_behind_its_visit(kind, request):
    options = Options(parameter_bytes=2, hidden_size=256, device="cpu", optimizer_on_host=True)
    operation = kind(SimpleNamespace(options=options, device=HostDevice(), torch_device=torch.device("cpu")))
    operation.issue(4096, 0).wait()  # what torch imports with the first step keeps some of it
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    operation.drop()
    before = storages()
    for size in (1 << 22, 1 << 23):
        operation.issue(size, 0).wait()
        made = sum(held for key, held in storages().items() if key not in before)
        assert 0.8 * sum(operation.made_bytes(size)) < made < 1.15 * sum(operation.made_bytes(size))
        operation.drop()
        assert sum(held for key, held in storages().items() if key not in before) < 1 << 16


@pytest.mark.parametrize("kind", [RunStep, RunStepCastOnDevice])
def test_the_run_s_step_is_its_own_code_in_as_many_calls_as_slots_are_filled(kind):
    """Four tensors of 16 x 16 in slots of one each: four calls, each of one tensor; the parameters are new."""
    options = SimpleNamespace(data_parallel_size=2, hidden_size=16)
    operation = kind(SimpleNamespace(options=options, device=HostDevice(), torch_device=torch.device("cpu")))
    operation.issue(4096, 0).wait()
    with Calls() as calls:
        operation.issue(4096, 1).wait()
    assert [name for name, _ in calls.made].count("_fused_adamw_") == 4
    pieces = [piece for unit in operation.units for piece in unit.pieces]
    operation.close()
    assert sum(piece.parameter.numel() for piece in pieces) == 1024
    for piece in pieces:
        assert torch.equal(piece.shard, piece.parameter.to(torch.bfloat16)) and piece.parameter.max() < 1.0


def test_the_host_s_step_is_measured_where_the_optimizer_steps_there():
    fabric = SimpleNamespace(options=Options(), pipe=None, torch_device=torch.device("cpu"))
    assert not any("host_step" in pair for pair in contention.pairs(fabric))
    fabric.options = Options(optimizer_on_host=True)
    found = {pair for pair in contention.pairs(fabric) if "host_step" in pair}
    others = {"compute", "publish", "reduce"}
    assert found == {(other, "host_step") for other in others} | {("host_step", other) for other in others}
    fabric.torch_device = SimpleNamespace(type="cuda")  # where copies of one direction held each other up
    on_gpu = {pair for pair in contention.pairs(fabric) if "host_step" in pair}
    assert on_gpu == {pair for pair in found if "publish" not in pair}


def test_without_a_way_to_issue_collectives_as_one_they_are_issued_one_by_one(monkeypatch):
    monkeypatch.delattr(operations.distributed_c10d, "_coalescing_manager")
    with operations.coalesced(None) as issued:
        pass
    assert issued.wait() is None


@pytest.mark.parametrize(("kind", "largest"), [(NvmeRead, 2 << 30), (NvmeStage, 256 << 20)])
def test_contention_fills_no_file_for_the_largest_group(monkeypatch, kind, largest):
    """All ranks of a node would write tens of gigabytes each, twice, within a quarter of the measurement."""
    filled, made = [], SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(nvme_route, "open_filled", lambda directory, size, **how: filled.append(size) or made)
    fabric = SimpleNamespace(
        arena_bytes=2 << 30, options=Options(nvme_path="."), device=HostDevice(), arena=None, busy_arena=lambda: None
    )
    for busy in (False, True):
        operation = kind(fabric, busy=busy)
        assert operation.offset(64 << 20, 1) == 64 << 20 and len(operation.slot) == largest
        operation.close()
    assert filled == [largest] * 2
