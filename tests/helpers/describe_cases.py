"""Program: ``describe_cases.py FOLDER [LAYOUT | LAYOUT.MODEL ...]`` writes the workload of every model on every
layout, or those that are named, into a directory."""

import sys
from pathlib import Path

from megatron_ext.megatron import cpu_compat

cpu_compat.install()

from cases import ALL_LAYOUTS, EXPERT_LAYOUTS, EXPERTS, MODELS, SHAPES, SIZES, model_options

from megatron_ext.megatron import describe_model, ignored_options
from megatron_ext.workload import workload

if __name__ == "__main__":
    folder, only = Path(sys.argv[1]), {*sys.argv[2:]}
    for layout, parallel in ALL_LAYOUTS.items():
        for name, options in (EXPERTS if layout in EXPERT_LAYOUTS else MODELS).items():
            if layout in EXPERT_LAYOUTS and layout != "experts" and "offload" in name:
                continue
            if only and not {layout, f"{layout}.{name}"} & only:
                continue
            args = ignored_options.parse([*parallel, *model_options(options), "--distributed-backend", "gloo"])
            workload.save(folder / f"{layout}.{name}.json", describe_model.describe_options(args))
    for name, options in SHAPES.items():
        if only and not {"shapes", f"shapes.{name}"} & only:
            continue
        args = ignored_options.parse(f"{SIZES} {options}".split())
        workload.save(folder / f"shapes.{name}.json", describe_model.describe_options(args))
