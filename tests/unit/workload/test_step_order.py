"""The order of steps against what Megatron was seen to run."""

import pytest
from parallel_sizes import sized

from megatron_ext.workload.step import Step
from megatron_ext.workload.step_order import num_warmup, schedule_table, steps_of_ranks


def parallel(pp, vp, microbatches, order, group=None):
    return sized(pp=pp, vp=vp, dp=1, microbatches=microbatches, order=order, group=group)


def test_interleaved_order_is_that_of_a_traced_run():
    """Rank 0 of PP 2, VP 2, 4 micro-batches, as hooks in core_v0.10 ... v0.19 recorded it:
    number of the virtual micro-batch, then the chunk."""
    seen = "F0.0 F1.0 F2.1 F3.1 F4.0 b0.1 F5.0 b1.1 F6.1 b2.0 F7.1 b3.0 b4.1 b5.1 b6.0 b7.0".split()
    table = schedule_table(4, 2, 2)
    expected = []
    for entry in seen:
        number, chunk = map(int, entry[1:].split("."))
        microbatch = table[number][0]
        expected.append(f"{chunk * 2}{entry[0].upper()}{microbatch}")
    assert [str(step) for step in steps_of_ranks(parallel(2, 2, 4, "interleaved"))[0]] == expected


def test_last_micro_batch_group_may_be_smaller():
    assert schedule_table(5, 2, 3) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]


def test_1f1b_and_gpipe_and_no_pipeline():
    texts = lambda p: [" ".join(map(str, steps)) for steps in steps_of_ranks(p)]
    assert texts(parallel(2, 1, 3, "1f1b")) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert texts(parallel(2, 1, 2, "gpipe")) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert texts(parallel(1, 1, 2, "no_pipeline")) == ["0F0 0B0 0F1 0B1"]


@pytest.mark.parametrize("shape", [(2, 2, 4, None), (4, 3, 9, 5), (3, 2, 7, 4), (4, 2, 8, 8)])
def test_every_step_runs_once_and_after_what_it_needs(shape):
    pp, vp, microbatches, group = shape
    sizes = parallel(pp, vp, microbatches, "interleaved", group)
    ranks = steps_of_ranks(sizes)
    for rank, steps in enumerate(ranks):
        assert len(set(steps)) == len(steps) == 2 * vp * microbatches
        warmup = num_warmup(sizes, rank)
        assert (
            all(step.kind == "F" for step in steps[: warmup + 1]) and steps[min(warmup + 1, len(steps) - 1)].kind == "B"
        )
    # Running every rank in its order never blocks for ever.
    position, done = [0] * pp, set()
    while any(position[r] < len(ranks[r]) for r in range(pp)):
        before = len(done)
        for rank in range(pp):
            while position[rank] < len(ranks[rank]):
                step = ranks[rank][position[rank]]
                if step.kind == "F":
                    needs = step._replace(stage=step.stage - 1) if step.stage else None
                else:
                    last = step.stage == pp * vp - 1
                    needs = Step(step.stage, "F", step.microbatch) if last else step._replace(stage=step.stage + 1)
                if needs is not None and needs not in done:
                    break
                done.add(step)
                position[rank] += 1
        assert len(done) > before


def test_steps_print_and_parse():
    assert Step.parse("17B3") == Step(17, "B", 3) and str(Step(17, "B", 3)) == "17B3"
    for text in ("", "1X2", "F3", "1F", "1F2 ", "-1F2"):
        with pytest.raises(ValueError):
            Step.parse(text)
