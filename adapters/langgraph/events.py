"""What a window's operation looks like in a run's custom stream: one small JSON dict each."""

from __future__ import annotations

from typing import Any

from ctxwin.window.events import Event

_LONGEST = 400  # characters of a query, an answer or a note


def describe_event(event: Event, key: str | None) -> dict[str, Any]:
    """``event`` as JSON, about 300 bytes.

    ``type`` is ``"window"``. ``key`` names the event: a node that runs again says the same key for the same event.
    An ask adds ``query``, ``answer``, ``lanes`` (tokens by lane) and its cost; ``again`` says that the answer was kept from
    an earlier execution, so that nothing was computed now.
    """
    state = event.state
    told: dict[str, Any] = {
        "type": "window", "op": event.op, "window": event.window, "version": event.version, "ids": list(event.ids),
        "tokens": state.tokens, "budget": state.budget, "placed": len(state.placed), "evicted": len(state.evicted),
    }  # fmt: skip
    if key is not None:
        told["key"] = key
    for name in ("parent", "other", "note"):
        if value := getattr(event, name):
            told[name] = value[:_LONGEST]
    if event.query is not None:
        told["query"] = event.query[:_LONGEST]
    if event.answer is not None:
        usage = event.answer.usage
        again = event.note == "again"
        told |= {
            "answer": event.answer.text[:_LONGEST], "lanes": dict(usage.reused_tokens), "prompt_tokens": usage.prompt_tokens,
            "computed_tokens": 0 if again else usage.computed_tokens, "vision_encodes": 0 if again else usage.vision_encodes,
            "exact": usage.exact, "seconds": round(event.seconds, 6),
        }  # fmt: skip
    return told
