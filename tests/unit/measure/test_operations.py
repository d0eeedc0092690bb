"""What is timed is what the run does."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.measure.operations import Reduce


class Calls(TorchDispatchMode):
    """Names of what is called, with the elements of the first tensor."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        self.made.append((function.overloadpacket.__name__, 0 if first is None else first.numel()))
        return function(*args, **(kwargs or {}))


def test_gradients_are_divided_before_they_are_summed_and_do_not_fade(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        arena = torch.ones(4096)
        fabric = SimpleNamespace(
            data=dist.group.WORLD,
            arena=arena,
            window=lambda memory, size, round_index: memory[: size // 4],
            shard=lambda whole: whole,
        )
        reduce = Reduce(fabric)
        with Calls() as calls:
            for round_index in range(200):
                reduce.issue(4096, round_index).wait()
    finally:
        dist.destroy_process_group()
    made = [call for call in calls.made if call[0] == "mul_" or "reduce_scatter" in call[0]]
    assert made[::2] == [("mul_", 1024)] * 200  # the whole group, every round
    assert len(made) == 400 and all("reduce_scatter" in name for name, _ in made[1::2])
    assert arena.eq(1.0).all()
