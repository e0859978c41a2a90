"""`ctxwin view`: a picture of windows over time. `Trace` records them, `render` draws a trace as one HTML file."""

from ctxwin.view.page import render
from ctxwin.view.totals import totals
from ctxwin.view.trace import Trace, read_trace

__all__ = ["Trace", "read_trace", "render", "totals"]
