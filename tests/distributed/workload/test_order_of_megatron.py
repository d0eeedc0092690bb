"""The order of steps against the installed megatron-core: its table function, and real runs."""

import json
import sys
from itertools import product

import pytest
from parallel_sizes import sized
from places import HELPERS
from training import SMALL, ranks_command, run_warm

from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.step_order import num_warmup, schedule_table, steps_of_ranks

ASK_MEGATRON = """
import json, sys
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

class Communicator:
    def __init__(self, pp, vp, rank):
        self.virtual_pipeline_model_parallel_size, self.rank_, self.size_ = vp, rank, pp
        self.pp_group = self
    def size(self): return self.size_
    def rank(self): return self.rank_

answers = []
for pp, vp, microbatches, group in json.load(open(sys.argv[1])):
    table = get_schedule_table(microbatches, vp, group)
    warmup = [
        get_pp_rank_microbatches(
            microbatches, vp, group, p2p_communicator=Communicator(pp, vp if vp > 1 else None, rank)
        )[2]
        for rank in range(pp)
    ]
    answers.append((table, warmup))
json.dump(answers, sys.stdout)
"""


def sizes(pp, vp, microbatches, group=None) -> Parallel:
    return sized(pp=pp, vp=vp, dp=1, microbatches=microbatches, group=group)


def test_table_and_warm_up_are_those_of_megatron_core(megatron_tree, tmp_path):
    """All shapes up to PP 6, VP 4, 13 micro-batches, any group size from PP on, smaller last groups too."""
    shapes = [
        (pp, vp, microbatches, group)
        for pp, vp, microbatches in product((2, 3, 6), (1, 2, 4), range(1, 14))
        for group in ({pp, pp + 1, max(pp, microbatches)} if vp > 1 else {pp})
        if vp == 1 or microbatches >= pp
    ]
    given = tmp_path / "shapes.json"
    given.write_text(json.dumps(shapes))
    (tmp_path / "ask.py").write_text(ASK_MEGATRON)
    answer = run_warm([sys.executable, str(tmp_path / "ask.py"), str(given)])
    assert answer.returncode == 0, answer.stderr
    answers = json.loads(answer.stdout.splitlines()[-1])
    for (pp, vp, microbatches, group), (table, warmup) in zip(shapes, answers, strict=True):
        parallel = sizes(pp, vp, microbatches, group if vp > 1 else None)
        assert schedule_table(microbatches, vp, group) == [tuple(entry) for entry in table]
        assert [num_warmup(parallel, rank) for rank in range(pp)] == warmup, (pp, vp, microbatches, group)


@pytest.mark.parametrize("shape", [(2, 2, 5, 3), (2, 2, 4, 2), (2, 1, 3, None), (1, 1, 3, None)], ids=str)
def test_steps_are_those_of_a_real_run(shape, corpus_prefix, tmp_path):
    pp, vp, microbatches, group = shape
    layout = f"--pipeline-model-parallel-size {pp} --micro-batch-size 1 --global-batch-size {microbatches}"
    if vp > 1:
        layout += f" --num-virtual-stages-per-pipeline-rank {vp}"
        layout += f" --microbatch-group-size-per-virtual-pipeline-stage {group}"
    program = HELPERS / "record_order.py"
    options = [tmp_path, *SMALL, *layout.split(), "--data-path", corpus_prefix, "--train-iters", "1"]
    result = run_warm(ranks_command(str(program), options, pp))
    assert result.returncode == 0, result.stderr
    for rank, steps in enumerate(steps_of_ranks(sizes(pp, vp, microbatches, group))):
        seen = (tmp_path / f"{rank}.txt").read_text().split()
        assert seen == [f"{step.kind}{step.stage // pp}.{step.microbatch}" for step in steps]
