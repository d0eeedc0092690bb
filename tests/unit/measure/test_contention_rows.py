"""What a row of contention is made of."""

from types import SimpleNamespace

import torch
from gathered import as_ranks_do

from megatron_ext.measure import contention
from megatron_ext.measure.options import Options

TWO_NODES = Options(data_parallel_size=4, ranks_per_node=2)


def test_what_a_row_of_contention_is_made_of():
    """Alone the ranks end at 1, 2, 3 and 4; beside another link the last ends at 6."""
    everyone = [({"gpu": [float(rank)]}, {("gpu", "publish"): [1.5 * rank]}) for rank in (1, 2, 3, 4)]
    assert contention.slowed(("gpu", "publish"), TWO_NODES, everyone) == (6.0, 1.5)
    everyone[3] = ({"gpu": [4.0]}, {("gpu", "publish"): [12.0]})
    assert contention.slowed(("gpu", "publish"), TWO_NODES, everyone) == (12.0, 3.0)


def test_two_collectives_at_once_are_not_measured_where_one_queue_could_hold_them_up(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    unsafe = contention.unsafe_pairs("cuda")
    assert ("gpu", "reduce") in unsafe and ("p2p", "gpu") in unsafe and len(unsafe) == 6
    assert contention.unsafe_pairs("cpu") == []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert contention.unsafe_pairs("cuda") == []


def test_rows_are_there_when_a_busy_link_is_done(monkeypatch):
    """Where the next one hangs, they are not lost."""

    def link(name):
        return lambda fabric, busy=False: SimpleNamespace(name=name, messages=1, close=lambda: None)

    class Busy:
        running = None

        def __init__(self, fabric, operation, size):
            self.operation = operation

        def start(self):
            Busy.running = self.operation.name

        def stop(self):
            Busy.running = None

    def sample(fabric, operation, *args, **more):
        return SimpleNamespace(us=[20.0 if Busy.running == "cpu" else 30.0 if Busy.running else 10.0])

    monkeypatch.setattr(contention, "kinds", lambda fabric: {name: link(name) for name in ("gpu", "cpu")})
    monkeypatch.setattr(contention, "Busy", Busy)
    monkeypatch.setattr(contention, "sample", sample)
    as_ranks_do(monkeypatch, lambda own: [own])
    fabric = SimpleNamespace(options=Options(data_parallel_size=1), rank=0, world_size=1, agree=lambda value: value)
    fabric.torch_device, seen = torch.device("cpu"), []
    pairs = [("gpu", "cpu"), ("cpu", "gpu")]
    rows = contention.run(fabric, pairs, 60.0, lambda pair: None, so_far=seen.append)
    assert [row["slowdown"] for row in rows] == [2.0, 3.0] and seen == [rows[:1], rows]
