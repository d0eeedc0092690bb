"""Two collectives of one gloo process group at a time damage the heap; one after another do not."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from places import HELPERS
from training import run

from megatron_ext.cpubench import ordered_collectives


def race(how: str, seconds: int):
    program = HELPERS / "gloo_race.py"
    return run(
        [sys.executable, "-m", "megatron_ext.launch.launcher", "--nproc-per-node", "2", str(program), how, str(seconds)]
    )


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", (3, 15))
def test_collectives_in_order_leave_the_heap_alone(seconds):
    """As shipped, the same program is ended by SIGSEGV or SIGABRT after 5 to 30 s."""
    result = race("in-order", seconds)
    assert result.returncode == 0, result.stderr


def test_every_way_to_a_group_gives_one_thread(monkeypatch):
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupGloo", dist.distributed_c10d.ProcessGroupGloo)
    ordered_collectives.install()
    ordered_collectives.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for group in (dist.group.WORLD, dist.new_group([0])):
            backend = group._get_backend(torch.device("cpu"))
            assert backend.name() == "gloo" and backend.options._threads == 1
    finally:
        dist.destroy_process_group()


def test_what_newer_releases_of_torch_give_reaches_the_options(monkeypatch):
    """torch 2.14 calls the class with ``enable_reconfigure``."""

    class Newer:
        _Options, create_default_device, create_device = SimpleNamespace, lambda: "device", lambda interface: interface

        def __init__(self, store, rank, size, options):
            self.options = options

    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupGloo", Newer)
    ordered_collectives.install()
    maker: Any = dist.distributed_c10d.ProcessGroupGloo
    made = maker(None, 0, 1, timeout=dist.default_pg_timeout, enable_reconfigure=True)
    assert made.options.enable_reconfigure and made.options._threads == 1
