"""Notices uses of parameters between the optimizer's step and the next forward.

[Note: Reads between iterations]
After a step each rank has new values only for its own shards. A group that the schedule has not gathered yet is half
old and half new at zero stages 1 and 2, and has no bytes at stage 3. Logged norms, averages of weights, hashes and
hooks of users read parameters at this time. It does not matter which option or script does so: from the step to the
begin of the next iteration every call of torch passes a mode (torch's ``TorchFunctionMode``), which looks at the
storages of its tensors. The first call that uses the storage of a group, through a parameter or a view taken long
before, triggers a gather of all groups. If not all groups fit whole at once, every call triggers a gather of the groups
that it uses (in_turn.py). There is no mode within an iteration, so steps cost nothing extra. Uses that do not go
through torch are not noticed: those of another thread, and those of an extension's kernel that is given only views
taken earlier.
"""

import contextlib
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

try:
    from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
    from torch.utils._device import DeviceContext
except ImportError:  # in this release the mode is entered on top, like every other mode
    _get_current_function_mode_stack = None


def _accessors(name: str) -> tuple:
    """The functions that get and set a property of tensors."""
    found = getattr(torch.Tensor, name)
    return found.__get__, found.__set__


_PROPERTIES = """
    device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_quantized is_sparse itemsize layout name nbytes ndim
    output_nr requires_grad retains_grad shape
""".split()
_METHODS = """
    dim element_size get_device is_complex is_contiguous is_floating_point is_pinned is_shared ndimension nelement numel
    register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad size storage_offset stride __hash__
    __len__
""".split()
OF_NO_VALUE = frozenset(
    [getattr(torch.Tensor, name) for name in _METHODS]
    + [accessor for name in _PROPERTIES for accessor in _accessors(name)]
    + [torch.is_complex, torch.is_floating_point, torch.numel]
)
"""Calls that neither read nor write a tensor's elements, nor return an address or a view of them."""


class ParamReads(TorchFunctionMode):
    """Lets ``gather`` make parameters whole before their first use between two iterations.

    Args:
        storages: ``_cdata`` of the untyped storages of all whole parameters.
        gather: ``gather(place, used)`` makes all groups whole and fresh, or only those of the storages ``used``;
            ``place`` is the file and line that uses them.
        missing: tells at every use whether some of the storages ``used`` have to be gathered; None: all groups are
            gathered at the first use.
    """

    def __init__(self, storages: Collection[int], gather: Callable[[str, set[int]], None], missing=None):
        super().__init__()
        self.storages, self.gather, self._missing = frozenset(storages), gather, missing
        self.count = 0
        self._watching = self._gathering = self._entered = False

    def open(self) -> None:
        """Parameters have new values, which are not gathered yet: watch from now on, if not watching already."""
        if self._gathering or not self.storages:
            return
        self.count += not self._watching
        self._watching = True
        self._replace(self)

    def close(self) -> None:
        """Stop watching: the schedule gathers from now on, or all parameters are whole."""
        self._watching = False
        if not self._gathering:  # otherwise torch has removed the mode while it runs, and restores it
            self._replace(None)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Within this context, uses are not noticed."""
        watching, self._watching = self._watching, False
        self._replace(None)
        try:
            yield
        finally:
            self._watching = watching
            self._replace(self if watching else None)

    def unnoticed(self, function: Callable) -> Callable:
        """Wrap ``function`` so that its uses of parameters are not noticed."""
        return self.suspended()(function)

    def _replace(self, mode: "ParamReads | None") -> None:
        """Put ``mode`` below all modes but torch's default device, or remove this one.

        Other code enters and leaves modes at any time, and leaving removes the topmost mode, whichever it is. Only at
        the bottom does this mode not interfere. ``torch.set_default_device`` expects its mode below all others, and
        finds it there.
        """
        if _get_current_function_mode_stack is None:
            if self._entered is not (mode is self):
                self._entered = mode is self
                self.__enter__() if self._entered else self.__exit__(None, None, None)
            return
        stack = _get_current_function_mode_stack()
        if (self in stack) == (mode is self):
            return
        others = [one for one in stack if one is not self]
        for _ in stack:
            _pop_mode()
        # The mode of ``with torch.device(...)`` has the same class, but was not entered that way, and leaves from the
        # top.
        below = [one for one in others[:1] if isinstance(one, DeviceContext) and hasattr(one, "old_device")]
        for one in [*below, *([] if mode is None else [mode]), *others[len(below) :]]:
            _push_mode(one)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._watching and func not in OF_NO_VALUE:
            used = {*self._used(args), *self._used(kwargs.values())}
            if used and (self._missing is None or self._missing(used)):
                self._gather(used)
        return func(*args, **kwargs)

    def _gather(self, used: set[int]) -> None:
        self._watching, self._gathering = False, True
        try:
            with torch.no_grad():
                self.gather(place_of_use(), used)
        finally:
            self._watching, self._gathering = self._missing is not None, False

    def _used(self, values, depth: int = 3) -> Iterator[int]:
        """The storages of groups that the tensors among ``values``, or in lists of them, use."""
        for value in values:
            if isinstance(value, torch.Tensor):
                with contextlib.suppress(NotImplementedError, RuntimeError):  # a tensor without its own storage
                    storage = value.untyped_storage()._cdata
                    if storage in self.storages:
                        yield storage
            elif depth and isinstance(value, (list, tuple)):
                yield from self._used(value, depth - 1)


def place_of_use() -> str:
    """File, line and function of the innermost caller outside torch, this package, and Python's copy module."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), f"{sysconfig.get_path('stdlib')}/copy")
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "unknown"
