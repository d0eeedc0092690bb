"""Replace several files together: all of them or none, whatever interrupts it.

[Note: the journal]
New contents are first written in full to a hidden directory at the root of the tree. Then a
journal is renamed into that directory. Before this rename the change does not count; from then on it counts
as made. Then each file is renamed over its target, and the hidden directory is removed.
The next command (apply, check or revert) drops the hidden directory if it has no journal. If it has one, the
command finishes the renames. A target that was changed in between is never
overwritten. If a target is on another file system than the tree (a link, a mount), the new content is first copied next
to the target.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megatron_ext.checkout.patchset import blob_id
from megatron_ext.formats import json_files as files
from megatron_ext.formats.errors import InputError

WAIT_SECONDS = 10.0
"""How long a command waits for another command on the same tree. A command takes a fraction of a second."""

STAGE = ".megatron-ext-patch"
JOURNAL = "journal.json"


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One file of a change: its path, the staged name, and blob ids before and after."""

    path: str
    staged: str
    before: str
    after: str


class Journal(msgspec.Struct, forbid_unknown_fields=True):
    """What the hidden directory holds."""

    kind: str
    files: list[Entry]


@contextlib.contextmanager
def locked_tree(root: Path) -> Iterator[str | None]:
    """Lock the tree against other patch commands, and repair it if one was interrupted. The lock ends with the process.
    Yields what :func:`recover` returns.

    Raises:
        InputError: another command is working on this tree, or as for :func:`recover`.
    """
    try:
        handle = os.open(root, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"cannot be read: {error}", file=root) from None
    try:
        _lock(handle, root)
        yield recover(root)
    finally:
        os.close(handle)


def _lock(handle: int, root: Path) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise InputError("another patch command changes this tree; wait for its end", file=root) from None
            time.sleep(0.05)
        except OSError:
            return  # some network file systems cannot lock a directory


def replace_files(root: Path, contents: dict[str, bytes], *, rehearse: bool = False) -> None:
    """Replace all files of ``contents`` (path below root -> new bytes) or none. The caller holds the lock.

    Owners and modes of files stay as they are. A link is followed, and the file that it points to is replaced.
    With ``rehearse`` the new contents are written to the hidden directory and removed again.

    Raises:
        InputError: the tree cannot be written. It is then as it was.
    """
    stage = root / STAGE
    entries, originals = [], {}
    try:
        stage.mkdir()
        for number, (path, data) in enumerate(contents.items()):
            target = root / path
            originals[path] = target.read_bytes()
            staged = stage / str(number)
            _write(staged, data, like=target)
            entries.append(Entry(path, staged.name, blob_id(originals[path]), blob_id(data)))
        if rehearse:
            shutil.rmtree(stage)
            return
        files.save(stage / JOURNAL, Journal("patch_journal", entries))
        _finish(root, stage, entries)
    except (OSError, InputError) as error:
        for path, data in originals.items():
            target = (root / path).resolve()
            if target.read_bytes() == contents[path]:
                with contextlib.suppress(OSError):
                    _write(stage / "undo", data, like=target)
                    _move(stage / "undo", target)
        shutil.rmtree(stage, ignore_errors=True)
        raise InputError(f"nothing was changed: {error}", file=root) from None


def recover(root: Path) -> str | None:
    """Finish or drop the work of an interrupted command. Returns ``finished``, ``dropped``, or None if there is none.

    Raises:
        InputError: a file was changed since then. Nothing is changed.
    """
    stage = root / STAGE
    if not stage.is_dir():
        return None
    if not (stage / JOURNAL).is_file():
        shutil.rmtree(stage)
        return "dropped"
    entries = files.load(stage / JOURNAL, Journal).files
    for entry in entries:
        found = blob_id((root / entry.path).read_bytes())
        if found not in (entry.before, entry.after):
            said = f"was changed after a patch command was interrupted; check the file, then delete {stage}"
            raise InputError(said, file=root / entry.path)
    _finish(root, stage, entries)
    return "finished"


def _finish(root: Path, stage: Path, entries: list[Entry]) -> None:
    for entry in entries:
        staged = stage / entry.staged
        if staged.exists():
            _move(staged, (root / entry.path).resolve())
    # The journal is removed first: a later command drops a directory without one, which is right at this point.
    (stage / JOURNAL).unlink()
    shutil.rmtree(stage)


def _move(staged: Path, target: Path) -> None:
    """Rename ``staged`` over ``target``, even if they are on two file systems."""
    try:
        os.replace(staged, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        temporary = target.with_name(f".{target.name}{STAGE}")
        try:
            _write(temporary, staged.read_bytes(), like=target)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        staged.unlink()


def _write(place: Path, data: bytes, like: Path) -> None:
    """Write ``data`` to disk with the owner, mode and extended attributes of ``like``."""
    with open(place, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    wanted, made = like.stat(), place.stat()
    if (wanted.st_uid, wanted.st_gid) != (made.st_uid, made.st_gid):
        try:
            os.chown(place, wanted.st_uid, wanted.st_gid)
        except OSError:
            owner = f"user {wanted.st_uid}, group {wanted.st_gid}"
            raise InputError(f"this user cannot keep the owner ({owner}); run as the owner", file=like) from None
    shutil.copystat(like, place)
    os.utime(place)
