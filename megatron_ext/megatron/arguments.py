"""The options that the patch adds to Megatron, and the parsed arguments of the run."""

import sys
from typing import Any

OPTIONS = {
    "--user-defined-schedule FILE": "Gather parameters by this schedule (made by `megatron-ext plan`) instead of "
    "Megatron's own rule. If the batch grows, give a directory with one schedule for each number of micro-batches.",
    "--user-defined-schedule-trace FILE": "Write a trace of the run in Chrome's format. This also works without a "
    "schedule.",
    "--user-defined-schedule-nvme-path DIR": "Directory on the drive for NVMe copies of parameters and for optimizer "
    "states, if the schedule has any.",
    "--user-defined-schedule-check FILE": "Equality check. If FILE does not exist, train with Megatron's own gather at "
    "the schedule's bucket layout and write FILE. Otherwise train by the schedule, and fail if the result differs from "
    "FILE in any bit.",
    "--user-defined-schedule-step-timeout SECONDS": "If no step of an iteration has ended for this long, print the "
    "state of every group and thread and end the scheduled run; 0: never. Default: nine tenths of "
    "--distributed-timeout-minutes.",
    "--delayed-parameter-update N": "From iteration N + 1 on, step the host's optimizer (--optimizer-cpu-offload) "
    "during the next iteration, whose parameters then lack this update. This changes training. Default: never.",
}
"""What ``--help`` says of each option, by the option and the name of its value."""

TYPES = {"SECONDS": float, "N": int}
"""Types of values; all others are text."""


def add_arguments(parser):
    """Add the options of user-defined schedules to an argparse parser, and return it."""
    group = parser.add_argument_group(title="user-defined schedule")
    for option, help in OPTIONS.items():
        name, value = option.split()
        group.add_argument(name, metavar=value, type=TYPES.get(value, str), help=help)
    return parser


def of_run() -> Any:
    """Megatron's parsed arguments; None before they are parsed, or if no Megatron script is running."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
