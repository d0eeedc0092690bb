"""torch's fused AdamW in few calls: tensors that lie behind each other in memory are one tensor to it.

[Note: Tensors that are one]
torch's fused AdamW goes from parameter to parameter, and its threads meet behind each. A model has many small ones:
norms and biases, and shards of many data-parallel ranks. So parameters and states of a unit get memory of their own, in
the order of its gradients, and what then lies behind each other is stepped as one tensor. The same kernel works on the
same values, so all results are those of ``torch.optim.AdamW(fused=True)``, to the last bit, under one condition: the
kernel computes the last elements of a tensor, those that fill no vector, without vector instructions, and rounds the
second moment otherwise there (measured). Only tensors of a multiple of :data:`LANES` elements have another one behind.
Source: ATen, ``native/cpu/FusedAdamKernel.cpp``.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.optim.adamw import adamw

from megatron_ext.runtime.page_locked import large_tensor

LANES = 64
"""fp32 elements: a multiple of all vector lengths up to 2048 bits."""

MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` on the host with ``fused=True``, without ``amsgrad``, ``maximize`` and closures; see the
    note above. States have the names, shapes and dtypes of torch's."""

    def state_of(self, parameter: torch.Tensor) -> dict:
        state = self.state[parameter]
        if MOMENTS[0] not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update({name: torch.zeros_like(parameter) for name in MOMENTS})
        return state

    @torch.no_grad()
    def step(self, closure=None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            stepped = [(parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None]
            if stepped:
                self._step(group, stepped)

    def _step(self, group: dict, stepped: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        states = [self.state_of(parameter) for parameter, _ in stepped]
        rows = [(*pair, *(state[name] for name in MOMENTS)) for pair, state in zip(stepped, states, strict=True)]
        steps = [state["step"] for state in states]
        found = list(runs(rows, torch.stack(steps).tolist()))
        first = {begin for begin, _ in found}
        for number, step in enumerate(steps):
            if number not in first:
                step += 1
        parameters, gradients, *moments = map(list, zip(*(joined(rows[begin:end]) for begin, end in found)))
        adamw(
            parameters,
            gradients,
            moments[0],
            moments[1],
            [],
            [steps[begin] for begin, _ in found],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


@torch.no_grad()
def lay_out(optimizer: torch.optim.Optimizer, make: Callable[[int, torch.dtype], torch.Tensor]) -> None:
    """Move the parameters of ``optimizer``, fp32, to memory where they lie behind each other, and where they are
    stepped as one tensor their moments, too.

    Args:
        make: memory for the parameters, 1D, of so many elements.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, own in zip(parameters, make(sum(sizes), torch.float32).split(sizes), strict=True):
        parameter.data = own.view(parameter.shape).copy_(parameter)
    if isinstance(optimizer, FlatAdamW):
        states = [optimizer.state_of(parameter) for parameter in parameters]
        for name in MOMENTS:
            for state, own in zip(states, large_tensor(sum(sizes), torch.float32).split(sizes), strict=True):
                state[name] = own.view(state[name].shape).copy_(state[name])


def runs(rows: Sequence[tuple[torch.Tensor, ...]], keys: Sequence | None = None) -> Iterator[tuple[int, int]]:
    """First row and end of those that are one tensor, column by column, and have the same key.

    Args:
        rows: contiguous tensors, all of a row with as many elements.
    """
    begin, ends = 0, _ends(rows[0])
    for number in range(1, len(rows)):
        before, now = rows[number - 1], rows[number]
        if (
            before[0].numel() % LANES
            or (keys and keys[number] != keys[number - 1])
            or not all(map(_behind, before, now, ends))
        ):
            yield begin, number
            begin, ends = number, _ends(now)
    yield begin, len(rows)


def _ends(row: tuple[torch.Tensor, ...]) -> list[int]:
    storages = [tensor.untyped_storage() for tensor in row]
    return [storage.data_ptr() + storage.nbytes() for storage in storages]


def _behind(before: torch.Tensor, now: torch.Tensor, end: int) -> bool:
    """Whether ``now`` lies right behind ``before``, in a storage that ends at ``end``: two may be neighbours."""
    return before.data_ptr() + before.nbytes == now.data_ptr() and now.data_ptr() + now.nbytes <= end


def joined(rows: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """The rows of one run as one row."""
    if len(rows) == 1:
        return rows[0]
    numel = sum(row[0].numel() for row in rows)
    return tuple(tensor.as_strided((numel,), (1,), tensor.storage_offset()) for tensor in rows[0])
