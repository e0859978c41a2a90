"""Requests whose system prompt changes, in the form of seven clients, and what stands in it."""

from __future__ import annotations

import copy
import re
from typing import Any

DIALECTS = ("chat", "parts", "turns", "messages", "blocks", "responses", "text")
NAMES = {"messages": "system", "blocks": "system", "responses": "instructions", "text": "instructions"}


def words(value: Any) -> int:
    return len(str(value).split())


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def body(dialect: str, lines: list[str], gap: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """A request with a system prompt, in the form of a client; ``gap`` stands between its lines."""
    half = len(lines) // 2
    whole, halves = gap.join(lines), [gap.join(part) for part in (lines[:half], lines[half:]) if part]
    parts = [{"type": "text", "text": text} for text in halves]
    if dialect == "text":
        return {"instructions": whole, "input": turns[0]["content"], "max_output_tokens": 5}
    if dialect in NAMES:
        system = parts if dialect == "blocks" else whole
        return {NAMES[dialect]: system, "input" if dialect == "responses" else "messages": copy.deepcopy(turns)}
    rules: dict[str, list[dict[str, Any]]] = {
        "chat": [{"role": "system", "content": whole}],
        "parts": [{"role": "developer", "content": parts}],
        "turns": [{"role": "system", "content": text} for text in halves],
    }
    return {"messages": [*rules[dialect], *copy.deepcopy(turns)]}


def system_of(dialect: str, data: dict[str, Any]) -> str:
    """All texts of a system prompt, a line behind each."""
    if dialect in NAMES:
        contents = [data.get(NAMES[dialect], "")]
    else:
        contents = [turn["content"] for turn in data["messages"] if turn["role"] in ("system", "developer")]
    texts = [
        c if isinstance(c, str) else part["text"] for c in contents for part in (c if isinstance(c, list) else [0])
    ]
    assert dialect not in ("parts", "turns", "blocks") or all(texts)
    return "\n".join(texts)


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in re.split(r"(?<=\.)\s+", text) if line.strip()]


def clocked(time: int, *turns: dict[str, Any], rules: str = "You watch.", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": f"{rules}\nIt is {time}."}, *(turns or [user("hi")])], **fields}
