"""The numbers of micro-batches that iterations have when options let the batch grow in the course of training."""

from typing import NamedTuple, NoReturn

from megatron_ext.formats.errors import option_error

RAMPUP, STEPS = "rampup_batch_size", "step_batch_size_schedule"
SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
"""Suffixes of numbers in --step-batch-size-schedule, as Megatron's num_microbatches_calculator reads them."""

MOST_NUMBERS = 256
"""Largest count of different numbers of micro-batches in one training: each has a schedule of its own."""


class Stage(NamedTuple):
    """A global batch has ``batch_size`` samples after ``first_sample`` samples have been consumed."""

    first_sample: float
    batch_size: int


def numbers_of_microbatches(args, consumed_samples: int = 0) -> tuple[int, ...]:
    """Every number of micro-batches that an iteration has after ``consumed_samples``, the final one last.

    Args:
        args: Megatron's options or those of ``describe``, with ``global_batch_size``.

    Raises:
        InputError: an option does not have Megatron's form, or a batch size is not a multiple of the micro-batch size
            times the data-parallel size.
    """
    stages = _stages(args)
    left = [stage for stage, behind in zip(stages, stages[1:]) if behind.first_sample > consumed_samples]
    divisor = args.micro_batch_size * (args.data_parallel_size or 1)
    numbers = []
    for stage in [*left, stages[-1]]:
        rest = stage.batch_size % divisor
        if stage.batch_size < divisor or (rest and not getattr(args, "decrease_batch_size_if_needed", False)):
            changes = any(getattr(args, name, None) for name in (RAMPUP, STEPS))
            which = f"reaches a batch of {stage.batch_size}, which is" if changes else "is"
            of = f"micro-batch size {args.micro_batch_size} times data-parallel size {args.data_parallel_size}"
            _refuse(args, f"{which} not a multiple of {of}")
        numbers.append(stage.batch_size // divisor)
    found = tuple(dict.fromkeys(numbers[::-1]))[::-1]
    if len(found) > MOST_NUMBERS:
        _refuse(args, f"reaches {len(found)} different numbers of micro-batches; at most {MOST_NUMBERS} can be planned")
    return found


def _stages(args) -> list[Stage]:
    if getattr(args, STEPS, None):
        return _steps(args)
    if not getattr(args, RAMPUP, None):
        return [Stage(0, args.global_batch_size)]
    try:
        start, increment, samples = map(int, getattr(args, RAMPUP))
    except ValueError:
        _refuse(args, "expected three whole numbers: first batch size, increment, samples")
    last = args.global_batch_size
    if not 0 < start <= last or increment < 1 or samples < 0 or (last - start) % increment:
        _refuse(args, f"expected positive sizes that lead to --global-batch-size {last} in whole increments")
    count = (last - start) // increment
    return [Stage(samples * n / max(count, 1), start + n * increment) for n in range(count + 1)]


def _steps(args) -> list[Stage]:
    given = getattr(args, STEPS)
    text = given if isinstance(given, str) else " ".join(given)
    try:
        pairs = [[_number(part) for part in entry.split(":")] for entry in text.replace(",", " ").split()]
        stages = sorted(Stage(first // args.seq_length, size) for first, size in pairs)
    except ValueError:
        _refuse(args, "expected entries TOKENS:BATCH_SIZE, separated by blanks")
    if not stages or stages[0].first_sample or min(stage.batch_size for stage in stages) < 1:
        _refuse(args, "expected a first entry at 0 tokens, and positive batch sizes")
    return stages


def _number(text: str) -> int:
    text = text.strip().upper()
    factor = SUFFIXES.get(text[-1:], 1)
    return int(float(text if factor == 1 else text[:-1]) * factor)


def _refuse(args, message: str) -> NoReturn:
    name = STEPS if getattr(args, STEPS, None) else RAMPUP
    value = getattr(args, name, None)
    if value is None:
        name, value = "global_batch_size", args.global_batch_size
    shown = value if isinstance(value, (str, int)) else " ".join(map(str, value))
    raise option_error(name, message, shown)
