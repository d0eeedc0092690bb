"""A Megatron tree on disk: a clone, a fork, an unpacked archive, or the core-only tree from PyPI."""

import os
import re
import stat
from pathlib import Path

from megatron_ext.checkout.hook_table import CORE_FILES, FILES
from megatron_ext.formats.errors import InputError

_CORE_SIGN = "megatron/core/package_info.py"


class Tree:
    """The root of a Megatron tree and the files of it that carry hooks.

    Args:
        path: the directory that holds ``megatron/`` (and, in a full tree, ``pretrain_gpt.py``).

    Attributes:
        root: the resolved directory.
        version: the version that megatron/core states, e.g. ``0.16.1`` or ``0.20.0rc0``.
        present: paths below root of the files that carry hooks.
        absent: paths of files that carry hooks and that the tree does not have; never a core file.

    Raises:
        InputError: the directory is not a Megatron tree.
    """

    def __init__(self, path):
        try:
            self._look(path)
        except (OSError, RuntimeError) as error:  # no permission, or a link that points to itself
            raise InputError(f"cannot be read: {error}", file=path) from None

    def _look(self, path) -> None:
        self.root = Path(path).resolve()
        if not (self.root / _CORE_SIGN).is_file():
            hint = "give the directory that holds megatron/core"
            for parent in self.root.parents:
                if (parent / _CORE_SIGN).is_file():
                    hint = f"give {parent}"
            if not self.root.is_dir():
                raise InputError("no such directory", file=path)
            raise InputError(f"not a Megatron tree; {hint}", file=path)
        self.version = _version((self.root / _CORE_SIGN).read_text(errors="replace"))
        for place in map(self.root.joinpath, FILES):
            if place.is_symlink() and not place.exists():
                raise InputError(f"is a link to {os.readlink(place)}, which does not exist", file=place)
        self.present = tuple(f for f in FILES if (self.root / f).is_file())
        self.absent = tuple(f for f in FILES if f not in self.present)
        lost = [f for f in CORE_FILES if f in self.absent]
        if lost:
            said = f"megatron-core {self.version} has no such file; this release is not supported"
            raise InputError(said, file=self.root / lost[0])

    @property
    def core_only(self) -> bool:
        """Whether the training scripts are absent, as in the package from PyPI."""
        return not (self.root / "megatron" / "training").is_dir()

    def read(self, file: str) -> str:
        """Text of one file.

        Raises:
            InputError: it has Windows line ends (no patch of ours fits them) or a byte-order mark, is not UTF-8, or
                cannot be read.
        """
        place = self.root / file
        try:
            data = place.read_bytes()
            text = data.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot be read: {error}", file=place) from None
        if b"\r" in data:
            how = "check the tree out again after `git config core.autocrlf false`, or run dos2unix on it"
            raise InputError(f"has Windows line ends; {how}", file=place)
        if text.startswith("\ufeff"):
            raise InputError("starts with a byte-order mark; remove it", file=place)
        return text

    def check_writable(self, file: str) -> None:
        """Refuse a file, or a file in a directory, that is read-only or not writable for this user.

        Raises:
            InputError: with the command that makes it writable, or the reason why there is none.
        """
        place = (self.root / file).resolve()
        for what, kind in ((place, "is"), (place.parent, "is in a directory that is")):
            if os.statvfs(what).f_flag & os.ST_RDONLY:
                raise InputError("is on a read-only file system; patch a copy of the tree", file=place)
            # Root may write any file, but a file without a write bit was protected on purpose.
            if not what.stat().st_mode & stat.S_IWUSR:
                raise InputError(f"{kind} read-only; run `chmod u+w {what}` first", file=place)
            if not os.access(what, os.W_OK):
                raise InputError(f"{kind} not writable for this user; run as the owner of {what}", file=place)


def _version(package_info: str) -> str:
    """The version that package_info.py spells out in MAJOR, MINOR, PATCH and PRE_RELEASE."""
    parts = [re.search(rf"^{name} = (\d+)", package_info, re.M) for name in ("MAJOR", "MINOR", "PATCH")]
    if not all(parts):
        return "unknown"
    pre = re.search(r"^PRE_RELEASE = ['\"](.*)['\"]", package_info, re.M)
    return ".".join(p[1] for p in parts if p) + (pre[1] if pre else "")
