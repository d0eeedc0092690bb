"""Program: write the workload of every model on every layout into a directory."""

import sys
from pathlib import Path

from megatron_ext.megatron import cpu_compat

cpu_compat.install()

from cases import ALL_LAYOUTS, EXPERT_LAYOUTS, EXPERTS, MODELS, SHAPES, SIZES, model_options

from megatron_ext.megatron import describe_model, ignored_options
from megatron_ext.workload import workload

if __name__ == "__main__":
    for layout, parallel in ALL_LAYOUTS.items():
        for name, options in (EXPERTS if layout in EXPERT_LAYOUTS else MODELS).items():
            if layout in EXPERT_LAYOUTS and layout != "experts" and "offload" in name:
                continue
            args = ignored_options.parse([*parallel, *model_options(options)])
            workload.save(Path(sys.argv[1]) / f"{layout}.{name}.json", describe_model.describe_options(args))
    for name, options in SHAPES.items():
        args = ignored_options.parse(f"{SIZES} {options}".split())
        workload.save(Path(sys.argv[1]) / f"shapes.{name}.json", describe_model.describe_options(args))
