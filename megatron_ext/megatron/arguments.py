"""The options that the patch adds to Megatron, and the parsed arguments of the run."""

import sys
from typing import Any


def add_arguments(parser):
    """Add the options of user-defined schedules to an argparse parser, and return it."""
    group = parser.add_argument_group(title="user-defined schedule")
    group.add_argument(
        "--user-defined-schedule",
        metavar="FILE",
        help="Gather parameters by this schedule (made by `megatron-ext plan`) instead of Megatron's own rule. A "
        "directory holds a schedule for every number of micro-batches that a growing batch reaches.",
    )
    group.add_argument(
        "--user-defined-schedule-trace",
        metavar="FILE",
        help="Write a trace of what ran when, in Chrome's format. Works without a schedule as well.",
    )
    group.add_argument(
        "--user-defined-schedule-nvme-path",
        metavar="DIR",
        help="Directory on the drive for NVMe copies of parameters; used by schedules with the nvme route.",
    )
    group.add_argument(
        "--user-defined-schedule-check",
        metavar="FILE",
        help="Equality check. While FILE is not there, train with Megatron's own gather at the schedule's bucket "
        "layout and write FILE; afterwards train by the schedule, and fail where it differs from FILE in any bit.",
    )
    group.add_argument(
        "--user-defined-schedule-step-timeout",
        metavar="SECONDS",
        type=float,
        help="End a scheduled run, and say what every group and thread is doing, when no step has ended for so long "
        "within an iteration; 0: never. Default: nine tenths of --distributed-timeout-minutes.",
    )
    group.add_argument(
        "--delayed-parameter-update",
        metavar="N",
        type=int,
        help="After N iterations, step the host's optimizer (--optimizer-cpu-offload) during the next iteration, whose "
        "parameters are then one update old. Changes training. Default: never.",
    )
    return parser


def of_run() -> Any:
    """Megatron's parsed arguments; None before they are parsed, or if no Megatron script is running."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
