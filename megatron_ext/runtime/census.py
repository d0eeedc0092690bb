"""Counts what this rank holds on its device, by kind, at the peak of an iteration.

[Note: What is counted when]
Whole parameters are counted in every iteration. What autograd saves is counted in the first iteration only: counting
costs a few microseconds per tensor, and every iteration runs the same steps with the same shapes. What rests on the
device (shards, gradients, optimizer states) is counted on request, by adding up its storages.
"""

from collections.abc import Callable, Iterable

import torch

from megatron_ext.formats import rank_memory
from megatron_ext.formats.rank_memory import RankMemory
from megatron_ext.runtime.gradients import Reducer
from megatron_ext.runtime.group import WholeBytes
from megatron_ext.runtime.part import Part
from megatron_ext.runtime.saved_tensors import SavedTensors

Resting = tuple[dict[str, int], dict[str, int]]
"""Bytes by kind, on the device and in host memory, that rest between steps."""


class Census(Part):
    """One instance per rank, the last of its parts.

    Args:
        residency: counts whole parameters.
        parameters: tensors whose storages are not counted as activations.
        resting: gives the bytes that rest between steps.
        reducer: handles the gradients that come and go, or None. They are counted like what autograd saves.
    """

    def __init__(
        self, residency: WholeBytes, parameters: Iterable[torch.Tensor], resting: Callable[[], Resting], reducer=None
    ):
        self._residency, self._resting = residency, resting
        self._reducer: Reducer | None = reducer
        self._saved: SavedTensors | None = SavedTensors(parameters, self._sample)
        self._counting = False
        self._whole = self._activations = self._gradients = self._first_peak = 0

    def begin(self) -> None:
        if self._saved is not None and not self._counting:
            self._counting = True
            self._saved.__enter__()
            if self._reducer is not None:
                self._reducer.sample = self._sample

    def end(self) -> None:
        peak_bytes = self._residency.peak
        if self._saved is not None:
            self._saved.__exit__(None, None, None)
            self._saved, self._first_peak = None, peak_bytes
            if self._reducer is not None:
                self._reducer.sample = None
        elif peak_bytes != self._first_peak:
            self._whole = peak_bytes

    def _sample(self) -> None:
        assert self._saved is not None
        whole, activations = self._residency.bytes, self._saved.bytes
        gradients = self._reducer.residency.bytes if self._reducer is not None else 0
        if whole + activations + gradients > self._whole + self._activations + self._gradients:
            self._whole, self._activations, self._gradients = whole, activations, gradients

    def memory(self) -> RankMemory:
        """What the rank held at the peak of the last iteration."""
        device, host = self._resting()
        device["gradients"] = device.get("gradients", 0) + self._gradients
        return rank_memory.make(device | {"whole_parameters": self._whole, "activations": self._activations}, host)


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the storages behind ``tensors``, each storage once."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors if t is not None)}.values())
