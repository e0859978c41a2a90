"""Windows in LangGraph: a small reference in the state, a session in a node, a node that is ready to use.

`open_window` gives any node a window that may be run again, resumed, rewound and forked; `WindowNode` answers the messages
of a graph. The engine travels in the run's context (`WindowContext`), never in the state. Needs ``ctxwin[langgraph]``.
"""

from __future__ import annotations

from ctxwin.adapters.langgraph.context import Watcher, WindowContext
from ctxwin.adapters.langgraph.node import WindowNode, WindowState
from ctxwin.adapters.langgraph.reference import load, merge_windows, save
from ctxwin.adapters.langgraph.session import Session, SessionStream, open_window

__all__ = [
    "Session", "SessionStream", "Watcher", "WindowContext", "WindowNode", "WindowState", "load", "merge_windows",
    "open_window", "save",
]  # fmt: skip
