"""A training script's command line, read as text, before anything is imported or measured.

This needs neither torch nor Megatron. ``describe_from_checkout`` finds out what Megatron itself makes of the options.
"""

import argparse
import importlib.util
import math
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megatron_ext.formats.errors import InputError, flag, option_error
from megatron_ext.megatron.gpt_arguments import OneLineParser, add_plan_arguments

MODEL_SIZES = ("hidden_size", "seq_length", "micro_batch_size", "num_experts", "num_distributed_optimizer_instances")
REPLICA_SIZES = ("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size")


class ScriptArguments(NamedTuple):
    """Arguments of a training script, and our options that were given among them.

    Attributes:
        ours: the options of ``gpt_arguments.add_plan_arguments``, ``data_parallel_size``, ``gpus_per_node`` and
            ``delayed_parameter_update``.
        megatron: all other options, which are Megatron's. Options of a scheduled run are left out.
        sizes: the values of :data:`MODEL_SIZES` and :data:`REPLICA_SIZES` in the text; None for a model size that is
            not given.
        schedule, transformer_impl: values of these options (``--user-defined-schedule``), or None.
    """

    ours: argparse.Namespace
    megatron: list[str]
    sizes: argparse.Namespace
    schedule: str | None
    transformer_impl: str | None

    @property
    def replica_size(self) -> int:
        """The number of ranks of one data-parallel replica."""
        return math.prod(getattr(self.sizes, name) or 1 for name in REPLICA_SIZES)

    def world_size(self) -> int:
        """The number of all ranks: from the options, from a launcher that has started this process, or of one replica.

        Raises:
            InputError: a launcher's value is not a number, or not a multiple of a replica's ranks.
        """
        if self.ours.data_parallel_size is not None:
            return self.replica_size * self.ours.data_parallel_size
        text = os.environ.get("WORLD_SIZE", str(self.replica_size))
        if not text.isdecimal() or not int(text):
            raise InputError("expected the number of processes", field="WORLD_SIZE", value=text)
        if int(text) % self.replica_size:
            said = f"is no multiple of a replica's {self.replica_size} ranks (PP x TP x CP); give --data-parallel-size"
            raise InputError(said, field="WORLD_SIZE", value=int(text))
        return int(text)

    def data_parallel_size(self) -> int:
        """The number of replicas.

        Raises:
            InputError: neither an option nor a launcher gives it.
        """
        if self.ours.data_parallel_size is None and "WORLD_SIZE" not in os.environ:
            why = "is needed: the script's arguments do not give the number of replicas"
            raise InputError(why, field="--data-parallel-size")
        return self.world_size() // self.replica_size


def read(options: Iterable[str], *, verb: str = "describe", of_megatron: bool = True) -> ScriptArguments:
    """Read the text of a command line.

    Args:
        of_megatron: the arguments are Megatron's, so a parallel size that is not given is 1; otherwise it is unknown.

    Raises:
        InputError: a size is not a number, or is less than 1.
    """
    parser = OneLineParser(prog=f"megatron-ext {verb}", allow_abbrev=False, add_help=False)
    add_plan_arguments(parser)
    parser.add_argument("--data-parallel-size", "--dp", type=int)
    parser.add_argument("--gpus-per-node", type=int)
    for name in ("", "-trace", "-nvme-path", "-check", "-step-timeout"):
        parser.add_argument(f"--user-defined-schedule{name}")
    parser.add_argument("--delayed-parameter-update", type=int)
    ours, megatron = parser.parse_known_args(list(options))
    parser = OneLineParser(prog=f"megatron-ext {verb}", allow_abbrev=False, add_help=False)
    for names, default in ((REPLICA_SIZES, 1 if of_megatron else None), (MODEL_SIZES, None)):
        for name in names:
            parser.add_argument(flag(name), type=int, default=default)
    parser.add_argument("--transformer-impl")
    sizes, _ = parser.parse_known_args(megatron)
    transformer_impl = vars(sizes).pop("transformer_impl")
    for name, value in [*vars(sizes).items(), ("data_parallel_size", ours.data_parallel_size)]:
        if value is not None and value < 1:
            raise option_error(name, "must be at least 1", value)
    return ScriptArguments(ours, megatron, sizes, ours.user_defined_schedule, transformer_impl)


def refuse_none(script: ScriptArguments) -> None:
    """Refuse a command line without any argument of the training script, usually because a shell variable is not set.

    Raises:
        InputError: there is no argument.
    """
    if not script.megatron:
        raise InputError("none are given; give the arguments of pretrain_gpt.py after --", field="SCRIPT_ARGUMENTS")


def refuse_contradictions(given: Mapping[str, object], said: Mapping[str, object]) -> None:
    """Refuse an option that contradicts the script's arguments next to it; None means not given.

    Raises:
        InputError: naming the option and both values.
    """
    for name, value in given.items():
        if value is not None and said.get(name) not in (None, value):
            raise option_error(name, f"the script's arguments say {flag(name)} {said[name]}; give it once", value)


def refuse_absent_engine(transformer_impl: str | None) -> None:
    """Refuse Transformer Engine, Megatron's default, if it is not installed.

    Args:
        transformer_impl: the option's value, or None if it is not given.

    Raises:
        InputError: naming the option with which Transformer Engine is not needed.
    """
    if transformer_impl != "local" and importlib.util.find_spec("transformer_engine") is None:
        why = "Transformer Engine, Megatron's default, is not installed here; without a GPU, train with"
        raise option_error("transformer_impl", f"{why} --transformer-impl local", transformer_impl)
