"""An MCP server whose tools edit a running window: an agent host looks back, forgets, forks and plans. Needs ``ctxwin[mcp]``."""

from __future__ import annotations

from ctxwin.extras import optional_imports

with optional_imports():
    from ctxwin.adapters.mcp.server import WindowTools, mcp_server

__all__ = ["WindowTools", "mcp_server"]
