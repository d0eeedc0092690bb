"""Every line that the patches insert, and the files that they go to.

A hook is one physical line that ends in :data:`MARKER`, so that a person finds it; ``check`` and
``revert`` recognize it by its whole text. The line calls ``megatron_ext.megatron.hooks`` and decides nothing
itself. Imports stand on the hook line: an import at the top of the file
would be one more place to merge, and the import block changes most between releases.
The manifest of the patches holds each hook's text, place and purpose.
"""

from megatron_ext.checkout.patchset import MARKER as MARKER
from megatron_ext.checkout.patchset import Hook as Hook
from megatron_ext.checkout.patchset import manifest

HOOKS = tuple(manifest().hooks)

FILES = tuple(sorted({hook.file for hook in HOOKS}))
DDP, OPTIMIZER, SCHEDULES, ARGUMENTS, TRAINING, PRETRAIN = FILES
CORE_FILES = (DDP, OPTIMIZER, SCHEDULES)

SCHEDULE_FUNCTIONS = {hook.place.split(",")[0] for hook in HOOKS if hook.file == SCHEDULES}
"""Megatron's pipeline schedules that have hooks in them."""

LINES = {hook.line(name): hook.text for hook in HOOKS for name in ("virtual_microbatch_id", "microbatch_id")}
"""Maps every inserted line, without indentation, to the text of its hook. Several hooks may share a text."""


def hooks_of(file: str) -> tuple[Hook, ...]:
    """The hooks of one file of the tree."""
    return tuple(hook for hook in HOOKS if hook.file == file)
