"""Moved: importing this says where to."""

raise ImportError(
    "ctxwin.adapters has become langchain_ctxwin (with langchain_ctxwin.langgraph), ctxwin_client (was openai and mcp) and "
    "ctxwin_ray; pip install 'ctxwin[langgraph]', 'ctxwin[openai]' or 'ctxwin[ray]'",
    name=__name__,
)
