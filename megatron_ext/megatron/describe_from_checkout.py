"""The workload of the model that a checkout's own pretrain_gpt.py, or another script, builds from a full command line.

[Note: Megatron up to its model]
The script itself runs, once for each pipeline rank, until it has passed its last chunk to DistributedDataParallel. It
runs in a process group of torch's ``fake`` backend, which communicates nothing. So every option means what it
means in training with that release, and Megatron's own parser refuses misspelt options. The model is
built on the ``meta`` device, so a laptop can describe a model of any size. Nothing is compiled, loaded or
written, and options that only change how something is computed on a GPU are turned off.

The program starts in a process of its own, because the checkout's Megatron may differ from the one
that is already imported. It imports the checkout once and forks one process per pipeline rank.
"""

import argparse
import contextlib
import faulthandler
import functools
import importlib
import os
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_ext.cpubench import parser_options
from megatron_ext.formats import json_files
from megatron_ext.formats.end_with_parent import end_with_parent
from megatron_ext.formats.errors import InputError, option_error
from megatron_ext.launch.launcher import START_SECONDS, TIME_IS_UP
from megatron_ext.megatron import script_arguments
from megatron_ext.megatron.arguments import of_run
from megatron_ext.megatron.gpt_arguments import limits_of
from megatron_ext.megatron.layer_options import options_of_layers
from megatron_ext.megatron.optimizer_of_args import refuse_delay_on_device
from megatron_ext.megatron.recompute import refuse_together
from megatron_ext.workload.workload import Workload, check

SCRIPT = "pretrain_gpt.py"


class Described(msgspec.Struct, forbid_unknown_fields=True):
    """The result of one pipeline rank's process: a workload with only this rank's chunks, or why Megatron refused."""

    error: str | None = None
    workload: Workload | None = None
    layer_options: tuple[str, ...] = ()


class CheckoutModel(NamedTuple):
    """The model that a checkout's own script builds.

    Attributes:
        workload: the workload of all ranks' chunks.
        layer_options: options with which ``layer_runners`` builds the layers of one rank, for undivided sequences.
        sequence_parts: the number of context-parallel ranks that a sequence is divided among.
    """

    workload: Workload
    layer_options: tuple[str, ...]
    sequence_parts: int = 1


def describe_command_line(tree, options, entry=None) -> "CheckoutModel":
    """The workload of the model that a script trains by ``options`` with ``tree``'s Megatron, and how its layers are
    built.

    Args:
        tree: root of a Megatron-LM checkout, patched or not.
        options: all options that a user gives the script, those of ``gpt_arguments.add_plan_arguments``,
            ``--data-parallel-size`` and ``--gpus-per-node``.
        entry: see :func:`require_script`.

    Raises:
        InputError: Megatron refuses the options, or a schedule cannot be combined with them.
    """
    tree, path = require_script(tree, entry)
    script = script_arguments.read(options)
    ours, pp = script.ours, script.sizes.pipeline_model_parallel_size
    found = _run(tree, path, pp, script.world_size(), script.megatron)
    first = found[0].workload
    assert first is not None  # no rank refused, so each has a workload
    chosen = dict(zip(found[0].layer_options, found[0].layer_options[1:]))
    refuse_together(ours.zero_stage, chosen.get("--recompute-method"), int(chosen.get("--recompute-num-layers", 1)))
    refuse_delay_on_device(ours.delayed_parameter_update, first.optimizer.on_host)
    chunks = [chunk for rank in found if rank.workload is not None for chunk in rank.workload.chunks]
    workload = msgspec.structs.replace(
        first,
        parallel=msgspec.structs.replace(first.parallel, gpus_per_node=ours.gpus_per_node),
        zero_stage=ours.zero_stage,
        chunks=tuple(sorted(chunks, key=lambda chunk: (chunk.model_chunk_id, chunk.pp_rank))),
        limits=limits_of(ours),
        optimizer=msgspec.structs.replace(first.optimizer, delayed=ours.delayed_parameter_update is not None),
    )
    return CheckoutModel(check(workload), found[0].layer_options, script.sizes.context_parallel_size or 1)


def require_script(tree, entry=None) -> tuple[Path, Path]:
    """The absolute paths of a checkout and of the script that trains with it.

    Args:
        entry: path of the script, relative to the working directory or to the root of the checkout; by default the
            checkout's pretrain_gpt.py.

    Raises:
        InputError: there is no such script, or no ``megatron/training`` in the checkout.
    """
    tree = Path(tree).resolve()
    if entry is not None:
        found = [path for path in (Path(entry).resolve(), tree / entry) if os.path.isfile(path)]
        if not found:
            raise InputError("no such file, neither here nor in the checkout", field="--entry", value=str(entry))
        if not os.path.isdir(tree / "megatron" / "training"):
            raise InputError("has no megatron/training, which the script needs", file=tree, field="--checkout")
        return tree, found[0]
    if not os.path.isfile(tree / SCRIPT):
        hint = f"has no {SCRIPT}; give the root of a Megatron-LM checkout, and the training script with --entry"
        raise InputError(hint, file=tree, field="--checkout")
    return tree, tree / SCRIPT


def _run(tree: Path, script: Path, pp: int, world_size: int, options: list[str]) -> list[Described]:
    """The chunks of every pipeline rank."""
    ours = Path(__file__).parents[2]
    path = os.pathsep.join([str(tree), str(ours), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    # Describing needs no GPU, and must give the same result with and without one.
    environment |= {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    # --deterministic-mode requires this.
    environment |= {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    parent = os.getpid()
    with tempfile.TemporaryFile() as written:  # unnamed, so it is gone however this process ends
        command = [sys.executable, "-m", __name__, tree, script, written.fileno(), pp, world_size, *options]
        result = subprocess.run(
            list(map(str, command)),
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            pass_fds=[written.fileno()],
            preexec_fn=lambda: end_with_parent(parent),
        )
        written.seek(0)
        found = [json_files.decode(line, Described, file=tree) for line in written]
    refused = next((rank.error for rank in found if rank.error is not None), None)
    if refused is not None:
        raise InputError(refused, file=script)
    if TIME_IS_UP in result.stderr:
        raise InputError(f"importing Megatron or building a model takes more than {START_SECONDS:g} s", file=script)
    if len(found) < pp:
        said = [line for line in result.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise InputError(f"{script.name} ended with {result.returncode}: {said[-1][:200]}", file=tree)
    for line in dict.fromkeys(line for line in result.stderr.splitlines() if line.startswith("megatron-ext: ")):
        print(line, file=sys.stderr)  # every rank says the same
    return found


OFF = "te_rng_tracker log_max_attention_logit record_memory_history high_priority_stream_groups skip_train log_progress"
"""Options that change no layer and are turned off, besides the two in ``check``. Transformer Engine's tracker and the
record of memory need a device. The logit needs another Transformer Engine than the stand-in. Settings of NCCL's groups
need a PyTorch with NCCL, and their file may be only where training runs. Only the model of training is passed to
DistributedDataParallel. The others write to the files of a training."""

# In the process that imports the checkout.


class _Built(BaseException):
    """Every chunk of this rank is built; not an error that Megatron may catch."""


@contextlib.contextmanager
def _on_meta():
    """In this context every tensor is made on the ``meta`` device, whatever device is asked for."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if function is torch.Tensor.tolist and "dispatcher" in sys._getframe(1).f_globals["__name__"]:
                return [*range(args[0].numel())]  # an order of experts, to which no size belongs
            return function(*args, **(kwargs | {"device": "meta"} if "device" in kwargs else kwargs))

    with torch.device("meta"), Mode():
        yield


def _run_script(tree: Path, script: Path, rank: int, world_size: int, options: list[str]) -> Described:
    """Run the script as rank ``rank`` until its model is built.

    Raises:
        InputError: Megatron or we refuse the options.
    """
    from megatron_ext.megatron.describe_model import (
        make_fake_world,
        only_fake_groups,
        size_without_tokenizer,
        workload_of_modules,
    )

    # One node, whatever a launcher says of this process; the caller knows how many there are.
    ranks = str(world_size)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    make_fake_world(rank, world_size)
    chunks = []
    _stop_at_model(chunks)
    _leave_no_trace()
    size_without_tokenizer()
    _parse_for_no_gpu(options)
    sys.argv = [str(script), *options]
    sys.path[:0] = list(dict.fromkeys((str(script.parent), str(tree))))
    with only_fake_groups():
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except _Built:
            return Described(workload=workload_of_modules(of_run(), chunks), layer_options=options_of_layers(of_run()))
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(_reason(error)) from error
    raise InputError(f"{script.name} ended without building a model")


def _parse_for_no_gpu(options: list[str]) -> None:
    """Let every parser raise InputError, and turn off kernels that may not be installed."""
    from megatron_ext.megatron.refusals import refuse_combinations

    if "--inprocess-restart" in options:  # the script needs its ranks before it parses its options for training
        refuse_combinations(argparse.Namespace(inprocess_restart=True))

    def refuse(self, message):
        raise InputError(message + "; if a fork has them, give its checkout" * message.startswith("unrecognized"))

    def check(args):
        # KERNELS turn this fusion off, but on a GPU it is on, and it changes which activations layers save.
        args.bias_swiglu_fusion = args.distributed_backend == "nccl" and "--no-bias-swiglu-fusion" not in options
        off = dict.fromkeys(OFF.split(), False)
        vars(args).update(off, config_logger_dir="", nccl_communicator_config_path=None)
        refuse_combinations(args)
        if len(getattr(args, "spec", None) or ()) == 2:  # without this module Megatron's error does not name it
            importlib.import_module(args.spec[0])
        ranks = int(os.environ["WORLD_SIZE"]) // args.tensor_model_parallel_size // args.pipeline_model_parallel_size
        if ranks % (instances := getattr(args, "num_distributed_optimizer_instances", 1)):
            why = f"does not divide the {ranks} data-parallel ranks (x context)"  # Megatron's error names no option
            raise option_error("num_distributed_optimizer_instances", why, instances)

    parser_options.add_to_parsers(parser_options.KERNELS, check)
    argparse.ArgumentParser.error = refuse


def _stop_at_model(chunks: list) -> None:
    """Collect the modules that are passed to DistributedDataParallel, and end with the last one."""
    import torch
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import MegatronModule

    from megatron_ext.megatron.megatron_on_cpu import norm_parts_of_sequences
    from megatron_ext.megatron.refusals import refuse_unsupported
    from megatron_ext.megatron.saved_activations import balance_experts

    norm_parts_of_sequences()

    training, begin = sys.modules.get("megatron.training.training"), MegatronModule.__init__

    def on_meta(build):
        @functools.wraps(build)
        def build_on_meta(*args, **kwargs):
            if (run := of_run()) is None:
                raise InputError("does not use megatron.training's arguments (Megatron-Bridge, NeMo): not supported")
            refuse_unsupported(run)
            with _on_meta():
                return build(*args, **kwargs)

        return build_on_meta

    @functools.wraps(begin)
    def begin_without_values(self, config, *args, **kwargs):
        config.perform_initialization = False  # the values are not used
        balance_experts(config)
        begin(self, config, *args, **kwargs)

    @functools.wraps(DistributedDataParallel.__init__)
    def collect(self, config, ddp_config, module, *args, **kwargs):
        torch.nn.Module.__init__(self)
        chunks.append(module)
        if len(chunks) == (of_run().virtual_pipeline_model_parallel_size or 1):
            raise _Built

    MegatronModule.__init__ = begin_without_values
    if (get_model := getattr(training, "get_model", None)) is not None:
        vars(training)["get_model"] = lambda model_provider_func, *args, **kwargs: get_model(
            on_meta(model_provider_func), *args, **kwargs
        )
    GPTModel.__init__ = on_meta(GPTModel.__init__)  # whichever code builds the model
    DistributedDataParallel.__init__ = collect


def _leave_no_trace() -> None:
    """Turn off the parts of Megatron's start that compile into the checkout, run on a device, or start a writer or a
    process."""
    for module, names in (
        ("core.datasets.utils", "compile_helpers"),
        # Buffers of --tp-comm-overlap need a device; warming up fused functions would run them at full size.
        ("training.initialize", "_initialize_tp_communicators _warmup_jit_function init_persistent_async_worker"),
        ("training.global_vars", "_set_tensorboard_writer _set_wandb_writer _set_one_logger"),
    ):
        with contextlib.suppress(ImportError):
            for name in names.split():
                setattr(importlib.import_module(f"megatron.{module}"), name, lambda *_, **__: None)


def _reason(error: BaseException) -> str:
    """Why Megatron gave up, in one line."""
    if isinstance(error, ModuleNotFoundError) and error.name:  # without a name, Megatron raised it, and it says enough
        return (
            f"there is no Python package {error.name}, which this checkout imports; describe where it trains, "
            "or install what training scripts import with megatron-ext: pip install -e 'megatron-ext[checkout]'"
        )
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    # Many of Megatron's assertions have no text: then the condition is the best explanation.
    at = traceback.extract_tb(error.__traceback__)[-1]
    if re.search(r"(\bTE\b|[Tt]ransformer.[Ee]ngine).*\d", said):
        said += " (describing uses a stand-in for it, of an older version: leave the option out)"
    return (
        f"Megatron refuses the options: {type(error).__name__}: {said or at.line} "
        f"({Path(at.filename).name}, line {at.lineno})"
    )[:400]


def main() -> int:
    """``TREE SCRIPT DESCRIPTOR PP WORLD_SIZE OPTION...``: write one line for every pipeline rank, until one refuses."""
    tree, script, written, pp, world_size = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:6])
    options = sys.argv[6:]
    faulthandler.dump_traceback_later(START_SECONDS, file=2, exit=True)
    from megatron_ext.megatron import cpu_compat, engine_modules, state_space_modules

    state_space_modules.install()

    if script_arguments.read(options).transformer_impl in (None, "transformer_engine"):
        engine_modules.install()
    cpu_compat.install(even_with_a_device=True)
    with contextlib.suppress(Exception):  # if the import fails, the script will report why
        importlib.import_module("megatron.training.training")
    parent = os.getpid()
    for pp_rank in range(pp):
        faulthandler.dump_traceback_later(START_SECONDS, file=2, exit=True)  # the rank ends with this process
        pid = os.fork()
        if pid == 0:
            end_with_parent(parent)
            code = 1
            try:
                try:
                    found = _run_script(tree, script, pp_rank * world_size // pp, world_size, options)
                except InputError as error:
                    found = Described(error=str(error))
                with os.fdopen(written, "wb") as stream:
                    stream.write(json_files.encode(found))
                code = 0 if found.error is None else 2
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        if status:
            return status >> 8 or 128 + (status & 127)  # as a shell says that a signal has ended a process
    return 0


if __name__ == "__main__":
    sys.exit(main())
