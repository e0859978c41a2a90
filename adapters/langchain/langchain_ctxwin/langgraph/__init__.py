"""Windows in LangGraph: a small reference in the state, a session in a node, a node that is ready to use.

The engine travels in the run's context, never in the state. Needs ``ctxwin[langgraph]``.

A node of your own opens the window that the state names and returns the reference of the new version (see `open_window`, and
`aopen_window` for async nodes); a
key ``window: Annotated[dict[str, Any], merge_windows]`` of the state holds it.

The node may be interrupted, retried and returned to: versions never change, repeated edits give the same ids, and answers are
computed once. (A replay of an older checkpoint is another run, which asks again.) Branches (``Send``, parallel nodes) fork and
write their references to a key of their own; the node that joins them adopts one::

    def branch(state: State, runtime: Runtime[WindowContext]) -> State:  # Send("branch", {"window": ..., "page": 2})
        with open_window(state["window"], runtime) as window, window.fork() as mine:
            mine.append(Chunk.image(page_path(state["page"])))
            return {"branches": {str(state["page"]): mine.ref()}}

    def join(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state["window"], runtime) as window:
            window.adopt(state["branches"]["2"])
            return {"window": window.ref()}

`merge_windows` decides between parallel nodes that write the window's own key. To restore an older reference with
``update_state``, write ``Overwrite(reference)``: the reducer prefers the newer one.

A thread outlives the store's content: placed chunks are computed again from their sources. A picture given by its path
survives a lost store, one given in memory has its pixels only in that store. Evicted chunks cannot be recalled then.
"""

from __future__ import annotations

from ctxwin.extras import optional_imports

with optional_imports():
    from langchain_ctxwin.langgraph.node import DeltaWindowState, WindowNode, WindowState
    from langchain_ctxwin.langgraph.reference import load, merge_windows, save
    from langchain_ctxwin.langgraph.session import (
        AsyncSession,
        Session,
        Watcher,
        WindowContext,
        aopen_window,
        open_window,
    )

__all__ = ["AsyncSession", "DeltaWindowState", "Session", "Watcher", "WindowContext", "WindowNode", "WindowState"]
__all__ += ["aopen_window", "load", "merge_windows", "open_window", "save"]
