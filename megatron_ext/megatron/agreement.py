"""Ranks agree before they go on: either all go on, or all raise the same error. Collective."""

import socket
from collections.abc import Callable

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.objects import gather_objects


def refusal(step: Callable, *given) -> str | None:
    """The text of the InputError that ``step(*given)`` raises, or None."""
    try:
        step(*given)
    except InputError as error:
        return str(error)
    return None


def agree(error: str | None, fact: tuple[str, str], *, file) -> None:
    """Return only if no rank has an error and all ranks have the same value of ``fact``.

    Args:
        error: this rank's error, or None.
        fact: the name of what is compared, and this rank's value.

    Raises:
        InputError: on every rank, with the text of the lowest rank that has one, and its node if another has none.
    """
    everybody = gather_objects((error, fact[1], socket.gethostname()))
    refused = [(host, message) for message, _, host in everybody if message is not None]
    for host, message in refused:
        raise InputError(message if {*dict(refused)} == {rank[2] for rank in everybody} else f"on {host}: {message}")
    for rank, (_, value, _) in enumerate(everybody):
        if value != everybody[0][1]:
            raise InputError(f"rank {rank} and rank 0 read different files", file=file, field=fact[0], value=value[:12])
