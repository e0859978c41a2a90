"""Moved: importing this says where to."""

raise ImportError("ctxwin.engines.vllm has become ctxwin_vllm; pip install 'ctxwin[vllm]'", name=__name__)
