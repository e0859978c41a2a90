"""Reports of scored runs: tables for a terminal and in markdown, figures, and one self-contained HTML page.

Everything is made from what `ctxwin_evals.score.scores` returns, so a report holds no figure of its own.
"""

from ctxwin_evals.report.page import page, write_report
from ctxwin_evals.report.tables import Run, read_runs
from ctxwin_evals.report.text import markdown, rich_tables

__all__ = ["Run", "markdown", "page", "read_runs", "rich_tables", "write_report"]
