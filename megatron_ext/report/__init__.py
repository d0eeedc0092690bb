"""Timelines, and predicted beside measured."""

from megatron_ext.report import show
from megatron_ext.report.build import Report, build
from megatron_ext.report.run_dir import RunDir, load
from megatron_ext.report.write import write

__all__ = ["Report", "RunDir", "build", "load", "show", "write"]
