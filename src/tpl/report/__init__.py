"""Comparison of runs: a self-contained HTML page (`page`), differences to earlier runs (`compare`), tables and figures.

Only what a table needs is imported from here: matplotlib and scipy take seconds.
"""

from tpl.report.columns import mean_rows, summary_rows
from tpl.report.find import Findings, FoundRun, find_runs, group_runs
from tpl.report.labels import method_label
from tpl.report.tables import markdown, rich_table

__all__ = [
    "Findings",
    "FoundRun",
    "find_runs",
    "group_runs",
    "markdown",
    "mean_rows",
    "method_label",
    "rich_table",
    "summary_rows",
]
