"""An MCP server whose tools edit a running window, in this process or on a server. Needs ``ctxwin[mcp]``.

The docstrings of `WindowTools` are the tools' descriptions, so they are written for a model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import ctxwin
from ctxwin.chunk import Chunk, TextPart
from ctxwin.errors import UnknownChunk
from ctxwin.extras import optional_imports
from ctxwin.window.window import Window

with optional_imports():
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.server.mcpserver.tools import Tool
    from mcp.types import ToolAnnotations

if TYPE_CHECKING:
    from ctxwin_client.window import RemoteWindow

P = ParamSpec("P")
Report = dict[str, Any]

MOST_BRANCHES = 16
_MAX_EVICTED, _MAX_LABEL = 64, 80  # evicted chunks that `plan` lists, and characters of a label
_READS, _EDITS = ToolAnnotations(readOnlyHint=True), ToolAnnotations(destructiveHint=False)
_DESTROYS = ToolAnnotations(destructiveHint=True)
_HINTS = {"plan": _READS, "look_back": _EDITS, "forget": _DESTROYS, "fork": _EDITS, "adopt": _EDITS}
_HINTS |= {"drop": _DESTROYS, "ask": _READS}


def _in_turn(tool: Callable[Concatenate[WindowTools, P], Report]) -> Callable[Concatenate[WindowTools, P], Report]:
    """Run ``tool`` alone, as a window has one writer; raise its errors as `ToolError`, whose messages alone hosts show."""

    @wraps(tool)
    def call(self: WindowTools, /, *args: P.args, **kwargs: P.kwargs) -> Report:
        try:
            with self._lock:
                return tool(self, *args, **kwargs)
        except Exception as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error

    return call


class WindowTools:
    """Tools over a window, which its owner closes, and its branches, of which ``window`` names one; default: the window."""

    def __init__(self, window: Window | RemoteWindow) -> None:
        self._window, self._lock = window, threading.Lock()
        self._branches: dict[str, Any] = {}
        self._origins: dict[str, str] = {}  # of branches, by id: what `fork` was given as window

    def _at(self, window: str) -> Any:
        windows = {"": self._window, self._window.id: self._window, **self._branches}
        if window not in windows:
            raise UnknownChunk(f"window must be one of {[*windows][1:]}, or omitted, got {window!r}")
        return windows[window]

    @_in_turn
    def plan(self, window: str = "") -> Report:
        """Shows the context window: which chunks are placed (id, label, tokens, how each will be served), which were evicted and
        can be looked back at, and what the next question will cost. Changes nothing."""
        at = self._at(window)
        plan, state = at.plan(), at.snapshot()
        labels = {p.id: _label(p.chunk) for p in (*state.placed, *state.evicted)}
        placed = [
            {"label": labels.get(e.id), "computed": e.compute, **_values(e, "id", "tokens", "lane", "exact", "pinned")}
            for e in plan.entries
        ]
        evicted = [{"id": p.id, "label": labels[p.id]} for p in reversed(state.evicted[-_MAX_EVICTED:])]
        cost = {"computed_tokens": plan.computed_tokens, "bytes": plan.bytes, "milliseconds": round(plan.ms, 1)}
        return {**_summary(at), "placed": placed, "evicted": evicted, "evicted_count": len(state.evicted), "next": cost}

    @_in_turn
    def look_back(self, query: str, reserve_tokens: int = 96, window: str = "") -> Report:
        """Brings evicted chunks back into the context window, without computing them again where their KV is kept.

        Args:
            query: the ids of the chunks (see plan), in any text.
            reserve_tokens: tokens to leave free for the next question and its answer; the oldest chunks leave for them, always.
        """
        at = self._at(window)
        return {"recalled": at.look_back(query, reserve_tokens=reserve_tokens), **_summary(at)}

    @_in_turn
    def forget(self, id: str, window: str = "") -> Report:
        """Removes a chunk for good, with all that others absorbed from it and what is stored of it. It cannot be looked back at.
        For what must not influence any further answer: private data, injected instructions."""
        at = self._at(window)
        at.evict(id, forget=True)
        return {"forgotten": id, **_summary(at)}

    @_in_turn
    def fork(self, system_prompt: str | None = None, window: str = "") -> Report:
        """Opens a branch that shares every chunk and costs nothing: try something there, by passing its id as window.
        A system_prompt replaces the window's own in the branch."""
        if len(self._branches) >= MOST_BRANCHES:
            raise ValueError(f"at most {MOST_BRANCHES} branches may be open, got one more; adopt or drop one")
        branch = self._at(window).fork(system_prompt)
        self._branches[branch.id], self._origins[branch.id] = branch, window
        return {"branch": branch.id, **_summary(branch)}

    @_in_turn
    def adopt(self, branch: str, force: bool = False) -> Report:
        """Makes a branch's state that of the window (or branch) it was forked from, and closes the branch. That one must not have
        been edited since the fork; force drops its edits."""
        into = self._branches.get(self._origins.get(branch, ""), self._window)
        into.adopt(self._branch(branch), force=force)
        self._branches.pop(branch).close()
        return _summary(into)

    @_in_turn
    def drop(self, branch: str) -> Report:
        """Closes a branch; what was done in it is gone."""
        self._branch(branch).close()
        del self._branches[branch]
        return _summary(self._window)

    @_in_turn
    def ask(self, query: str, max_tokens: int = 64, window: str = "") -> Report:
        """Asks the model a question about the chunks in the context window. Returns its answer and how many of the prompt's
        tokens were computed for it."""
        answer = self._at(window).ask(query, max_tokens)
        return {"answer": answer.text, **_values(answer.usage, "prompt_tokens", "computed_tokens", "exact")}

    def close(self) -> None:
        """Close the branches."""
        with self._lock:
            while self._branches:
                self._branches.popitem()[1].close()

    def _branch(self, branch: str) -> Any:
        if branch not in self._branches:
            raise UnknownChunk(f"branch must be one of {[*self._branches]}, got {branch!r}; fork one")
        return self._branches[branch]


def _label(chunk: Chunk) -> str:
    """Return a chunk's label, else its text and media in a few words."""
    texts = [part.text.strip() for part in chunk.parts if isinstance(part, TextPart)]
    return chunk.label or " ".join([*texts, *(f"[{part.media}]" for part in chunk.media)])[:_MAX_LABEL]


def _summary(window: Any) -> Report:
    return {"window": window.id, **_values(window, "version", "tokens", "budget")}


def _values(source: Any, *names: str) -> Report:
    return {name: getattr(source, name) for name in names}


def mcp_server(tools: WindowTools) -> MCPServer[Any]:
    """Return an MCP server with these tools; ``run()`` speaks over standard input and output until the host ends it."""
    served = [Tool.from_function(getattr(tools, name), annotations=hints) for name, hints in _HINTS.items()]
    for tool in served:  # an argument that is not known must not be passed over
        arguments = tool.fn_metadata.arg_model
        arguments.model_config["extra"] = "forbid"
        arguments.model_rebuild(force=True)
        tool.parameters = arguments.model_json_schema(by_alias=True)
    return MCPServer(
        "ctxwin",
        instructions="A context window of pictures, clips and texts. plan shows what is in it and what left; look_back "
        "brings chunks back, forget removes one for good, fork opens a branch to try something in.",
        version=ctxwin.__version__,
        log_level="WARNING",
        tools=served,
    )
