"""A toy tree with the shape of Megatron's: our own text, runnable, and it logs what it computes.

The hooks are placed by structure, so the toy needs the names and the nesting and nothing else. Lines
are spelled differently from the original on purpose, where there is more than one spelling.
"""

import subprocess
import types
from pathlib import Path

from megatron_ext.checkout.hook_table import ARGUMENTS, DDP, OPTIMIZER, PRETRAIN, SCHEDULES, TRAINING

PACKAGE_INFO = "megatron/core/package_info.py"

TEXTS = {
    PACKAGE_INFO: "MAJOR = 0\nMINOR = 77\nPATCH = 3\nPRE_RELEASE = ''\n",
    PRETRAIN: '''"""Toy training script."""
import time

START = time.time()

# The library that computes.
import torch
from megatron.training.training import train


def main():
    return train


if __name__ == "__main__":
    main()
''',
    ARGUMENTS: '''"""Toy options."""
import argparse


def add_toy_options(parser):
    parser.add_argument("--layers", type=int)
    return parser


def parse_args(extra_args_provider=None, argv=None):
    """All options."""
    parser = argparse.ArgumentParser("toy")
    parser = add_toy_options(parser)

    if not extra_args_provider is None:
        parser = extra_args_provider(parser)

    # Now read them.
    found = parser.parse_args(argv)
    found.rank = 0
    return found
''',
    TRAINING: '''"""Toy training loop."""


def train(args, model, optimizer, config, log):
    log.append("train")
    for chunk in model:
        log.append("to train mode")
    if args.overlap_grad_reduce:
        config.no_sync_func = list(model)
        log.append("no sync")
    if args.align_param_gather and args.overlap_param_gather:
        config.param_sync_func = list(model)
    log.append("loop")
    step = 0
    while step < 2:
        log.append(("step", step))
        step += 1
    log.append("close")
    # Perhaps it was told to stop.
    if args.stop:
        sys.exit(0)
    return log
''',
    DDP: '''"""Toy data parallelism."""


class DistributedDataParallel:
    def __init__(self, module, log):
        self.module = module
        self.buckets = []
        for name in ("a", "b"):
            self.buckets.append(name)
            log.append(("bucket", name))
        self.log = log
        self.overlap_param_gather_with_optimizer_step = None

    def start(self):
        self.log.append("start")
''',
    OPTIMIZER: '''"""Toy optimizer."""


class Parent:
    def step_with_ready_grads(self):
        self.log.append("update")
        return True


class DistributedOptimizer(Parent):
    def __init__(self, log):
        self.log = log
        self.overlap = False

    def step_with_ready_grads(self):
        """Update and gather."""
        update_successful = (super().step_with_ready_grads())

        self.log.append("timers")
        if not self.overlap:
            self.log.append("gather")
        return update_successful
''',
    SCHEDULES: '''"""Toy schedules."""


def forward_step(model, microbatch):
    model.log.append(("F", microbatch, model.chunk))
    return microbatch


def backward_step(model, microbatch):
    model.log.append(("B", microbatch, model.chunk))
    return microbatch


def forward_backward_no_pipelining(model, num_microbatches, forward_only=False):
    if isinstance(model, list):
        model = model[0]
    config = model.config

    results = []
    model.log.append("one stage")
    for microbatch in range(num_microbatches):
        results.append(forward_step(model, microbatch))
        if not forward_only:
            backward_step(model, microbatch)

    if config.finalize_model_grads_func and not forward_only:
        config.finalize_model_grads_func(model)
    return results


def forward_backward_pipelining_with_interleaving(model, num_microbatches, forward_only=False):
    config = model[0].config
    if config.finalize_model_grads_func and not forward_only:
        model[0].log.append("clear")
    chunks = len(model)
    total = chunks * num_microbatches
    inputs, outputs = [], []

    # The first two chunks are gathered at once.
    if config.param_sync_func is not None: config.param_sync_func(model[:2])

    def chunk_of(virtual, forward):
        chunk = virtual // num_microbatches
        return chunk if forward else chunks - 1 - chunk

    def forward_step_helper_preprocess(virtual_microbatch_id, model_chunk_id):
        """What comes before a forward step."""
        # Maybe gather the chunk after this one.
        if config.param_sync_func is not None: config.param_sync_func(model[model_chunk_id:])
        inputs.append(virtual_microbatch_id)

    def forward_step_helper(virtual_microbatch_id):
        model_chunk_id = chunk_of(virtual_microbatch_id, True)
        forward_step_helper_preprocess(virtual_microbatch_id, model_chunk_id)
        outputs.append(forward_step(model[model_chunk_id], virtual_microbatch_id))

    def backward_step_helper_preprocess(virtual_microbatch_id, model_chunk_id):
        """What comes before a backward step."""
        model[0].log.append(("grads of", model_chunk_id))
        input_tensor = inputs.pop(0)
        output_tensor = outputs.pop(0)
        return input_tensor, output_tensor

    def backward_step_helper_postprocess(virtual_microbatch_id):
        """What comes after a backward step."""
        # Maybe reduce gradients.
        if config.grad_sync_func is not None: config.grad_sync_func(virtual_microbatch_id)
        model[0].log.append(("done", virtual_microbatch_id))

    def backward_step_helper(virtual_microbatch_id):
        model_chunk_id = chunk_of(virtual_microbatch_id, False)
        backward_step_helper_preprocess(virtual_microbatch_id, model_chunk_id)
        backward_step(model[model_chunk_id], virtual_microbatch_id)
        backward_step_helper_postprocess(virtual_microbatch_id)

    for k in range(total):
        forward_step_helper(k)
    if not forward_only:
        for k in range(total):
            backward_step_helper(k)
        if config.grad_sync_func is not None: config.grad_sync_func(None)

    if config.finalize_model_grads_func and not forward_only:
        config.finalize_model_grads_func(model[0])
    return outputs


def forward_backward_pipelining_without_interleaving(model, num_microbatches, forward_only=False):
    if isinstance(model, list):
        model = model[0]
    config = model.config
    if config.finalize_model_grads_func and not forward_only:
        model.log.append("clear")
    run_backward = backward_step

    warmup = min(1, num_microbatches)
    for microbatch in range(warmup):
        forward_step(model, microbatch)
    for microbatch in range(num_microbatches - warmup):
        forward_step(model, microbatch + warmup)
        if not forward_only:
            run_backward(model, microbatch)
    if not forward_only:
        for microbatch in range(num_microbatches - warmup, num_microbatches):
            run_backward(model, microbatch)

    if config.finalize_model_grads_func and not forward_only:
        config.finalize_model_grads_func(model)
    return None
''',
}


def write(root, *, core_only: bool = False) -> None:
    """Write the toy below ``root``."""
    for path, text in TEXTS.items():
        if core_only and not path.startswith("megatron/core/"):
            continue
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode())


class Calls:
    """Stands in for the hooks module and for gather_schedule: writes every call to a log."""

    def __init__(self, log):
        self.log = log
        self.counts = [0, 0]

    def __getattr__(self, name):
        def call(*args):
            numbers = [a for a in args if isinstance(a, (int, bool))]
            self.log.append((name, *numbers))

        return call

    def begin_iteration(self, config, model, num_microbatches, forward_only):
        assert isinstance(model, list)
        self.log.append(("begin_iteration", num_microbatches, forward_only))
        return self

    def begin_steps(self, config, model, num_microbatches, forward_only):
        assert isinstance(model, list) and len(model) == 1
        self.log.append(("begin_steps", num_microbatches, forward_only))

        def forward_step(model, microbatch):
            self.log.append(("pre_forward", microbatch, 0))
            self.log.append(("F", microbatch, model.chunk))

        def backward_step(model, microbatch):
            self.log.append(("pre_backward", microbatch, 0))
            self.log.append(("B", microbatch, model.chunk))

        return self, forward_step, backward_step


def run(texts: dict[str, str], monkeypatch) -> list:
    """Execute everything in the toy once, with :class:`Calls` for hooks; the log of it."""
    log = []
    package = types.ModuleType("megatron_ext.megatron")
    package.hooks = Calls(log)
    monkeypatch.setitem(__import__("sys").modules, "megatron_ext.megatron", package)

    def load(path):
        namespace = {"__name__": "toy"}
        exec(compile(texts[path], path, "exec"), namespace)
        return namespace

    config = types.SimpleNamespace(
        param_sync_func=lambda chunks: log.append(("param sync", len(chunks))),
        grad_sync_func=lambda k: log.append(("grad sync", k)),
        finalize_model_grads_func=lambda model: log.append("finalize"),
    )
    models = [types.SimpleNamespace(config=config, log=log, chunk=c) for c in range(2)]
    load(ARGUMENTS)["parse_args"](lambda parser: parser, [])
    args = types.SimpleNamespace(
        overlap_grad_reduce=True, align_param_gather=True, overlap_param_gather=True, stop=False
    )
    load(TRAINING)["train"](args, models, None, types.SimpleNamespace(), log)
    load(DDP)["DistributedDataParallel"](None, log).start()
    load(OPTIMIZER)["DistributedOptimizer"](log).step_with_ready_grads()
    schedules = load(SCHEDULES)
    for forward_only in (False, True):
        schedules["forward_backward_no_pipelining"](models[:1], 2, forward_only)
        schedules["forward_backward_pipelining_with_interleaving"](models, 2, forward_only)
        schedules["forward_backward_pipelining_without_interleaving"](models[:1], 3, forward_only)
    return log


def git(root, *arguments):
    """Run git in ``root`` with a name of its own."""
    subprocess.run(
        ["git", "-C", str(root), "-c", "user.name=toy", "-c", "user.email=toy@toy", *arguments],
        check=True,
        capture_output=True,
    )


def snapshot(root) -> dict[str, tuple[bytes, int]]:
    """Bytes and mode of every file below ``root``, outside .git."""
    return {
        str(place.relative_to(root)): (place.read_bytes(), place.stat().st_mode)
        for place in sorted(Path(root).rglob("*"))
        if place.is_file() and ".git" not in place.relative_to(root).parts
    }


def append(root, path, text):
    """Add ``text`` to a file of the tree."""
    place = root / path
    place.write_bytes(place.read_bytes() + text.encode())
