"""Shared by the verbs with ``--checkout``: read the script's arguments, and find the workload and what to measure."""

import importlib.util
import os
import sys

import click
import msgspec

from megatron_ext.formats.errors import InputError, option_error
from megatron_ext.measure.options import Options
from megatron_ext.megatron import script_arguments
from megatron_ext.megatron.script_arguments import ScriptArguments
from megatron_ext.workload.launcher_ranks import ranks_on_this_node
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import expert_ranks

LAYER_RUNNERS = "megatron_ext.megatron.layer_runners:layer_runners"

ESTIMATE = "describe the model, and plan with a table of `cost estimate --hardware NAME`, which needs no layers"

checkout_option = click.option(
    "--checkout",
    help="A Megatron-LM checkout: its own pretrain_gpt.py reads the arguments after -- and builds the model.",
)


def given_on_the_command_line(*names: str) -> dict[str, object]:
    """The running verb's options among ``names`` that were given on the command line, with their values."""
    context = click.get_current_context()
    source = click.core.ParameterSource.COMMANDLINE
    return {name: context.params[name] for name in names if context.get_parameter_source(name) is source}


def use_megatron_of(checkout: str | None, entry: str | None = None) -> None:
    """Let this process, and processes that it starts, import the checkout's Megatron or else the installed one.

    Raises:
        InputError: there is no Megatron, or no PyTorch.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError("there is no package torch in this Python environment", file=sys.executable)
    if checkout:
        from megatron_ext.megatron.describe_from_checkout import require_script

        tree = str(require_script(checkout, entry)[0])
        path = [tree, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        sys.path.insert(0, tree)
    elif importlib.util.find_spec("megatron") is None:
        raise InputError("is needed to measure layers, because Megatron is not installed", field="--checkout")


def refuse_script(script: ScriptArguments, verb: str) -> None:
    """Refuse arguments whose model cannot be described, or, if ``verb`` runs the layers, cannot be timed here.

    Raises:
        InputError: naming the option and its value.
    """
    script_arguments.refuse_none(script)
    if verb in ("measure", "prepare"):  # they run the layers; describing and planning need only their shapes
        script_arguments.refuse_absent_engine(script.transformer_impl)
        from megatron_ext.runtime.device import has_cuda  # torch takes a while to import

        if (size := script.sizes.context_parallel_size or 1) > 1 and not has_cuda():
            why = f"on a CPU {verb} can time only layers that compute the whole sequence; {ESTIMATE}"
            raise option_error("context_parallel_size", why, size)


def refuse_early(script: ScriptArguments, options: Options) -> None:
    """Refuse to measure if the text of the script's arguments already shows that something is wrong.

    Raises:
        InputError: options of the verb contradict the arguments, or a size is out of range.
    """
    script_arguments.refuse_contradictions(given_on_the_command_line(*SAID), said_options(script))
    wanted = with_sizes(options, script)
    launched = os.environ.get("WORLD_SIZE") if "MASTER_ADDR" in os.environ else None
    if launched is not None and int(launched) != wanted.world_size:
        why = f"measuring needs {wanted.world_size} processes, as many as train: tensor x pipeline x data parallel"
        raise InputError(why, field="WORLD_SIZE", value=int(launched))
    wanted.check()


SAID = ("hidden_size", "seq_length", "micro_batch_size", "pipeline_model_parallel_size", "data_parallel_size")
SAID += ("tensor_model_parallel_size",)
"""Options of ``measure`` that a script's arguments also give."""


def said_options(script: ScriptArguments) -> dict[str, object]:
    """The values of the options :data:`SAID` in the script's arguments."""
    replicas = script.ours.data_parallel_size
    if replicas is None and "WORLD_SIZE" in os.environ:
        replicas = script.world_size() // script.replica_size
    if replicas is not None:  # parameters are sharded over context-parallel ranks as well
        replicas *= script.sizes.context_parallel_size or 1
    return {**vars(script.sizes), "data_parallel_size": replicas}


def with_sizes(options: Options, script: ScriptArguments) -> Options:
    """``options`` with the sizes that the script's arguments give."""
    found = {name: value for name, value in said_options(script).items() if name in SAID and value is not None}
    found["ranks_per_node"] = ranks_on_this_node() or options.ranks_per_node
    if instances := script.sizes.num_distributed_optimizer_instances:
        ranks = found.get("data_parallel_size", options.data_parallel_size)
        if ranks % instances:
            why = f"does not divide the {ranks} data-parallel ranks"
            raise option_error("num_distributed_optimizer_instances", why, instances)
        found |= {"data_parallel_size": ranks // instances, "num_distributed_optimizer_instances": instances}
    return msgspec.structs.replace(options, **found)


def of_experts(parallel: Parallel) -> int | None:
    """Number of ranks that share the same experts; None if it equals the number of data-parallel ranks."""
    return parallel.expert_dp if parallel.expert_dp != parallel.dp else None


def for_workload(options: Options, model) -> Options:
    """``options`` that measure everything that a plan for a checkout's model reads.

    Args:
        model: a :class:`megatron_ext.megatron.describe_from_checkout.CheckoutModel`.
    """
    from megatron_ext.megatron.layer_options import require_known_layers
    from megatron_ext.workload import measured_sizes

    workload = model.workload
    largest = max(measured_sizes.largest_group_bytes(workload), 512)
    changes: dict = {
        "min_bytes": 512,
        "max_bytes": largest,
        "max_rank_bytes": measured_sizes.largest_rank_bytes(workload),
        "also_sizes": tuple(size for size in measured_sizes.likely_group_bytes(workload) if size >= 512),
        "whole_part": measured_sizes.whole_part(workload),
        "expert_data_parallel_size": of_experts(workload.parallel) if expert_ranks(workload) else None,
        "pipeline_model_parallel_size": workload.parallel.pp,
        "data_parallel_size": workload.parallel.dp,
        "num_distributed_optimizer_instances": workload.parallel.instances,
        "optimizer_on_host": workload.optimizer.on_host or options.optimizer_on_host,
        "parameter_bytes": measured_sizes.parameter_bytes(workload),
        "sequence_parts": model.sequence_parts,
        "tensor_model_parallel_size": workload.parallel.tensor_model_parallel_size,
    }
    if options.modules is None:
        require_known_layers(model.layer_options, workload)
        changes |= {"modules": LAYER_RUNNERS, "module_args": model.layer_options}
    own = given_on_the_command_line("min_bytes", "max_bytes", "max_rank_bytes", "also_sizes")
    return msgspec.structs.replace(options, **{name: value for name, value in changes.items() if name not in own})
