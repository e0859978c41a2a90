"""Moved: importing this says where to."""

raise ImportError("ctxwin.serve has become ctxwin_server; pip install 'ctxwin[serve]'", name=__name__)
