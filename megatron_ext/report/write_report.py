"""Write what a report adds to its run directory."""

from megatron_ext.formats import json_files
from megatron_ext.report import report_text, timeline, trace_overlay
from megatron_ext.report.build_report import Report
from megatron_ext.report.timeline_panels import iterations_by_name


def write(report: Report) -> None:
    """Write the picture, the overlay and, last, the page that speaks of them.

    Raises:
        InputError: the directory cannot be written.
    """
    timeline.save(report, report.run.file("timeline"))
    trace_overlay.save(report.run.file("overlay"), iterations_by_name(report))
    json_files.write_atomically(report.run.file("report"), report_text.as_markdown(report).encode())
