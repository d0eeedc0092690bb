"""Timelines, and predicted next to measured."""

from megatron_ext.report import report_text
from megatron_ext.report.build_report import Report, build
from megatron_ext.report.run_dir import RunDir, load
from megatron_ext.report.write_report import write

__all__ = ["Report", "RunDir", "build", "load", "report_text", "write"]
