"""Timelines, and predicted next to measured."""

from megatron_ext.formats import json_files
from megatron_ext.report import report_text, timeline
from megatron_ext.report.build_report import Report, build
from megatron_ext.report.run_dir import RunDir, load

__all__ = ["Report", "RunDir", "build", "load", "report_text", "write"]


def write(report: Report) -> None:
    """Write the picture and, last, the page that refers to it.

    Raises:
        InputError: the directory cannot be written.
    """
    timeline.save(report, report.run.file("timeline"))
    json_files.write_atomically(report.run.file("report"), report_text.as_markdown(report).encode())
