"""Which answers have lost a value, on scripted evidence."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from ctxwin.audit.harm import Difference, Floor, Harm, Value, value_of
from ctxwin.audit.replay import Exchange, References, Rows
from ctxwin.fidelity import Reference


class Scripted:
    """A replay whose layouts are names, and whose greedy answers are given."""

    def __init__(self, **answers: str) -> None:
        self.answers, self.asked = answers, list[str]()

    def value(self, exchange: Exchange) -> Value | None:
        return value_of(exchange.query, complete=exchange.ended) if exchange.greedy else None

    def answer(self, layout: str, query: str, max_tokens: int, at_most: int) -> Exchange:
        self.asked.append(layout)
        return Exchange(self.answers[layout], (), True)

    def score(self, layout: str, exchanges: list[Exchange]) -> list[Rows]:
        return [[{0: -0.1, 1: -2.4}] * (len(exchanges[0].ids) + 1)]

    def references(self, exchange: Exchange, rows: Rows, *, own: bool = True) -> References:
        layouts: Any = {name: partial(str, name) for name in ("placed", "cut", "stream")}
        return References(self, exchange, layouts, {"placed": rows}, own=own)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("served", "cut", "seen", "reference", "expected"),
    [
        ("The answer is 7.", "7", "7", "stricter", Harm("scored", 0.0)),  # another text, the same value
        ("8", "7", "7", "stricter", Harm("scored", 1.0)),
        (
            "8",
            "8",
            "7",
            "stricter",
            Harm("scored", 0.0, undecided=True),
        ),  # another cut of the prefill would say so, too
        ("8", "9", "7", "stricter", Harm("scored", 0.0, undecided=True)),
        ("8", "7", "8", "stricter", Harm("scored", 0.0, undecided=True)),  # it remembers
        ("8", "7", "8", "window", Harm("scored", 1.0)),
        ("8", "7", "8", "stream", Harm("scored", 0.0)),
        ("7", "7", "8", "stream", Harm("scored", 1.0)),
        ("eight, or so I would say if asked", "7", "7", "nearer", Harm("scored", 1.0)),
    ],
)
def test_a_value_is_lost_where_every_exact_reference_gives_another(
    served: str, cut: str, seen: str, reference: Reference, expected: Harm
) -> None:
    replay = Scripted(cut=cut, stream=seen)
    exact, changed = Exchange("7", (5,), True), [{0: -2.4, 1: -0.1}] * 2
    rows = replay.score("placed", [exact])[0]
    references = replay.references(exact, rows)
    finding = references.compare(changed, reference, Floor(), lambda: value_of(served))
    assert finding.harm == expected
    same = references.compare(
        rows, reference, Floor(), lambda: pytest.fail("an answer of the same tokens was asked for")
    )
    assert same.harm == Harm("scored", 0.0)


def test_text_is_held_against_the_floor() -> None:
    replay = Scripted()
    words = Exchange("It shows a red car in front of a house.", (5, 6), True)
    floor = Floor(cut=Difference(units=("a",), nats=0.5), references=Difference(units=("a", "b"), nats=2.0))
    rows = [{0: -0.1, 1: -2.4}] * 3
    for reference, worth in (("window", 0.5), ("stricter", 1.0)):
        references = replay.references(words, rows)
        finding = references.compare([{0: -2.4, 1: -0.1}] * 3, reference, floor, lambda: None)  # type: ignore[arg-type]
        assert finding.harm.kind == "text"
        assert finding.harm.amount == pytest.approx(2.3 - worth)  # what the exact tokens lose is more than the KL
    assert replay.asked == []  # nothing is generated for text


def test_a_drawn_answer_has_no_value_to_lose() -> None:
    drawn = Exchange("7", (5,), True, greedy=False)
    rows = [{0: -0.1, 1: -2.4}] * 2
    references = Scripted().references(drawn, rows, own=False)
    assert references.compare(rows, "window", Floor(), lambda: ("number", "7")).harm == Harm("text", 0.0)
