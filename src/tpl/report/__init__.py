"""Comparison of runs: a self-contained HTML page, tables and figures."""

from tpl.report.columns import mean_rows, summary_rows
from tpl.report.compare import compare
from tpl.report.find import Findings, FoundRun, find_runs, group_runs
from tpl.report.page import write_page
from tpl.report.tables import markdown, rich_table

__all__ = [
    "Findings",
    "FoundRun",
    "compare",
    "find_runs",
    "group_runs",
    "markdown",
    "mean_rows",
    "rich_table",
    "summary_rows",
    "write_page",
]
