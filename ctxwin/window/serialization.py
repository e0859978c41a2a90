"""JSON forms of answers, plans and windows, shared by server and client."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ctxwin.window.answer import Answer, Disposability, Plan

if TYPE_CHECKING:
    from ctxwin.window.window import Window

REFERENCE = "ctxwin_chunk"
"""The type of a content part that names an uploaded chunk by its id."""
_ANSWER, _PLAN, _DISPOSABILITY = TypeAdapter(Answer), TypeAdapter(Plan), TypeAdapter(Disposability)


def number(value: float | None) -> float | str | None:
    """Return a number for JSON: infinities, which JSON lacks, become text."""
    return value if value is None or math.isfinite(value) else str(value)


def answer_to(answer: Answer, keep: Callable[[Mapping[str, Any]], Any] | None = None) -> dict[str, Any]:
    """Return an answer as JSON; ``first_token_logprobs`` by token id as text.

    ``keep`` returns references to stage outputs, which take their place; without it they are left out.
    """
    references = {"outputs": keep(answer.outputs)} if keep is not None and answer.outputs else {}
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "usage": asdict(answer.usage),
        "first_token_logprobs": {str(i): number(p) for i, p in answer.first_token_logprobs.items()},
        "audit": number(answer.audit),
        "remembered": answer.remembered,
        "tool_calls": [asdict(call) for call in answer.tool_calls],
        "broken_calls": [asdict(call) for call in answer.broken_calls],
        "looked_up": [asdict(done) for done in answer.looked_up],
        "others": [answer_to(other, keep) for other in answer.others],
        **references,
    }


def answer_from(data: dict[str, Any]) -> Answer:
    """Restore an answer from `answer_to`."""
    return _ANSWER.validate_python(data)


def plan_to(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON, with the sums beside the entries."""
    sums = ("requests", "tokens", "computed_tokens", "repair_tokens", "bytes", "exact")
    ids = ("not_attended", "evicted_antecedents")
    entries = [{**vars(e), **{name: list(getattr(e, name)) for name in ids}} for e in plan.entries]
    return {**asdict(replace(plan, entries=())), "entries": entries, **{name: getattr(plan, name) for name in sums}}


def plan_from(data: dict[str, Any]) -> Plan:
    """Restore a plan from `plan_to`."""
    return _PLAN.validate_python(data)


def disposability_to(disposability: Disposability) -> dict[str, Any]:
    """Return the result of `Window.disposable` as JSON."""
    return {**asdict(disposability), "kl": number(disposability.kl)}


def disposability_from(data: dict[str, Any]) -> Disposability:
    """Restore a disposability from `disposability_to`."""
    return _DISPOSABILITY.validate_python(data)


def window_to(window: Window) -> dict[str, Any]:
    """Return the description of a window, without its plan. O(n)."""
    return {
        "object": "ctxwin.window",
        "id": window.id,
        "system_prompt": window.system_prompt,
        "budget": window.budget,
        "low_water": window.low_water,
        "tokens": window.tokens,
        "bytes": window.bytes,
        "version": window.version,
        "ids": list(window.ids),
        "evicted": list(window.evicted),
        "fidelity": window.fidelity.model_dump(mode="json"),
    }
