"""OpenTelemetry spans of window operations: none, and no import of the API, until `start` is called.

An ask is ``ctxwin.ask`` with ``ctxwin.lay_out`` (lanes; ``ctxwin.read`` for each span or patch read from the store),
``ctxwin.run`` (the engine: loads and forwards) and ``ctxwin.settle`` (writes to the store) below it. A server begins
``ctxwin.request`` under the client's ``traceparent``, and vLLM's own spans of the request are below ours.
"""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()
_tracer: Any = None


def start(provider: Any = None) -> None:
    """Start tracing, with OpenTelemetry's global provider or another one.

    Raises ModuleNotFoundError without ``opentelemetry-api``. The provider decides where spans are sent.
    """
    global _tracer
    from opentelemetry import trace

    _tracer = trace.get_tracer("ctxwin", tracer_provider=provider)


def span(name: str, headers: Mapping[str, str] | None = None, **attributes: Any) -> AbstractContextManager[Any]:
    """Return a context manager of a span below the current one, or below the one in ``headers``.

    Its value is the span, or None without tracing. Cost: a comparison without tracing.
    """
    if _tracer is None:
        return _NOTHING
    context = None
    if headers is not None:
        from opentelemetry.propagate import extract

        context = extract(headers)
    prefixed = {f"ctxwin.{key}": value for key, value in attributes.items()}
    manager: AbstractContextManager[Any] = _tracer.start_as_current_span(f"ctxwin.{name}", context, attributes=prefixed)
    return manager


def note(**attributes: Any) -> None:
    """Set attributes of the current span that were not known at its start."""
    if _tracer is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes({f"ctxwin.{key}": value for key, value in attributes.items()})


def headers() -> dict[str, str] | None:
    """Return the current span as HTTP headers, to continue the trace elsewhere; None without tracing."""
    if _tracer is None:
        return None
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier
