"""What travels as JSON: answers, plans and windows, the same forms at both ends."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ctxwin.window.answer import Answer, Disposability, Plan, PlanEntry, PlanRequest, Usage

if TYPE_CHECKING:
    from ctxwin.window.window import Window


def number(value: float | None) -> float | str | None:
    """JSON has no infinities; they travel as text."""
    return value if value is None or math.isfinite(value) else str(value)


def from_number(value: Any) -> float:
    return float(value)


def answer_to(answer: Answer) -> dict[str, Any]:
    """An answer as JSON; ``first_token_logprobs`` by token id as text."""
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "usage": asdict(answer.usage),
        "first_token_logprobs": {str(i): number(p) for i, p in answer.first_token_logprobs.items()},
        "audit": number(answer.audit),
        "remembered": answer.remembered,
    }


def answer_from(data: dict[str, Any]) -> Answer:
    return Answer(
        text=data["text"],
        token_ids=tuple(data["token_ids"]),
        usage=Usage(**data["usage"]),
        first_token_logprobs={int(i): from_number(p) for i, p in data["first_token_logprobs"].items()},
        audit=None if data["audit"] is None else from_number(data["audit"]),
        remembered=data["remembered"],
    )


def plan_to(plan: Plan) -> dict[str, Any]:
    """A plan as JSON, with the sums beside the entries."""
    return {
        "system_prompt_tokens": plan.system_prompt_tokens,
        "system_prompt_resident": plan.system_prompt_resident,
        "salted": plan.salted,
        "entries": [asdict(entry) for entry in plan.entries],
        "steps": [asdict(step) for step in plan.steps],
        "requests": plan.requests,
        "tokens": plan.tokens,
        "computed_tokens": plan.computed_tokens,
        "repair_tokens": plan.repair_tokens,
        "bytes": plan.bytes,
        "exact": plan.exact,
    }


def plan_from(data: dict[str, Any]) -> Plan:
    entries = []
    for entry in data["entries"]:
        lists = {name: tuple(entry[name]) for name in ("unseen", "missing")}
        entries.append(PlanEntry(**{**entry, **lists}))
    steps = tuple(PlanRequest(**step) for step in data["steps"])
    return Plan(data["system_prompt_tokens"], data["system_prompt_resident"], tuple(entries), data["salted"], steps)


def disposability_to(found: Disposability) -> dict[str, Any]:
    return {**asdict(found), "kl": number(found.kl)}


def disposability_from(data: dict[str, Any]) -> Disposability:
    return Disposability(**{**data, "kl": from_number(data["kl"])})


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
