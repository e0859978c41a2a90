"""OpenTelemetry spans of what windows do: nothing, and no import of the API, until `start` is called.

An ask is ``ctxwin.ask`` with ``ctxwin.lay_out`` (lanes; ``ctxwin.read`` for each span or patch that the store is asked for),
``ctxwin.run`` (the engine: loads and forwards) and ``ctxwin.settle`` (what goes to the store) below it. A server begins
``ctxwin.request`` under the client's ``traceparent``, and vLLM's own spans of the request stand below ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()
_tracer: Any = None


def start(provider: Any = None) -> None:
    """Begins to make spans, by OpenTelemetry's global provider or another one.

    Raises ModuleNotFoundError without ``opentelemetry-api``. Whoever sets the provider decides where spans go.
    """
    global _tracer
    from opentelemetry import trace

    _tracer = trace.get_tracer("ctxwin", tracer_provider=provider)


def stop() -> None:
    """Makes no more spans."""
    global _tracer
    _tracer = None


def span(name: str, headers: Mapping[str, str] | None = None, **attributes: Any) -> AbstractContextManager[Any]:
    """A span while the block runs, below the current one, or below the one that ``headers`` carry.

    The block gets the span, or None while none are made. Cost: then a comparison.
    """
    if _tracer is None:
        return _NOTHING
    context = None
    if headers is not None:
        from opentelemetry.propagate import extract

        context = extract(headers)
    named = {f"ctxwin.{key}": value for key, value in attributes.items()}
    made: AbstractContextManager[Any] = _tracer.start_as_current_span(f"ctxwin.{name}", context, attributes=named)
    return made


def note(**attributes: Any) -> None:
    """Gives the current span attributes that were not known when it began."""
    if _tracer is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes({f"ctxwin.{key}": value for key, value in attributes.items()})


def headers() -> dict[str, str] | None:
    """The current span as HTTP headers, for who continues the trace elsewhere; None while no spans are made."""
    if _tracer is None:
        return None
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier
