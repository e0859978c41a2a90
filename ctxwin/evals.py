"""Moved: importing this says where to."""

raise ImportError("ctxwin.evals has become ctxwin_evals; pip install 'ctxwin[evals]'", name=__name__)
