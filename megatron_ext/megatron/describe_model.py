"""The workload of a real model: its parameters, read from the modules that will train."""

import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
from megatron.core import parallel_state, tensor_parallel

from megatron_ext.formats.errors import InputError, one_line
from megatron_ext.megatron import releases
from megatron_ext.megatron.boundaries import bare, layers_of
from megatron_ext.megatron.gpt_arguments import batch_of, dtype_of, limits_of, parallel_of
from megatron_ext.megatron.megatron_on_cpu import norm_parts_of_sequences
from megatron_ext.megatron.refusals import refuse_model
from megatron_ext.megatron.saved_activations import balance_experts, with_saved_bytes
from megatron_ext.megatron.workload_of_run import experts_of, numbers_of_run, workload_of_run
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.gpt_shapes import p2p_bytes
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.whole_gradients import options_with_whole_gradients
from megatron_ext.workload.workload import Chunk, Parameter, Workload, check


def describe_chunk(chunk: torch.nn.Module, pp_rank: int, model_chunk_id: int) -> Chunk:
    """Parameters of a built model chunk (wrapped or bare) in execution order."""
    layers = layers_of(chunk)
    parameters = tuple(
        Parameter(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            bytes=parameter.numel() * parameter.element_size(),
            layer=index,
            shared_embedding=bool(getattr(parameter, "shared_embedding", False)),
            expert=not getattr(parameter, "allreduce", True),
            borrowed_by=tuple(number for number, other in enumerate(layers) if name in other.borrowed),
        )
        for index, layer in enumerate(layers)
        for name, parameter in layer.parameters
    )
    kinds = tuple(layer.kind for layer in layers)
    return Chunk(pp_rank=pp_rank, model_chunk_id=model_chunk_id, parameters=parameters, layer_kinds=kinds)


def size_without_tokenizer() -> None:
    """Let Megatron's script use ``--vocab-size`` if the tokenizer cannot be read here. The model needs only the size of
    the vocabulary."""
    module = sys.modules.get("megatron.training.global_vars")
    if module is None:  # no Megatron script is running
        return
    build = vars(module)["_build_tokenizer"]

    def built(args):
        try:
            return build(args)
        except Exception as error:
            if not args.vocab_size:
                raise
            said = f"cannot be read here ({one_line(str(error), 120)}); the vocabulary size is --vocab-size"
            print(f"megatron-ext: --tokenizer-type: {said} {args.vocab_size}", file=sys.stderr)
            args.tokenizer_type, args.vocab_size = "NullTokenizer", args.vocab_size - releases.null_tokenizer_adds()
            return build(args)

    vars(module)["_build_tokenizer"] = built


def describe_options(args) -> Workload:
    """The workload of the model that checked options describe, without training processes.

    Every pipeline rank's chunks are built one after another on the ``meta`` device, in a process group of torch's
    ``fake`` backend, which communicates nothing, so that a laptop can describe a model of any size.
    ``limits`` and ``zero_stage`` are those of the options, or their defaults.

    Raises:
        InputError: Megatron refuses the combination.
    """
    parallel, known = parallel_of(args), {}
    of_ranks = (_chunks_of_rank(args, parallel, pp_rank, known) for pp_rank in range(parallel.pp))
    return workload_of_chunks(args, [chunk for chunks in of_ranks for chunk in chunks])


def workload_of_chunks(args, chunks: list[Chunk]) -> Workload:
    """The workload of described chunks, for checked options."""
    workload = _of_options(args, chunks, tuple(args.ramp))
    return check(msgspec.structs.replace(workload, zero_stage=args.zero_stage, limits=limits_of(args)))


def workload_of_modules(args, modules: list[torch.nn.Module]) -> Workload:
    """The workload of one pipeline rank's chunks, for Megatron's own validated arguments.

    Args:
        modules: the chunks on the ``meta`` device; they cannot be used afterwards.

    Raises:
        InputError: a schedule cannot be combined with the model or the options.
    """
    for module in modules:
        refuse_model(bare(module))
    pp_rank, known = parallel_state.get_pipeline_model_parallel_rank(), {}
    chunks = [
        with_saved_bytes(describe_chunk(module, pp_rank, index), module, args, known)
        for index, module in enumerate(modules)
    ]
    return _of_options(args, chunks, numbers_of_run(args)[:-1])


def _of_options(args, chunks: list[Chunk], ramp: tuple[int, ...]) -> Workload:
    workload, item_bytes = workload_of_run(args), ITEM_BYTES[dtype_of(args)]
    streams = args.num_residual_streams if getattr(args, "enable_hyper_connections", False) else 1
    return msgspec.structs.replace(
        workload,
        p2p_bytes=p2p_bytes(workload.parallel, batch_of(args), streams * args.hidden_size, item_bytes),
        chunks=tuple(chunks),
        experts=experts_of(args),
        ramp=ramp,
        keeps_gradients=bool(options_with_whole_gradients(vars(args))),
    )


def _chunks_of_rank(args, parallel: Parallel, pp_rank: int, known: dict) -> list[Chunk]:
    from megatron_ext.megatron import gpt_model

    make_fake_world(parallel.global_rank(pp_rank, 0), parallel.world_size)
    try:
        with only_fake_groups():
            gpt_model.initialize_parallel(args)
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        norm_parts_of_sequences()
        config = gpt_model.transformer_config(args, use_cpu_initialization=True, perform_initialization=False)
        balance_experts(config)
        dtype = config.params_dtype
        with torch.device("meta"):
            built = gpt_model.build_chunks(args, config)
        # If it were passed to the constructor, Megatron would set environment variables.
        vars(config)["attention_backend"] = SimpleNamespace(name=getattr(args, "attention_backend", None))
        if args.transformer_impl != "local" and batch_of(args).loss_fusion == "te":
            vars(config).update(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
        # Precision wrappers convert every parameter.
        return [
            with_saved_bytes(describe_chunk(chunk.to(dtype), pp_rank, index), chunk, args, known)
            for index, chunk in enumerate(built)
        ]
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def make_fake_world(rank: int, world_size: int) -> None:
    """A default process group of torch's ``fake`` backend, which communicates nothing.

    Raises:
        InputError: this torch has no ``fake`` backend.
    """
    try:
        store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    except (ImportError, AttributeError):
        why = "has no `fake` process groups, which describing a model needs: use another release"
        raise InputError(why, field="torch", value=str(torch.__version__)) from None
    torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    _take_meta_tensors()


def _take_meta_tensors() -> None:
    """Let collectives accept tensors without data, as they do by themselves from some release after torch 2.6 on."""
    if _META_COLLECTIVES or importlib.util.find_spec("torch.distributed._meta_registrations"):
        return
    future: Any = torch.futures.Future()
    future.set_result(None)
    # A private name that only old releases have.
    done = importlib.import_module("torch._C._distributed_c10d")._create_work_from_future(future).boxed()
    _META_COLLECTIVES.append(torch.library.Library("c10d", "IMPL"))  # the registrations end with this object
    for name in "broadcast_ allreduce_ allgather_ reduce_scatter_ _allgather_base_ _reduce_scatter_base_".split():
        _META_COLLECTIVES[0].impl(name, lambda tensors, *_: (tensors, done), "Meta")
    for name in ("alltoall_base_", "send", "recv_"):
        _META_COLLECTIVES[0].impl(name, lambda *_: done, "Meta")


_META_COLLECTIVES: list[torch.library.Library] = []


def only_fake_groups():
    """In this context every process group has the ``fake`` backend. Megatron also makes groups over host memory,
    which would wait for other ranks in a single process."""
    new_group = torch.distributed.new_group

    def fake_group(*args, backend=None, **kwargs):
        return new_group(*args, **kwargs)

    return mock.patch.object(torch.distributed, "new_group", fake_group)
