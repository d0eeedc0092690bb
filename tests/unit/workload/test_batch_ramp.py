"""Numbers of micro-batches are those that Megatron's own calculator comes to."""

from types import SimpleNamespace

import pytest
from megatron.core import num_microbatches_calculator as calculator

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import ignored_options
from megatron_ext.megatron.workload_of_run import numbers_of_run
from megatron_ext.workload.batch_ramp import numbers_of_microbatches


def options(**more) -> SimpleNamespace:
    sizes = {"micro_batch_size": 2, "data_parallel_size": 2, "global_batch_size": 32, "seq_length": 8}
    return SimpleNamespace(**(sizes | more))


def by_megatron(args, begun: int = 0, last: int = 2000) -> tuple[int, ...]:
    """In order, what the calculator says from ``begun`` to ``last`` consumed samples."""
    sizes = (args.global_batch_size, args.micro_batch_size, args.data_parallel_size)
    calculator.init_num_microbatches_calculator(
        0, args.rampup_batch_size, *sizes, getattr(args, "decrease_batch_size_if_needed", False)
    )
    try:
        found, consumed = [], begun
        while consumed < last:
            calculator.update_num_microbatches(consumed)
            found.append(calculator.get_num_microbatches())
            consumed += calculator.get_current_global_batch_size()
    finally:
        calculator.unset_num_microbatches_calculator()
    return tuple(dict.fromkeys(found))


@pytest.mark.parametrize("ramp", [[8, 8, 1000], [4, 4, 700], [32, 8, 0], [16, 16, 300]])
@pytest.mark.parametrize("begun", [0, 333, 1500])
def test_a_ramp_reaches_what_megatron_reaches(ramp, begun):
    if ramp[0] == 32:  # Megatron divides by its number of increments
        assert numbers_of_run(options(rampup_batch_size=ramp)) == (8,)
    else:
        args = options(rampup_batch_size=ramp)
        assert numbers_of_run(args, begun) == by_megatron(args, begun)


def test_a_batch_that_is_decreased_grows_in_fewer_numbers():
    args = options(rampup_batch_size=[6, 2, 1000], decrease_batch_size_if_needed=True)
    assert numbers_of_run(args) == by_megatron(args)
    assert numbers_of_microbatches(args) == (1, 2, 3, 4, 5, 6, 7, 8)
    args.decrease_batch_size_if_needed = False
    with pytest.raises(
        InputError, match="--rampup-batch-size = '6 2 1000': reaches a batch of 6, which is not a multiple"
    ):
        numbers_of_microbatches(args)


def test_steps_are_at_tokens_as_later_releases_read_them():
    """As StepBatchsizeNumMicroBatchesCalculator of core_v0.18.0 parses and converts them."""
    args = options(step_batch_size_schedule="0:8 1.6K:16, 4K:32")
    assert numbers_of_microbatches(args) == (2, 4, 8)
    assert numbers_of_microbatches(args, 199) == (2, 4, 8)
    assert numbers_of_microbatches(args, 200) == (4, 8)
    assert numbers_of_microbatches(args, 500) == (8,)
    assert numbers_of_microbatches(options(step_batch_size_schedule=["0:32", "1M:8"])) == (8, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rampup_batch_size": ["8", "x", "9"]}, "--rampup-batch-size = '8 x 9': expected three whole numbers"),
        ({"rampup_batch_size": [8, 8]}, "expected three whole numbers"),
        ({"rampup_batch_size": [8, 7, 100]}, "in whole increments"),
        ({"rampup_batch_size": [64, 8, 100]}, "lead to --global-batch-size 32"),
        ({"rampup_batch_size": [1, 1, 100], "global_batch_size": 4096, "micro_batch_size": 1, "data_parallel_size": 1},
         "at most 256 can be planned"),
        ({"step_batch_size_schedule": "8:8"}, "--step-batch-size-schedule = '?8:8'?: expected a first entry at 0"),
        ({"step_batch_size_schedule": "0:8 12"}, "expected entries TOKENS:BATCH_SIZE"),
        ({"step_batch_size_schedule": "0:-8"}, "positive batch sizes"),
    ],
)  # fmt: skip
def test_what_is_no_ramp_is_refused_by_name(given, said):
    with pytest.raises(InputError, match=said):
        numbers_of_microbatches(options(**given))


def test_without_a_checkout_the_ramp_is_described_too():
    sizes = "--data-parallel-size 2 --micro-batch-size 1 --global-batch-size 16".split()
    args = ignored_options.parse([*sizes, "--rampup-batch-size", "4", "4", "100"])
    assert (args.ramp, args.num_microbatches) == ([2, 4, 6], 8)
