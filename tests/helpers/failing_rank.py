"""Program: the example on random tokens, on ranks one of which meets a fault of its drive or is killed while it saves.

``python failing_rank.py RANK FAULT NUMBER [OPTIONS]``. FAULT: one of ``drive_faults.FAULTS``, at the first request from
the NUMBER-th iteration on; ``saving``: killed in the middle of the NUMBER-th file from the second checkpoint on;
``lock``: the driver page-locks NUMBER of Megatron's own tensors; ``lock later``: so many from the setup on;
``described``: its layers are none that can be described; ``none``. Numbers begin at 0.
"""

import itertools
import os
import signal
import sys

import drive_faults
import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from parity_worker import pretrain_gpt_hybrid
from random_rows import Rows

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import building_run, hooks


def kill_while_saving(number: int) -> None:
    """Kill this process when the ``number``-th file, from 0, is half written."""
    save, numbers = torch.save, itertools.count()

    class Dying:
        def __init__(self, file):
            self.file, self.flush = file, file.flush

        def write(self, data) -> int:
            self.file.write(memoryview(data)[: len(data) // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

    torch.save = lambda content, file: save(content, Dying(file) if next(numbers) == number else file)


def lock_no_more_than(number: int) -> None:
    numbers = itertools.count()

    def lock(tensor, *_):
        if next(numbers) >= number:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
        return tensor

    torch.Tensor.pin_memory = lock


def cannot_be_described(*_):
    raise InputError("a stage has no output", field="its layers")


def at_iteration(number: int, call) -> None:
    run_schedule, numbers = pretrain_gpt_hybrid.run_schedule, itertools.count()

    def run(*args, **kwargs):
        if next(numbers) == number:
            call()
        return run_schedule(*args, **kwargs)

    pretrain_gpt_hybrid.run_schedule = run


if __name__ == "__main__":
    rank, fault, number, *options = sys.argv[1:]
    if int(os.environ["RANK"]) == int(rank) and fault == "saving":
        at_iteration(1, lambda: kill_while_saving(int(number)))
    elif int(os.environ["RANK"]) == int(rank) and fault == "lock":
        lock_no_more_than(int(number))
    elif int(os.environ["RANK"]) == int(rank) and fault == "lock later":
        HybridDeviceOptimizer.pin_cpu_grads = property(lambda _: True, lambda *_: None)  # the CPU bench locks none
        set_up = hooks.on_train_setup
        hooks.on_train_setup = lambda *given: (lock_no_more_than(int(number)), set_up(*given))
    elif int(os.environ["RANK"]) == int(rank) and fault == "described":
        building_run.describe_chunk = cannot_be_described
    elif int(os.environ["RANK"]) == int(rank) and fault != "none":
        at_iteration(int(number), lambda: drive_faults.install(fault, 0))
    pretrain_gpt_hybrid.build_datasets = lambda args: (Rows(args), Rows(args))
    pretrain_gpt_hybrid.corpus.check = lambda *_: None
    sys.argv = ["failing_rank", "--data-path", "none", *options]
    pretrain_gpt_hybrid.run()
