"""Read and write the project's JSON files: strict, bounded, and never half-written.

Every file kind is a msgspec Struct (msgspec: strict decoding into typed structures,
unknown keys are errors, fast enough for a 5 MB schedule in well under a second).
"""

import contextlib
import hashlib
import os
import re
import secrets
import stat
import typing
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megatron_ext.formats.errors import InputError
from megatron_ext.formats.versions import check_version

T = TypeVar("T")

_PATH = re.compile(r"([^.\[\]]+)|\[([^\]]*)\]")
"""Names and indices in the path of a msgspec error."""

MAX_FILE_BYTES = 256 * 2**20
"""A larger file is refused before it is read. Files of all kinds are far smaller."""


class _Versioned(msgspec.Struct):
    schema_version: int = -1
    kind: str = ""


def load(path, kind: type[T], *, versioned: str | None = None) -> T:
    """Read a JSON file into ``kind``.

    Args:
        versioned: the kind of file, if its schema version is to be checked before anything else.

    Raises:
        InputError: as for :func:`read_bytes`, or the file is not JSON or does not have the form of ``kind``. The line
            names the file, the field and the value.
    """
    data = read_bytes(path)
    if versioned is not None:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            head = msgspec.json.decode(data, type=_Versioned)
            if head.kind == versioned:
                check_version(versioned, head.schema_version, file=path)
    return decode(data, kind, file=path)


def read_bytes(path) -> bytes:
    """The content of a file that a user names.

    Raises:
        InputError: it is missing, is not a regular file (reading a pipe may never end) or is larger than
            :data:`MAX_FILE_BYTES`.
    """
    path = _given(path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise InputError("cannot be read: " + _what_else(found.st_mode), file=path)
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
            # read() takes memory for all of these bytes before it reads them. Files in /proc report a size of 0.
            data = stream.read(min(found.st_size or MAX_FILE_BYTES, MAX_FILE_BYTES) + 1)
        if data is None:  # a file whose end is never reached, such as /proc/kmsg
            raise InputError("cannot be read: the file has no end", file=path)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"larger than {MAX_FILE_BYTES} bytes", file=path)
    return data


def _what_else(mode: int) -> str:
    return "is a directory" if stat.S_ISDIR(mode) else "is not a regular file"


def decode(data: bytes, kind: type[T], *, file) -> T:
    """Decode JSON text into ``kind``; errors as in :func:`load`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `")
        field = where.rstrip("`").removeprefix("$").lstrip(".") or None
        value = _value_at(data, field)
        if field == "kind" and isinstance(value, str):
            raise InputError(f"expected a file of kind {_kind_of(kind)}", file=file, field=field, value=value) from None
        message = message[0].lower() + message[1:]
        choices = _choices_at(kind, field) if message.startswith("invalid enum value") else []
        if choices:
            message = f"expected {_either(choices)}"
        raise InputError(message, file=file, field=field, value=value) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"not valid JSON: {error}", file=file) from None


def _kind_of(struct) -> str:
    """The values that ``kind`` may have in files of a struct, as text."""
    choices = next(field.type for field in msgspec.structs.fields(struct) if field.name == "kind")
    return _either(typing.get_args(choices))


def _either(choices) -> str:
    *others, last = map(repr, choices)
    return f"{', '.join(others)} or {last}" if others else last


def _choices_at(kind, field: str | None) -> list:
    """The values that a field of ``kind`` may have, if they are a fixed list; otherwise an empty list."""
    nodes = [msgspec.inspect.type_info(kind)]
    for name, index in _PATH.findall(field or ""):
        below = [found for node in nodes for found in _below(node, name, index)]
        nodes = [each for found in below for each in getattr(found, "types", (found,))]
    return [value for node in nodes for value in getattr(node, "values", ())]


def _below(node, name: str, index: str) -> list:
    """Types of a struct's field, given by name or (for structs stored as arrays) by index; or types of a container's
    items."""
    fields = getattr(node, "fields", ())
    if name:
        return [field.type for field in fields if field.encode_name == name]
    if fields and index.isdecimal():
        return [fields[int(index)].type]
    return [
        *getattr(node, "item_types", ()),
        *(getattr(node, part) for part in ("item_type", "value_type") if hasattr(node, part)),
    ]


def _given(path) -> Path:
    if not str(path):
        raise InputError("no path is given", value="")
    return Path(path)


def _value_at(data: bytes, field: str | None) -> Any:
    """The value at a msgspec error path, or ``...`` if the path cannot be followed."""
    try:
        node = msgspec.json.decode(data)
        for name, index in _PATH.findall(field or ""):
            if name:
                node = node[name]
            elif index == "...":  # msgspec does not say which key of a mapping it was
                return ...
            else:
                node = node[int(index)]
        return node if not isinstance(node, (dict, list)) else ...
    except (KeyError, IndexError, TypeError, ValueError, RecursionError, msgspec.DecodeError):
        return ...


def encode(value: object) -> bytes:
    """Deterministic JSON: the same value gives the same bytes."""
    return msgspec.json.encode(value) + b"\n"


def save(path, value: object, *, indent: int = 0) -> None:
    """Write ``value`` as JSON to a temporary name next to ``path``, then rename it.

    Raises:
        InputError: ``path`` cannot be written; nothing is left behind.
    """
    data = encode(value)
    if indent:
        data = msgspec.json.format(data, indent=indent)
    write_atomically(path, data)


def write_atomically(path, data: bytes) -> None:
    """Replace ``path`` with ``data`` in one step, so that no reader sees half of it."""
    path = _given(path)
    temporary = None
    try:
        handle, temporary = _beside(path)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", file=path) from None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _beside(path: Path) -> tuple[int, str]:
    """A new temporary file in the directory of ``path``; the directory is made if it is missing.

    The file has the mode of an existing file at ``path``, otherwise the mode that the umask gives.
    """
    if path.exists() and not path.is_file():  # a device or a pipe would be replaced by a file
        raise InputError("cannot be written: " + _what_else(path.stat().st_mode), file=path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = str(path.parent / f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # less the umask
    with contextlib.suppress(FileNotFoundError):
        os.fchmod(handle, stat.S_IMODE(path.stat().st_mode))
    return handle, temporary


def remove_half_written(path) -> None:
    """Remove temporary files of ``path`` that a killed process left. The caller must be alone in the directory."""
    path = Path(path)
    for temporary in path.parent.glob(f".{path.name}.{'[0-9a-f]' * 8}"):
        temporary.unlink()


def check_writable(path) -> None:
    """Refuse a ``path`` that :func:`save` cannot write, before the work is done whose result goes there.

    Raises:
        InputError: as for :func:`save`.
    """
    path = _given(path)
    try:
        handle, temporary = _beside(path)
        os.close(handle)
        os.unlink(temporary)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", file=path) from None


def make_directory(path) -> None:
    """Make the directory of ``--out``. Raises InputError if it cannot be made."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"expected a directory: {error.strerror}", field="--out", value=str(path)) from None


def sha256(path) -> str:
    """Hex digest of a file's bytes; ranks compare it before the first collective."""
    return hashlib.sha256(read_bytes(path)).hexdigest()
