"""What travels as JSON: answers, plans and windows, the same forms at both ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ctxwin.engines.base import ScoredToken
from ctxwin.window.answer import Answer, Disposability, Plan

if TYPE_CHECKING:
    from ctxwin.window.window import Window

_LEAST_LOGPROB = -9999.0
"""What is shown for a token that could not be drawn, as vLLM shows it: JSON has no infinities."""
_ANSWER, _PLAN, _DISPOSABILITY = TypeAdapter(Answer), TypeAdapter(Plan), TypeAdapter(Disposability)


def number(value: float | None) -> float | str | None:
    """JSON has no infinities; they travel as text."""
    return value if value is None or math.isfinite(value) else str(value)


def scores_to(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """The log-probabilities of an answer's tokens as OpenAI shows them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = decode([token])
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(text.encode())}

    content = [
        {**entry(t, t.logprob), "top_logprobs": [entry(*other) for other in t.best.items()]}
        for t in tokens
        if isinstance(t, ScoredToken)
    ]
    return {"content": content, "refusal": None}


def answer_to(answer: Answer) -> dict[str, Any]:
    """An answer as JSON; ``first_token_logprobs`` by token id as text."""
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
        "others": [answer_to(other) for other in answer.others],
    }


def answer_from(data: dict[str, Any]) -> Answer:
    """The answer that `answer_to` made this of."""
    return _ANSWER.validate_python(data)


def plan_to(plan: Plan) -> dict[str, Any]:
    """A plan as JSON, with the sums beside the entries."""
    sums = ("requests", "tokens", "computed_tokens", "repair_tokens", "bytes", "exact")
    return {**asdict(plan), **{name: getattr(plan, name) for name in sums}}


def plan_from(data: dict[str, Any]) -> Plan:
    """The plan that `plan_to` made this of."""
    return _PLAN.validate_python(data)


def disposability_to(found: Disposability) -> dict[str, Any]:
    """What `Window.disposable` found, as JSON."""
    return {**asdict(found), "kl": number(found.kl)}


def disposability_from(data: dict[str, Any]) -> Disposability:
    """The finding that `disposability_to` made this of."""
    return _DISPOSABILITY.validate_python(data)


def window_to(window: Window) -> dict[str, Any]:
    """What a window says about itself without a plan. O(n)."""
    return {
        "object": "ctxwin.window",
        "id": window.id,
        "system_prompt": window.system_prompt,
        "budget": window.budget,
        "tokens": window.tokens,
        "bytes": window.bytes,
        "version": window.version,
        "ids": list(window.ids),
        "evicted": list(window.evicted),
        "fidelity": window.fidelity.model_dump(mode="json"),
    }
