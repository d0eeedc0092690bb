"""What every training program of the tier does first in each rank: paths, CPU compatibility, device, process groups.

Import it before anything of Megatron's.
"""

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "helpers"), str(ROOT / "examples")]

from megatron_ext.megatron import cpu_compat

cpu_compat.install()  # does nothing where there is a CUDA device

import torch
import torch.distributed as dist
from case_table import DRY_SIZES, ITERATIONS, LAYOUTS, SIZES, Training
from megatron.core import parallel_state

from megatron_ext.runtime import own_device
from megatron_ext.runtime.device import has_cuda


def options_of(case: Training, *, dry_run: bool, engine: bool, drive: str) -> list[str]:
    """The example's options for a case."""
    ranks, layout = LAYOUTS[case.layout]
    sizes = (DRY_SIZES if dry_run else SIZES)[case.size]
    text = f"{layout} {sizes} --untie-embeddings-and-output-weights --train-iters {ITERATIONS} --lr 1e-2 "
    text += "--fp16 --initial-loss-scale 1024 " if "overflow" in case.mode else "--bf16 "
    text += f"--clip-grad {'1e-2' if case.clip == 'active' else '1e9'} "
    text += "--optimizer-cpu-offload " if case.on_host else ""
    text += "--delayed-parameter-update 1 " if case.mode == "delayed" else ""
    text += f"--transformer-impl {'transformer_engine' if engine else 'local'} "
    text += f"--gpus-per-node {ranks}"
    return [*text.split(), "--user-defined-schedule-nvme-path", drive]


def start(args):
    """Device and process groups of this rank for checked arguments; returns a group of gloo for objects. Collective."""
    if has_cuda():
        device = own_device.take(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", timeout=timedelta(minutes=5))
        print(f"ranks on the fullest device: {own_device.tell_nccl(device)}", flush=True)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
    )
    return dist.new_group(backend="gloo")


def leave(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and end with its code: taking process groups down in order takes seconds, and nobody needs them."""
    code = 1
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
