"""Plots and the HTML report: `collect` run folders, `build` the report, `write` the page or `save` the figures."""

from erlangen.report.folder import ReportError, Run, collect, read
from erlangen.report.page import Report, build, render, write
from erlangen.report.static import save

__all__ = ["Report", "ReportError", "Run", "build", "collect", "read", "render", "save", "write"]
