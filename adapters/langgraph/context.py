"""`WindowContext`: what a graph run needs and its state must not hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ctxwin.engines.base import Engine

if TYPE_CHECKING:
    from ctxwin.window.events import Observer
    from ctxwin.window.window import Window


class Watcher(Protocol):
    """What wants to see every window, like `ctxwin.baselines.ledger.Ledger` and `ctxwin.view.trace.Trace`."""

    def watch(self, window: Window) -> None: ...


@dataclass
class WindowContext:
    """``context_schema`` of a graph with windows; or give your own context these attributes, the engine at least.

    Attributes:
        engine: from `ctxwin.open_engine`; shared by all windows of all runs. Never in the state.
        ledger: counts every window that a node opens, e.g. `ctxwin.baselines.ledger.Ledger`.
        observer: sees them, too: a callable as for `Window.observe`, or a `Watcher` like `ctxwin.view.trace.Trace`.
    """

    engine: Engine
    ledger: Watcher | None = None
    observer: Observer | Watcher | None = None


def engine_of(context: Any) -> Engine:
    """The engine in a run's context; TypeError with the remedy where there is none."""
    engine = getattr(context, "engine", None)
    if not isinstance(engine, Engine):
        raise TypeError(
            f"the run's context must have an engine, got {type(context).__name__}; build the graph with "
            "StateGraph(State, context_schema=WindowContext) and run it with context=WindowContext(engine)"
        )
    return engine


def attend(context: Any, window: Window) -> None:
    """Lets the context's ledger and observer see ``window``."""
    for watcher in (getattr(context, "ledger", None), getattr(context, "observer", None)):
        if watcher is not None and hasattr(watcher, "watch"):
            watcher.watch(window)
        elif watcher is not None:
            window.observe(watcher)
