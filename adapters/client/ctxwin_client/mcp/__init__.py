"""An MCP server whose tools edit a running window: an agent host recalls, forgets, forks and plans. Needs ``ctxwin[mcp]``."""

from __future__ import annotations

from ctxwin.extras import optional_imports

with optional_imports():
    from ctxwin_client.mcp.server import WindowTools, mcp_server

__all__ = ["WindowTools", "mcp_server"]
