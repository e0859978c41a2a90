"""`ctxwin view`: a picture of windows over time, from a trace (`ctxwin.view.trace`): one HTML file, or a live page."""

from ctxwin.view.page import render
from ctxwin.view.totals import totals

__all__ = ["render", "totals"]
