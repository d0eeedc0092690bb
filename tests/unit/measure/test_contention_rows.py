"""What a row of contention is made of."""

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
