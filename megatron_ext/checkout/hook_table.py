"""Every line that the patches insert: its text, the file it goes to, and its purpose.

A hook is one physical line that ends in :data:`MARKER`, so that a person finds it; ``check`` and
``revert`` recognize it by its whole text. The line calls ``megatron_ext.megatron.hooks`` and decides nothing
itself. Imports stand on the hook line: an import at the top of the file
would be one more place to merge, and the import block changes most between releases.
"""

import msgspec

MARKER = "# megatron-ext"

IMPORT = "from megatron_ext.megatron import hooks; "

ARGUMENTS = "megatron/training/arguments.py"
TRAINING = "megatron/training/training.py"
PRETRAIN = "pretrain_gpt.py"
DDP = "megatron/core/distributed/distributed_data_parallel.py"
OPTIMIZER = "megatron/core/optimizer/distrib_optimizer.py"
SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"

CORE_FILES = (DDP, OPTIMIZER, SCHEDULES)
TRAINING_FILES = (ARGUMENTS, TRAINING, PRETRAIN)
FILES = CORE_FILES + TRAINING_FILES


class Hook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One inserted line. The manifest holds all hooks in this form.

    Attributes:
        name: its name in messages of ``check``, e.g. ``schedules.interleaved.begin``.
        file: path below the root of the Megatron tree.
        text: the statement, without indentation and marker. ``{microbatch}`` in it stands for a variable whose name
            differs between releases; the name is taken from the helper's signature.
        place: where it goes, in words; ``find_places.py`` has the same in code.
        purpose: why the line is there, for the manifest and for ``patch list``.
    """

    name: str
    file: str
    text: str
    place: str
    purpose: str

    def line(self, microbatch: str = "virtual_microbatch_id") -> str:
        """The inserted line without indentation and without a line end."""
        return f"{self.text.replace('{microbatch}', microbatch)}  {MARKER}"


def _plain_schedule(name: str, function: str) -> tuple[Hook, Hook]:
    """The two lines of a schedule function that runs forward_step and backward_step in order."""
    return (
        Hook(
            f"schedules.{name}.begin",
            SCHEDULES,
            IMPORT
            + "gather_schedule, forward_step, backward_step = "
            + "hooks.begin_steps(config, [model], num_microbatches, forward_only)",
            f"{function}, as soon as config is known",
            "one iteration begins; from here the function's own forward_step and backward_step "
            "are the ones that follow the schedule (the originals where there is none)",
        ),
        Hook(
            f"schedules.{name}.end",
            SCHEDULES,
            "gather_schedule.end_iteration()",
            f"{function}, before gradients are finalized",
            "one iteration ends, in training and in evaluation",
        ),
    )


_INTERLEAVED = "forward_backward_pipelining_with_interleaving"

HOOKS = (
    Hook(
        "pretrain.start",
        PRETRAIN,
        'if __name__ == "__main__": ' + IMPORT + "hooks.on_pretrain()",
        "the module, before torch is imported",
        "where the schedule comes in: verifies that every hook is there and prepares a machine "
        "without a GPU, before any other module of Megatron is imported",
    ),
    Hook(
        "arguments.add",
        ARGUMENTS,
        IMPORT + "hooks.add_arguments(parser)",
        "parse_args, after extra_args_provider has been applied",
        "adds --user-defined-schedule and its few companions to Megatron's own options",
    ),
    Hook(
        "training.setup",
        TRAINING,
        IMPORT + "hooks.on_train_setup(args, model, optimizer, config)",
        "train, before param_sync_func is set",
        "reads the schedule and refuses what it cannot serve, when model and optimizer are built",
    ),
    Hook(
        "training.end",
        TRAINING,
        IMPORT + "hooks.on_train_end()",
        "train, after its loop, before it may leave the process",
        "all parameters whole again where a checkpoint or an evaluation follows; writes the trace "
        "and lets go of threads and host memory",
    ),
    Hook(
        "ddp.built",
        DDP,
        IMPORT + "hooks.on_ddp_built(self)",
        "DistributedDataParallel.__init__, at its end",
        "gives every group of the schedule its own bucket and storage, before the optimizer takes its views",
    ),
    Hook(
        "optimizer.params_updated",
        OPTIMIZER,
        IMPORT + "hooks.on_params_updated(self, update_successful)",
        "DistributedOptimizer.step_with_ready_grads, after the parent's step and before the parameters are gathered",
        "the shards hold new parameters: publish them, and mark whole copies stale",
    ),
    Hook(
        "schedules.interleaved.begin",
        SCHEDULES,
        IMPORT + "gather_schedule = hooks.begin_iteration(config, model, num_microbatches, forward_only)",
        f"{_INTERLEAVED}, before the first two chunks are synchronised",
        "one iteration begins; the nested helpers close over gather_schedule",
    ),
    Hook(
        "schedules.interleaved.pre_forward",
        SCHEDULES,
        "gather_schedule.pre_forward({microbatch}, model_chunk_id)",
        f"{_INTERLEAVED}, forward helper, before its test of param_sync_func",
        "issues and awaits what the schedule lists for this forward step",
    ),
    Hook(
        "schedules.interleaved.pre_backward",
        SCHEDULES,
        "gather_schedule.pre_backward({microbatch}, model_chunk_id)",
        f"{_INTERLEAVED}, backward helper, between the pops of the input and the output tensor",
        "issues and awaits what the schedule lists for this backward step",
    ),
    Hook(
        "schedules.interleaved.post_backward",
        SCHEDULES,
        "gather_schedule.post_backward({microbatch})",
        f"{_INTERLEAVED}, backward helper, before its test of grad_sync_func",
        "frees what the schedule frees after this backward step",
    ),
    Hook(
        "schedules.interleaved.end",
        SCHEDULES,
        "gather_schedule.end_iteration()",
        f"{_INTERLEAVED}, before gradients are finalized",
        "one iteration ends, in training and in evaluation",
    ),
    *_plain_schedule("1f1b", "forward_backward_pipelining_without_interleaving"),
    *_plain_schedule("no_pipelining", "forward_backward_no_pipelining"),
)


SCHEDULE_FUNCTIONS = {hook.place.split(",")[0] for hook in HOOKS if hook.file == SCHEDULES}
"""Megatron's pipeline schedules that have hooks in them."""

LINES = {hook.line(name): hook.text for hook in HOOKS for name in ("virtual_microbatch_id", "microbatch_id")}
"""Maps every inserted line, without indentation, to the text of its hook. Several hooks may share a text."""


def hooks_of(file: str) -> tuple[Hook, ...]:
    """The hooks of one file of the tree."""
    return tuple(hook for hook in HOOKS if hook.file == file)
