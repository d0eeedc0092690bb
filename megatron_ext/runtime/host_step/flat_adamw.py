"""torch's fused AdamW in few calls: tensors that lie next to each other in memory are passed as one tensor.

[Note: Tensors that are one]
torch's fused AdamW processes one parameter after another, and its threads synchronize after each. A model has many
small parameters: norms, biases, and the shards of many data-parallel ranks. So the parameters and states of a unit get
memory of their own, in the order of its gradients, and neighbours are stepped as one tensor. The same kernel works on
the same values, so all results are bitwise those of ``torch.optim.AdamW(fused=True)``, under one condition. The kernel
computes the last elements of a tensor, which do not fill a vector, without vector instructions, and rounds their second
moment differently (measured). So only tensors of a multiple of :data:`LANES` elements are joined with the next one.
Source: ATen, ``native/cpu/FusedAdamKernel.cpp``.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw

from megatron_ext.runtime.page_locked import large_tensor

LANES = 64
"""fp32 elements: a multiple of all vector lengths up to 2048 bits."""

MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` on the host with ``fused=True``, without ``amsgrad``, ``maximize`` and closures; see the
    note above. States have the same names, shapes and dtypes as torch's.

    Attributes:
        whole: after :func:`lay_out_parameters`, all parameters, each kind of moment, and the step counts, as one 1D
            tensor each.
        gradients_at: set for one step. It says that all gradients are present and lie where they lay when it was last
            set to the same object, so that the joined tensors need not be found again.
    """

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.whole: list[torch.Tensor] = []
        self.gradients_at: object = None
        self._calls: dict[tuple[object, int], _Call] = {}

    def state_of(self, parameter: torch.Tensor) -> dict:
        """The states of ``parameter``; creates them if it has none."""
        state = self.state[parameter]
        if MOMENTS[0] not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update({name: torch.zeros_like(parameter) for name in MOMENTS})
        return state

    @torch.no_grad()
    def step(self, closure=None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the parameters that have a gradient."""
        assert closure is None
        place, self.gradients_at = self.gradients_at if self.whole else None, None
        for number, group in enumerate(self.param_groups):
            call = self._calls.get((place, number)) or self._call(group)
            if call is None:
                continue
            if place is not None:
                self._calls[place, number] = call
            _make(call, group)
        if place is None:
            self._calls.clear()  # step counts may differ from now on

    def _call(self, group: dict) -> "_Call | None":
        stepped = [(parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None]
        if not stepped:
            return None
        states = [self.state_of(parameter) for parameter, _ in stepped]
        rows = [(*pair, *(state[name] for name in MOMENTS)) for pair, state in zip(stepped, states, strict=True)]
        steps = [state["step"] for state in states]
        found = list(runs(rows, torch.stack(steps).tolist()))
        first = {begin for begin, _ in found}
        columns = [list(column) for column in zip(*(joined(rows[begin:end]) for begin, end in found))]
        others = [step for number, step in enumerate(steps) if number not in first]
        return _Call(columns, [steps[number] for number in sorted(first)], others)


class _Call(NamedTuple):
    """What is passed to the kernel for a parameter group.

    Attributes:
        columns: tensors of parameters, gradients and moments.
        steps: step count of the first parameter of each tensor; the kernel increases it.
        others: step counts of the other parameters.
    """

    columns: list[list[torch.Tensor]]
    steps: list[torch.Tensor]
    others: list[torch.Tensor]


def _make(call: _Call, group: dict) -> None:
    if call.others:
        torch._foreach_add_(call.others, 1)  # pyright: ignore[reportPrivateImportUsage]
    parameters, gradients, averages, squares = call.columns
    adamw(
        parameters,
        gradients,
        averages,
        squares,
        [],
        call.steps,
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
def lay_out_parameters(optimizer: FlatAdamW, make: Callable[[int, torch.dtype], torch.Tensor]) -> None:
    """Move the parameters of ``optimizer``, fp32, next to each other in memory, and their states in the same way.

    Args:
        make: returns memory for the parameters, 1D, of a given number of elements and dtype.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sizes = [parameter.numel() for parameter in parameters]
    whole = [make(sum(sizes), torch.float32)]
    for parameter, own in zip(parameters, whole[0].split(sizes), strict=True):
        parameter.data = own.view(parameter.shape).copy_(parameter)
    states = [optimizer.state_of(parameter) for parameter in parameters]
    for name, one in (*((name, sizes) for name in MOMENTS), ("step", [1] * len(sizes))):
        whole.append(large_tensor(sum(one), torch.float32))
        for state, own in zip(states, whole[-1].split(one), strict=True):
            state[name] = own.view(state[name].shape).copy_(state[name])
    optimizer.whole = whole


def runs(rows: Sequence[tuple[torch.Tensor, ...]], keys: Sequence | None = None) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of rows that are one tensor in every column and have the same key.

    Args:
        rows: contiguous tensors; all tensors of a row have the same number of elements.
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
    """Whether ``now`` starts where ``before`` ends, in the same storage, which ends at ``end``."""
    return before.data_ptr() + before.nbytes == now.data_ptr() and now.data_ptr() + now.nbytes <= end


def joined(rows: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """The rows of one run as one row."""
    if len(rows) == 1:
        return rows[0]
    numel = sum(row[0].numel() for row in rows)
    return tuple(tensor.as_strided((numel,), (1,), tensor.storage_offset()) for tensor in rows[0])
