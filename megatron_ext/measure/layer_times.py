"""Times the forward and the backward of every layer kind, on the modules that the caller gives.

This package knows no model. ``--modules package.module:function`` (or ``path/to/file.py:function``) names a
factory, which every rank's process calls after ``torch.distributed`` is initialised with all ranks of
the run::

    def layer_runners(args: list[str]) -> dict[str, Runner]

The keys are the layer kinds in execution order (``embedding``, ``transformer``, ``output``).
The values have ``forward()`` and ``backward()`` of one micro-batch through one such layer, with
the run's micro-batch size, sequence length and precision. ``backward()`` belongs to the last
``forward()`` and does everything that training does there for every micro-batch, including accumulation into
the gradient buffers. Both return nothing. On CUDA they may return before the device is done; this module waits for the
work that they issued. A runner may have three more attributes:

* ``dtype`` of its parameters, for which the table is then valid;
* ``visits``: the number of layers of its kind that one micro-batch passes through. ``forward()`` is then called that
  often in a row, each call for the next layer. ``backward()`` is called as often, each call for the last layer whose
  backward has not run yet;
* ``not_saved``: tensors (parameters, masks) that are not counted among those that autograd saves in a layer.

[Note: As cold as in training]
A single layer that runs again and again stays in the caches. In training it does not if all layers of a rank are
larger than the caches. Runners with as many layers as a rank has meet the same caches as training.

[Note: All ranks at once]
A table stores the time of a layer while every rank computes, with the run's number of threads. Ranks share memory,
power and, without a GPU, processors.
"""

import importlib
import sys
import traceback
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Protocol

import torch

from megatron_ext.cost.cost_table import Compute
from megatron_ext.formats.errors import InputError
from megatron_ext.measure.device_time import DeviceTimer
from megatron_ext.measure.sampling import p95
from megatron_ext.runtime.device import has_cuda
from megatron_ext.runtime.saved_tensors import SavedTensors


class Runner(Protocol):
    """One layer of a kind, with its own input of one micro-batch."""

    def forward(self) -> None:
        """Compute the output and keep the tensors for the backward. On CUDA it may return before the device is done."""

    def backward(self) -> None:
        """Compute the gradients of the input and the parameters, for the last forward."""


def load_runners(path: str, args: list[str]) -> Mapping[str, Runner]:
    """Call the factory at ``package.module:function`` or ``path/to/file.py:function``.

    A file's directory is put on ``sys.path``, as when it is run as a script.

    Raises:
        InputError: there is no such function, or its result does not have the form above.
    """
    module_name, _, name = path.partition(":")
    if module_name.endswith(".py"):
        file = Path(module_name).resolve()
        sys.path.insert(0, str(file.parent))
        module_name = file.stem
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # the module is the user's: it may fail in any way
        raise InputError(f"cannot be imported: {_told(error)}", file="--modules", value=path) from error
    if not callable(factory):
        raise InputError("is not a function", file="--modules", value=path)
    try:
        runners = factory(args)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"failed: {_told(error)}", file="--modules", value=path) from error
    if not isinstance(runners, Mapping) or not runners:
        raise InputError("did not return a mapping of layer kinds to runners", file="--modules", value=path)
    for kind, runner in runners.items():
        if not callable(getattr(runner, "forward", None)) or not callable(getattr(runner, "backward", None)):
            raise InputError(f"its runner for {kind!r} lacks forward() or backward()", file="--modules", value=path)
    return runners


def _told(error: BaseException) -> str:
    """The error in one line, with the file and line at which it was raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"


def on_cuda() -> bool:
    return has_cuda() and torch.cuda.is_initialized()


def measure_compute(
    runners: Mapping[str, Runner], repeats: int, *, warmup: int = 2, timer: DeviceTimer | None = None
) -> list[Compute]:
    """Median forward and backward of each kind, over ``repeats`` micro-batches through all of them:
    forwards in the order given, then backwards in reverse. ``timer``: one for several calls, on a device."""
    timer = (timer or DeviceTimer()) if on_cuda() else None
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    launches: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    def visit(kind: str, way: str, alone: bool) -> None:
        """Time all layers of a kind."""
        call = getattr(runners[kind], way)
        for _ in range(visits_of(runners[kind])):
            if timer is not None:
                us, launch_us = timer.time((kind, way), call, alone)
                launches[kind, way].append(launch_us)
            else:
                start = perf_counter()
                call()
                us = (perf_counter() - start) * 1e6
            times[kind, way].append(us)

    for number in range(warmup + repeats):
        for kind in runners:
            visit(kind, "forward", number < warmup)
        for kind in reversed(list(runners)):
            visit(kind, "backward", number < warmup)
    rows = []
    for kind, runner in runners.items():
        warm, figures = warmup * visits_of(runner), {}
        for way in ("forward", "backward"):
            us, launched = times[kind, way][warm:], launches[kind, way][warm:]  # no launches without a device
            figures |= {f"{way}_us": median(us), f"{way}_p95_us": p95(us)}
            figures[f"{way}_launch_us"] = median(launched) if launched else None
        activations, anew = saved_and_recomputed_bytes(runner)
        figures |= {"activation_bytes": activations, "recompute_bytes": anew}
        rows.append(Compute(layer_kind=kind, samples=repeats * visits_of(runner), **figures))
    return rows


def saved_and_recomputed_bytes(runner: Runner) -> tuple[int | None, int]:
    """(bytes that autograd saves in one layer for its backward, bytes that this backward recomputes). The first is None
    for a runner without ``not_saved``."""
    not_saved = getattr(runner, "not_saved", None)
    if not_saved is None:
        return None, 0
    visits = visits_of(runner)
    with SavedTensors(not_saved) as saved:
        runner.forward()
        activation_bytes = saved.bytes
        for _ in range(visits - 1):
            runner.forward()
        before = saved.bytes
        saved.restart()
        runner.backward()
        recompute_bytes = saved.peak - before
        for _ in range(visits - 1):
            runner.backward()
    return activation_bytes, recompute_bytes


def visits_of(runner: Runner) -> int:
    """The number of layers of its kind that a micro-batch passes through."""
    return getattr(runner, "visits", 1)


def micro_batch_us(rows: list[Compute], runners: Mapping[str, Runner]) -> float:
    """Forward and backward of one micro-batch through all layers, in microseconds."""
    return sum(
        (row.forward_us + row.backward_us) * visits_of(runners[row.layer_kind]) for row in rows if row.layer_kind
    )
