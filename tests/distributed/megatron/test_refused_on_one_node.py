"""A schedule that one node alone cannot read is refused by all ranks, with its line. No launcher ends ranks of another
node: they would wait in a collective until it fails, ten minutes later."""

import os

import pytest
from places import ROOT
from planning_cases import make_workload
from warm_python import WarmPython

from megatron_ext.planner.baselines import all_gpu
from megatron_ext.schedule import user_defined_schedule

PROGRAM = """
import os, sys
from types import SimpleNamespace
import torch.distributed as dist
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import hooks, refusals, workload_of_run
from megatron_ext.schedule import schedules

whole, own = sys.argv[1:]
refusals.refuse_unsupported = refusals.require_hooks = lambda *_: None
workload_of_run.parallel_of_megatron = lambda args: next(iter(schedules.load(whole).values())).parallel
hooks.arguments.of_run = lambda: SimpleNamespace(user_defined_schedule=own)
dist.init_process_group("gloo", init_method=f"file://{whole}.met", rank=int(os.environ["RANK"]), world_size=2)
try:
    print(hooks.active().state.value)
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize("lacks", [None, 0, 1])
def test_all_ranks_refuse_what_one_cannot_read(tmp_path, lacks):
    whole = tmp_path / "schedule.json"
    user_defined_schedule.save(whole, all_gpu(make_workload()))
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    places, ranks = [tmp_path / f"said.{rank}" for rank in range(2)], []
    for rank, place in enumerate(places):
        own = tmp_path / "gone" if rank == lacks else whole
        with place.open("w") as said:
            words = ["-c", PROGRAM, str(whole), str(own)]
            ranks.append(WarmPython(words, ROOT, shared | {"RANK": str(rank)}, said, 2))
    assert [rank.wait(100) for rank in ranks] == [0, 0]
    expected = "building" if lacks is None else f"{tmp_path / 'gone'}: cannot be read: No such file or directory"
    assert [place.read_text().strip() for place in places] == [expected] * 2
