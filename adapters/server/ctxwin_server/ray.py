"""Moved: importing this says where to."""

raise ImportError("ctxwin_server.ray has become ctxwin_ray; pip install 'ctxwin[ray]'", name=__name__)
