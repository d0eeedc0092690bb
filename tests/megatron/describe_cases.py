"""Program: write the workload of every model on every layout into a directory."""

import sys
from pathlib import Path

from megatron_ext.megatron import cpu_compat

cpu_compat.install()

from cases import LAYOUTS, MODELS

from megatron_ext.megatron import describe
from megatron_ext.workload import model

TRAINING = {"--lr": 1, "--log-interval": 1, "--initial-loss-scale": 1, "--optimizer-cpu-offload": 0}
"""Options that only training knows, with the number of their values."""


def model_options(options: list[str]) -> list[str]:
    """Without the options that only training knows."""
    kept, rest = [], iter(options)
    for option in rest:
        if option in TRAINING:
            for _ in range(TRAINING[option]):
                next(rest)
        else:
            kept.append(option)
    return kept


if __name__ == "__main__":
    for layout, parallel in LAYOUTS.items():
        for name, options in MODELS.items():
            args = describe.parse([*parallel, *model_options(options)])
            model.save(Path(sys.argv[1]) / f"{layout}.{name}.json", describe.describe_options(args))
