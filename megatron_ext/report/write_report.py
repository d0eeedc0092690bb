"""Write what a report adds to its run directory."""

from collections.abc import Iterable, Mapping

from megatron_ext.formats import json_files, trace
from megatron_ext.formats.trace import Event
from megatron_ext.report import report_text, timeline
from megatron_ext.report.build_report import Report
from megatron_ext.report.timeline_panels import iterations_by_name


def write(report: Report) -> None:
    """Write the picture, the traces over each other and, last, the page that speaks of them.

    Raises:
        InputError: the directory cannot be written.
    """
    timeline.save(report, report.run.file("timeline"))
    events, processes = over_each_other(iterations_by_name(report))
    trace.save(report.run.file("overlay"), events, about={"kind": "overlay"}, processes=processes)
    json_files.write_atomically(report.run.file("report"), report_text.as_markdown(report).encode())


def over_each_other(traces: Mapping[str, Iterable[Event]]) -> tuple[list[Event], dict[int, str]]:
    """Several traces of one iteration as one: every rank of each is a process, with its name; those of one rank follow
    each other in the order of the traces.

    Args:
        traces: events by name, times in microseconds from the same moment of an iteration.
    """
    events, names = list[Event](), dict[int, str]()
    for number, (name, mine) in enumerate(traces.items()):
        for event in mine:
            process = 1 + event.rank * len(traces) + number  # viewers give process 0 a meaning of its own
            names[process] = f"rank {event.rank}: {name}"
            events.append(event._replace(rank=process))
    return events, names
