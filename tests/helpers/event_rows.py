"""Events of traces, written short."""

from megatron_ext.formats.trace import Event, Lane


def events(rank: int, lane: Lane, *bars: tuple) -> list[Event]:
    """Of one lane; each bar is the name, the start and the duration in microseconds."""
    return [Event(rank, lane, *bar) for bar in bars]
