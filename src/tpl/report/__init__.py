"""Comparing runs: a self-contained page, and the same numbers as tables and pictures."""

from tpl.report.compare import compare
from tpl.report.find import Findings, FoundRun, find_runs
from tpl.report.page import write_page
from tpl.report.scenes import scenes_of
from tpl.report.tables import mean_rows, rich_table, summary_rows
from tpl.report.texts import markdown

__all__ = [
    "Findings",
    "FoundRun",
    "compare",
    "find_runs",
    "markdown",
    "mean_rows",
    "rich_table",
    "scenes_of",
    "summary_rows",
    "write_page",
]
