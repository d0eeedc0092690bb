"""What the training thread calls of torch for a schedule, and how long that takes with nothing of ours around it.

An iteration with a schedule is counted once: which storages it resizes in which step, and which layers get an
activation with a hook on its gradient. The same iteration is then run with these calls of torch alone, at the begin of
the step that made them. They take two to three times as long there as in a loop of their own, whose code and memory are
in the processor's caches.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch

from megatron_ext.megatron.boundaries import Layer
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.group import FreedGroup


class Nothing(torch.nn.Module):
    """A layer that computes next to nothing, but has a backward."""

    def forward(self, hidden_states):
        return hidden_states + 0


class Noticing(Nothing):
    """A layer that notices whether its activation comes with a hook on its gradient."""

    def __init__(self):
        super().__init__()
        self.hooked: list[bool] = []  # by call

    def forward(self, hidden_states):
        self.hooked.append(hidden_states._backward_hooks is not None)
        return hidden_states + 0


class _Hooking(Nothing):
    """A layer that hangs a hook in which nothing happens on its activation's gradient in those calls in which
    ``hooked`` says so, over and over."""

    def __init__(self, hooked: list[bool]):
        super().__init__()
        self._hooked = cycle(hooked)

    def forward(self, hidden_states):
        if next(self._hooked):
            hidden_states._backward_hooks = hooks = OrderedDict()
            hooks["nothing"] = _ignore
            hidden_states.grad_fn._register_hook_dict(hidden_states)
        return hidden_states + 0


def _ignore(_) -> None:
    """A hook that does nothing."""


class _Steps:
    """In place of an executor: calls a list of functions as each step begins."""

    def __init__(self, calls: list[list[Callable[[], object]]]):
        self._calls = calls
        self._coming = iter(calls)

    def begin_iteration(self) -> None:
        self._coming = iter(self._calls)
        self._step()

    def pre_forward(self, *_) -> None:
        self._step()

    def pre_backward(self, *_) -> None:
        self._step()

    def post_backward(self, *_) -> None:
        """Nothing of its own."""

    def end_iteration(self) -> None:
        """Nothing of its own."""

    def params_updated(self) -> None:
        """Nothing of its own."""

    def _step(self) -> None:
        for call in next(self._coming):
            call()


class _Counting:
    """An executor that counts the storages that it resizes."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self.calls: list[list[Callable[[], object]]] = []
        for group in executor.groups.values():
            if isinstance(group, FreedGroup):
                group.resize = self._counted(group.resize, torch.zeros(256).untyped_storage().resize_)

    def _counted(self, resize, other_resize):
        def counted(size: int) -> None:
            self.calls[-1].append(partial(other_resize, size))
            resize(size)

        return counted

    def begin_iteration(self) -> None:
        self.calls.append([])
        self._executor.begin_iteration()

    def pre_forward(self, *args) -> None:
        self.calls.append([])
        self._executor.pre_forward(*args)

    def pre_backward(self, *args) -> None:
        self.calls.append([])
        self._executor.pre_backward(*args)

    def __getattr__(self, name: str):
        return getattr(self._executor, name)


class TorchCalls:
    """What an iteration calls of torch.

    Args:
        executor: of a program; of no use afterwards.
        layers: a :class:`Noticing` each, by chunk, between which the program acts.
        iteration_ns: ``iteration_ns(layers, executor)`` runs an iteration and returns its nanoseconds.
    """

    def __init__(self, executor: Executor, layers: list[list[Layer]], iteration_ns: Callable[..., int]):
        counting = _Counting(executor)
        modules = [layer.module for chunk in layers for layer in chunk if isinstance(layer.module, Noticing)]
        iteration_ns(layers, counting)  # the first begins anew
        counting.calls.clear()
        for module in modules:
            module.hooked.clear()
        iteration_ns(layers, counting)
        self.resizes = sum(map(len, counting.calls))
        self.hooks = sum(sum(module.hooked) for module in modules)
        self._iteration_ns = iteration_ns
        self._alone = [_hooking(layers, lambda hooked: hooked), _Steps(counting.calls)]
        nothing = [[] for _ in counting.calls]
        self._without = [_hooking(layers, lambda hooked: [False] * len(hooked)), _Steps(nothing)]

    def ns(self) -> int:
        """Time of an iteration's calls of torch: of an iteration with them less that of one without."""
        return second_ns(self._iteration_ns, *self._alone) - second_ns(self._iteration_ns, *self._without)


def second_ns(iteration_ns: Callable[..., int], *args) -> int:
    """Time of the second of two iterations: the first finds the processor's caches as another kind has left them."""
    iteration_ns(*args)
    return iteration_ns(*args)


def _hooking(layers: list[list[Layer]], of: Callable[[list[bool]], list[bool]]) -> list[list[Layer]]:
    def hooking(layer: Layer) -> Layer:
        assert isinstance(layer.module, Noticing)
        return layer._replace(module=_Hooking(of(layer.module.hooked)))

    return [[hooking(layer) for layer in chunk] for chunk in layers]
