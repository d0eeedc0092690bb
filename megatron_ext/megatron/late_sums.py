"""Gradients that tensor-parallel ranks add up after the last reduce, where whole gradients come and go.

With ``--sequence-parallel`` and ``--qk-layernorm``, tensor-parallel ranks add up the whole gradients of norms after the
data-parallel ranks have reduced them. Megatron adds all of them in one all-reduce. By then this rank keeps only its
part of such a gradient, in its shard. So each gradient that Megatron asks for is made whole on the device for this
all-reduce: it has this rank's part and zeros elsewhere. The sum of an element does not depend on other elements, and
every element has the place that it has in stock Megatron, so this rank's part gets the same bits.
Source: megatron/core/distributed/finalize_model_grads.py, core_v0.12 to core_v0.19.
"""

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module

import torch

from megatron_ext.megatron.releases import late_sum_of
from megatron_ext.megatron.shards import HeldGradient, in_place_of_gradients

upstream = import_module("megatron.core.distributed.finalize_model_grads")  # its package has a function of this name


class MadeWhole:
    """Takes the place of a parameter's ``main_grad`` during the all-reduce.

    Args:
        main_grad: the gradient of the parameter, whose storage is freed.
        part: this rank's part of it: 1D tensor on the device or in host memory.
        start: element of the gradient at which the part begins.
    """

    def __init__(self, main_grad: torch.Tensor, part: torch.Tensor, start: int):
        self.main_grad, self._part, self._start = main_grad, part, start
        self._made: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor:
        """The whole gradient."""
        if self._made is None:
            self._made = torch.zeros(self.main_grad.shape, dtype=self.main_grad.dtype, device=self.main_grad.device)
            self._own(self._made).copy_(self._part)
        return self._made

    def keep(self) -> None:
        """Take the part from the whole gradient, if Megatron asked for it."""
        if self._made is not None:
            self._part.copy_(self._own(self._made))
            self._made = None

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.view(-1)[self._start : self._start + len(self._part)]


def add_up_shards(held: Iterable[HeldGradient]) -> Callable[[], None]:
    """Let Megatron's late all-reduce add up the shards in ``held``. Returns a function that ends this."""
    made = {}
    for gradient in held:
        for parameter in gradient.parameters:
            main_grad: torch.Tensor = getattr(parameter, "main_grad")  # noqa: B009 - Megatron's attribute
            begin = int(main_grad.storage_offset()) - gradient.start  # in the shard
            part = gradient.shard[max(begin, 0) : max(begin + main_grad.numel(), 0)]
            made[parameter] = MadeWhole(main_grad, part, max(-begin, 0))
    name = late_sum_of(upstream)
    add_up = getattr(upstream, name)
    setattr(upstream, name, partial(_with_whole_gradients, add_up, made))
    return partial(setattr, upstream, name, add_up)


@torch.no_grad()
def _with_whole_gradients(add_up: Callable, made: dict[torch.nn.Parameter, MadeWhole], *args, **kwargs) -> None:
    with in_place_of_gradients(made):
        add_up(*args, **kwargs)
    for whole in made.values():
        whole.keep()
