"""The one exception for what a user got wrong, and the one for ranks that ended too early."""

import re

GIB = 2**30
_BYTES = re.compile(r"\b(\d{10,}) bytes\b(?! \()")


class InputError(ValueError):
    """Bad input, reported in one line that names file, field and value.

    Args:
        message: what is wrong and what is expected, without a line break. GiB are added to large numbers of bytes.
        file: path of the file (or name of the flag) the value came from.
        field: dotted path of the field inside the file, e.g. ``groups[3].route``.
        value: the offending value; shortened when printed.
    """

    def __init__(self, message: str, *, file=None, field: str | None = None, value: object = ...):
        message = with_gib(message)
        self.message, self.file, self.field, self.value = message, file, field, value
        parts = []
        if file is not None:
            parts.append(str(file))
        if field:
            parts.append(field if value is ... else f"{field} = {_short(value)}")
        elif value is not ...:
            parts.append(_short(value))
        parts.append(message)
        super().__init__(one_line(": ".join(parts)))


class RankFailed(RuntimeError):
    """A rank ended before its work was done, or did not start. The first line of the text says why."""


def flag(name: str) -> str:
    """An option's name on the command line; ``name`` is its name in Python."""
    return "--use-nccl-ub" if name == "nccl_ub" else "--" + name.replace("_", "-")


def option_error(name: str, why: str, value: object = ...) -> InputError:
    """The error for option ``name`` (its name in Python): what is wrong, and the value that it was given. An option
    without a value on the command line has a truth value in Python, which nobody wrote."""
    return InputError(why, field=flag(name), value=... if isinstance(value, bool) else value)


def with_gib(text: str) -> str:
    """``text`` with GiB added after each number of bytes from 1 GiB on."""
    gib = lambda found: int(found[1]) / GIB
    return _BYTES.sub(lambda found: f"{found[0]} ({gib(found):.2f} GiB)" if gib(found) >= 1 else found[0], text)


def one_line(text: str, limit: int = 2000) -> str:
    """``text`` without line breaks. If it is longer than ``limit``, its middle is left out."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return " ".join(text.splitlines())


def _short(value, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
