"""Program: write the workload of every model on every layout into a directory."""

import sys
from pathlib import Path

from megatron_ext.cpubench import cpu_compat

cpu_compat.install()

import expert_model
from cases import ALL_LAYOUTS, EXPERT_LAYOUTS, EXPERTS, MODELS, SHAPES, SIZES, model_options

from megatron_ext.megatron import describe_model, gpt_arguments, ignored_options
from megatron_ext.workload import workload

if __name__ == "__main__":
    for layout, parallel in ALL_LAYOUTS.items():
        if layout in EXPERT_LAYOUTS:
            continue
        for name, options in MODELS.items():
            args = ignored_options.parse([*parallel, *model_options(options)])
            workload.save(Path(sys.argv[1]) / f"{layout}.{name}.json", describe_model.describe_options(args))
    for name, options in SHAPES.items():
        args = ignored_options.parse(f"{SIZES} {options}".split())
        workload.save(Path(sys.argv[1]) / f"shapes.{name}.json", describe_model.describe_options(args))
    expert_model.install()
    for layout, parallel in EXPERT_LAYOUTS.items():
        for name, options in EXPERTS.items():
            if layout != "experts" and "offload" in name:
                continue
            parser = gpt_arguments.add_gpt_arguments(gpt_arguments.OneLineParser())
            args = gpt_arguments.add_plan_arguments(parser).parse_args([*parallel, *model_options(options)])
            gpt_arguments.check(args)
            workload.save(Path(sys.argv[1]) / f"{layout}.{name}.json", describe_model.describe_options(args))
