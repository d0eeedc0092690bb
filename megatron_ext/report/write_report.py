"""Write the files that a report adds to its run directory."""

from megatron_ext.formats import json_files
from megatron_ext.report import report_text, timeline
from megatron_ext.report.build_report import Report


def write(report: Report) -> None:
    """Write the picture and, last, the page that refers to it.

    Raises:
        InputError: the directory cannot be written.
    """
    timeline.save(report, report.run.file("timeline"))
    json_files.write_atomically(report.run.file("report"), report_text.as_markdown(report).encode())
