"""What the training thread calls of torch for a schedule, and how long that takes with nothing of ours around it."""

import contextlib
import time
from collections import OrderedDict

import torch

from megatron_ext.megatron import boundaries as boundary_layers
from megatron_ext.runtime.group import FreedGroup


class Nothing(torch.nn.Module):
    """A layer that computes next to nothing, but has a backward."""

    def forward(self, hidden_states):
        return hidden_states + 0


class Hooked(Nothing):
    """A layer behind a boundary whose gradient torch tells us of, and nothing else happens."""

    def forward(self, hidden_states):
        hidden_states._backward_hooks = OrderedDict(nothing=_ignore)
        hidden_states.grad_fn._register_hook_dict(hidden_states)
        return hidden_states + 0


def _ignore(_) -> None:
    """A hook that does nothing."""


class TorchCalls:
    """What a program calls of torch in an iteration, and how long that takes by itself."""

    LAYERS = 4  # one hook at each layer but the first

    def __init__(self) -> None:
        self.hooks = self.resizes = 0
        self._begin = torch.zeros(1, requires_grad=True)
        self._chains = [[Nothing()] + [kind() for _ in range(self.LAYERS - 1)] for kind in (Nothing, Hooked)]
        self.resize = torch.zeros(256).untyped_storage().resize_

    @contextlib.contextmanager
    def counted(self):
        """Count the calls of whatever is compiled and run inside."""
        hook, init = boundary_layers.gradient_hook, FreedGroup.__init__

        def counting_hook(actions):
            hang_on = hook(actions)

            def counted(activation) -> None:
                self.hooks += 1
                hang_on(activation)

            return counted

        def counting_init(group, *args) -> None:
            init(group, *args)
            resize = group.resize

            def counted(size: int) -> None:
                self.resizes += 1
                resize(size)

            group.resize = counted

        boundary_layers.gradient_hook, FreedGroup.__init__ = counting_hook, counting_init
        try:
            yield
        finally:
            boundary_layers.gradient_hook, FreedGroup.__init__ = hook, init

    def ns(self) -> float:
        """Thread time of an iteration's calls."""
        return self._hooks_ns() + self._resizes_ns()

    def _hooks_ns(self) -> float:
        if not self.hooks:
            return 0.0
        took, chains = [], max(1, round(self.hooks / (self.LAYERS - 1)))
        for chain in self._chains:
            begin = time.thread_time_ns()
            for _ in range(chains):
                hidden = self._begin
                for layer in chain:
                    hidden = layer(hidden_states=hidden)
                hidden.backward()
            took.append(time.thread_time_ns() - begin)
        return (took[1] - took[0]) * self.hooks / (chains * (self.LAYERS - 1))

    def _resizes_ns(self) -> float:
        resize = self.resize
        begin = time.thread_time_ns()
        for _ in range(self.resizes // 2):
            resize(0)
            resize(1024)
        return time.thread_time_ns() - begin
