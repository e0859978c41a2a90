"""Moved: importing this says where to."""

raise ImportError("ctxwin.trust has become ctxwin.audit; import it from there", name=__name__)
