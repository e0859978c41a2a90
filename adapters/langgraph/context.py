"""`WindowContext`: what a graph run needs and its state must not hold; and what the run is told of its windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ctxwin.engines.base import Engine

if TYPE_CHECKING:
    from ctxwin.window.events import Event, Observer
    from ctxwin.window.window import Window


_LONGEST = 400  # characters of a query, an answer or a note


class Watcher(Protocol):
    """Whatever wants to see every window, like `ctxwin.baselines.ledger.Ledger` and `ctxwin.view.trace.Trace`."""

    def watch(self, window: Window) -> None:
        """Called once with each window that a node opens."""


@dataclass
class WindowContext:
    """``context_schema`` of a graph with windows; or give your own context these attributes, the engine at least.

    Attributes:
        engine: from `ctxwin.open_engine`; shared by all windows of all runs. Never in the state.
        ledger: counts every window that a node opens, e.g. `ctxwin.baselines.ledger.Ledger`.
        observer: sees them as well: a callable as for `Window.observe`, or a `Watcher` like `ctxwin.view.trace.Trace`.
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


def describe_event(event: Event, key: str | None) -> dict[str, Any]:
    """``event`` as JSON for a run's custom stream, about 300 bytes.

    ``type`` is ``"window"``. ``key`` names the event: a node that runs again gives the same event the same key.
    An ask adds ``query``, ``answer``, ``lanes`` (tokens by lane) and its cost; where its ``note`` is ``"again"``, the answer
    was kept from an earlier execution and nothing was computed now.
    """
    state = event.state
    told: dict[str, Any] = {"type": "window", "op": event.op, "window": event.window, "version": event.version}
    told |= {"ids": list(event.ids), "tokens": state.tokens, "budget": state.budget}
    told |= {"placed": len(state.placed), "evicted": len(state.evicted)}
    if key is not None:
        told["key"] = key
    for name in ("parent", "other", "note"):
        if value := getattr(event, name):
            told[name] = value[:_LONGEST]
    if event.query is not None:
        told["query"] = event.query[:_LONGEST]
    if event.answer is not None:
        usage, now = event.answer.usage, event.note != "again"
        told |= {
            "answer": event.answer.text[:_LONGEST],
            "lanes": dict(usage.reused_tokens),
            "prompt_tokens": usage.prompt_tokens,
            "computed_tokens": usage.computed_tokens if now else 0,
            "vision_encodes": usage.vision_encodes if now else 0,
            "exact": usage.exact,
            "seconds": round(event.seconds, 6),
        }
    return told
