"""Train one iteration of the example and write the steps that Megatron ran on this rank.

launch ... tests/workload/record_order.py FOLDER options of the example
"""

import os
import runpy
import sys
from pathlib import Path

from megatron_ext.megatron import cpu_compat

cpu_compat.install()  # before megatron is imported, as the example does

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_gpt_hybrid.py"
sys.path.insert(0, str(EXAMPLE.parent))  # as when it is run by itself

import pretrain_gpt_hybrid  # noqa: F401 - imported once for all ranks
from megatron.core.pipeline_parallel import schedules


def record(path: Path) -> None:
    """Wrap Megatron's own forward and backward step; ``path`` gets a line for each while it trains.

    A step is ``<kind><chunk>.<microbatch>``. What a backward belongs to is told by the very
    tensor that its forward returned.
    """
    seen, chunks, forwards = [], [], {}
    lines = open(path, "w", buffering=1)  # noqa: SIM115 - line by line: the example ends without returning
    forward_step, backward_step = schedules.forward_step, schedules.backward_step

    def forward(step_func, iterator, model, *args, **kwargs):
        result = forward_step(step_func, iterator, model, *args, **kwargs)
        if not any(model is chunk for chunk in chunks):
            chunks.append(model)
        number = next(index for index, chunk in enumerate(chunks) if chunk is model)
        tensor = result[0][0] if isinstance(result[0], (list, tuple)) else result[0]
        name = f"{number}.{sum(step.startswith(f'F{number}.') for step in seen)}"
        forwards[id(tensor)] = (tensor, name)  # kept, so that no other tensor gets its id
        if "current_microbatch" in kwargs:
            assert name == f"{number}.{kwargs['current_microbatch']}"
        seen.append("F" + name)
        print(seen[-1], file=lines)
        return result

    def backward(input_tensor, output_tensor, *args, **kwargs):
        tensor = output_tensor[0] if isinstance(output_tensor, (list, tuple)) else output_tensor
        print("B" + forwards[id(tensor)][1], file=lines)
        return backward_step(input_tensor, output_tensor, *args, **kwargs)

    schedules.forward_step, schedules.backward_step = forward, backward


if __name__ == "__main__":
    record(Path(sys.argv.pop(1)) / f"{os.environ['RANK']}.txt")
    sys.argv[0] = str(EXAMPLE)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
