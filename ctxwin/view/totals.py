"""Totals of a recorded run: asks, answers and computed tokens."""

from collections import Counter
from typing import Any

from ctxwin.view.trace import Recording


def totals(recording: Recording) -> dict[str, Any]:
    """Return sums over all asks of all windows.

    Returns:
        ``events``, ``windows``, ``asks`` (those that only tested a chunk are ``tests``), ``prompt_tokens`` of the asks;
        ``computed_tokens`` in all, with the ``idle_tokens`` noted beside asks and the ``test_tokens``; ``vision_encodes``;
        ``patches`` that were ``formed``, ``served`` and ``dropped``;
        ``known`` (asks whose right answer was noted), ``right``, and ``right_others`` by name; ``costs``: by name, the
        ``tokens`` that an alternative would have computed, and the number of ``asks`` with that figure.
    """
    events = recording.events
    tests = [event for event in events if "test" in event]
    asks = [event for event in events if event["op"] == "ask" and "test" not in event]
    with_truth = [ask for ask in asks if "truth" in ask]
    right_others: Counter[str] = Counter()
    for ask in with_truth:
        truth = ask["truth"].strip()
        right_others.update({name: answer.strip() == truth for name, answer in ask.get("answers", {}).items()})
    costs: dict[str, dict[str, float]] = {}
    for ask in asks:
        for name, tokens in ask.get("costs", {}).items():
            cost = costs.setdefault(name, {"tokens": 0, "asks": 0})
            cost["tokens"] += tokens
            cost["asks"] += 1
    idle = sum(ask.get("idle_tokens", 0) for ask in asks)
    tested = sum(test["usage"]["computed_tokens"] for test in tests)
    patches = [event["patches"] for event in events if "patches" in event]
    return {
        "events": len(events),
        "windows": len({event["window"] for event in events}),
        "asks": len(asks),
        "tests": len(tests),
        "prompt_tokens": sum(ask["usage"]["prompt_tokens"] for ask in asks),
        "computed_tokens": sum(ask["usage"]["computed_tokens"] for ask in asks) + idle + tested,
        "idle_tokens": idle,
        "test_tokens": tested,
        "vision_encodes": sum(event.get("encodes", 0) for event in events),
        "patches": {what: sum(p[i] for p in patches) for i, what in enumerate(("formed", "served", "dropped"))},
        "known": len(with_truth),
        "right": sum(ask["answer"].strip() == ask["truth"].strip() for ask in with_truth),
        "right_others": dict(right_others),
        "costs": costs,
    }


def in_words(numbers: dict[str, Any]) -> str:
    """Return the totals as a short text."""
    computed, prompts = numbers["computed_tokens"], numbers["prompt_tokens"]
    share = f" ({computed / prompts:.1%})" if prompts else ""
    text = f"{numbers['asks']:,} asks; {computed:,} of {prompts:,} prompt tokens computed{share}, "
    text += f"{numbers['vision_encodes']:,} vision encodes."
    if any(numbers["patches"].values()):
        text += f" Patches: {', '.join(f'{count:,} {what}' for what, count in numbers['patches'].items())}."
    others = [f"{name} {cost['tokens']:,.0f}" for name, cost in numbers["costs"].items()]
    return text + (f" Tokens that others would have computed: {'; '.join(others)}." if others else "")
