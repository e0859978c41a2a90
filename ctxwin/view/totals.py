"""What a recorded run asked and cost, in numbers."""

from __future__ import annotations

from typing import Any

from ctxwin.view.trace import Recording


def totals(recording: Recording) -> dict[str, Any]:
    """Sums over all asks of all windows.

    Returns a dict with ``events``, ``windows``, ``asks``, ``prompt_tokens``, ``computed_tokens`` (of the asks, and
    ``idle_tokens`` noted beside them), ``vision_encodes``, ``known`` (asks whose right answer was noted), ``right``, and
    ``costs``: by name, the ``tokens`` that something else would have computed, and the number of ``asks`` it is known for.
    """
    events = recording.events
    asks = [event for event in events if event["op"] == "ask"]
    known = [ask for ask in asks if "truth" in ask]
    costs: dict[str, dict[str, float]] = {}
    for ask in asks:
        for name, tokens in ask.get("costs", {}).items():
            cost = costs.setdefault(name, {"tokens": 0, "asks": 0})
            cost["tokens"] += tokens
            cost["asks"] += 1
    idle = sum(ask.get("idle_tokens", 0) for ask in asks)
    sums = {name: sum(a["usage"][name] for a in asks) for name in ("prompt_tokens", "computed_tokens")}
    return {
        "events": len(events),
        "windows": len({event["window"] for event in events}),
        "asks": len(asks),
        **sums,
        "computed_tokens": sums["computed_tokens"] + idle,
        "idle_tokens": idle,
        "vision_encodes": sum(event.get("encodes", 0) for event in events),
        "known": len(known),
        "right": sum(ask["answer"].strip() == ask["truth"].strip() for ask in known),
        "costs": costs,
    }


def in_words(numbers: dict[str, Any]) -> str:
    """One or two sentences for people."""
    computed, prompts = numbers["computed_tokens"], numbers["prompt_tokens"]
    share = f" ({computed / prompts:.1%})" if prompts else ""
    text = f"{numbers['asks']:,} asks; {computed:,} of {prompts:,} prompt tokens computed{share}, "
    text += f"{numbers['vision_encodes']:,} vision encodes."
    for name, cost in numbers["costs"].items():
        text += f" {name}: {cost['tokens']:,.0f}."
    return text
