"""Write what a report adds to its run directory."""

from megatron_ext import files
from megatron_ext.report import overlay, show, timeline
from megatron_ext.report.build import Report
from megatron_ext.report.panels import iterations_by_name


def write(report: Report) -> None:
    """Write the picture, the overlay and, last, the page that speaks of them.

    Raises:
        InputError: the directory cannot be written.
    """
    timeline.save(report, report.run.file("timeline"))
    overlay.save(report.run.file("overlay"), iterations_by_name(report))
    files.write_atomically(report.run.file("report"), show.as_markdown(report).encode())
