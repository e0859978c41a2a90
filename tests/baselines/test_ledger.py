"""The ledger against counts made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.baselines.ledger import Ledger
from window.fake import FakeEngine

QUERY = 4 + 2  # tokens of "what" with its turn


def window(engine: FakeEngine, budget: int = 4096) -> Window:
    return Window(engine, "0123456789abcde", budget, Fidelity("patched"))  # system prompt of 16 tokens


def chunk(name: str) -> Chunk:
    return Chunk.text(name * 16)


@pytest.fixture
def ledger(engine: FakeEngine) -> Ledger:
    return Ledger(engine)


@pytest.fixture
def w(engine: FakeEngine, ledger: Ledger) -> Window:
    """A window that the ledger watches."""
    watched = window(engine)
    ledger.watch(watched)
    return watched


def test_what_is_appended_is_found_by_every_policy(ledger: Ledger, w: Window) -> None:
    for name in "abc":
        w.append(chunk(name))
        w.ask("what", 2)
    first, second, third = ledger.rows
    assert first["computed_tokens"] == 16 + 16 + QUERY == first["computed_tokens_naive"]
    for row in (second, third):
        assert row["computed_tokens"] == 16 + QUERY
        assert row["prompt_tokens"] == row["prompt_tokens_naive"] == row["prompt_tokens_append"]
        assert (
            row["computed_tokens_naive"] == row["computed_tokens_trim"] == row["computed_tokens_append"] == 16 + QUERY
        )


def test_a_slide_costs_the_naive_user_everything_behind_the_header() -> None:
    engine = FakeEngine()
    ledger = Ledger(engine, reserve_tokens=QUERY + 2)
    w = window(engine, 16 + 4 * 16 + QUERY + 2)
    ledger.watch(w)
    for name in "abcde":
        w.append(chunk(name))
        w.slide(reserve_tokens=QUERY + 2)
        w.ask("what", 2)
    last = ledger.rows[-1]
    assert last["placed"] == 4
    assert last["computed_tokens"] == 16 + QUERY
    assert last["computed_tokens_naive"] == 4 * 16 + QUERY
    assert last["computed_tokens_trim"] == 3 * 16 + QUERY  # c, d behind the system prompt anew, and e


def test_a_look_back_at_the_end_costs_the_chunk_alone() -> None:
    engine = FakeEngine()
    ledger = Ledger(engine, reserve_tokens=QUERY + 2)
    w = window(engine, 16 + 4 * 16 + QUERY + 2)
    ledger.watch(w)
    ids = w.extend([chunk(name) for name in "abcd"])
    w.ask("what", 2)
    w.slide(2)
    w.ask("what", 2)
    trimmed = ledger.rows[-1]
    assert trimmed["computed_tokens_trim"] == QUERY, "it still holds all four: nothing to do"
    w.append(chunk("e"))
    w.recall(ids[0])
    w.ask("what", 2)
    row = ledger.rows[-1]
    # Both trimmed a and b when e came (c d e), then a came back: to its place, where it is still cached, or to the end.
    assert row["computed_tokens_trim"] == 3 * 16 + QUERY
    assert row["computed_tokens_append"] == 4 * 16 + QUERY, (
        "c, d and e stand behind the system prompt for the first time"
    )
    w.ask("when", 2)
    assert ledger.rows[-1]["computed_tokens_append"] == QUERY


def test_branches_have_users_of_their_own(ledger: Ledger, w: Window) -> None:
    w.extend([chunk(name) for name in "ab"])
    w.ask("what", 2)
    with w.fork() as branch:
        branch.append(chunk("c"))
        branch.ask("what", 2)
        w.adopt(branch)
    w.ask("what", 2)
    assert [row["computed_tokens_append"] for row in ledger.rows] == [48 + QUERY, 16 + QUERY, QUERY]
    assert ledger.rows[-1]["placed"] == 3


def test_what_is_remembered_is_cached(engine: FakeEngine, ledger: Ledger, w: Window) -> None:
    w.append(chunk("a"))
    w.ask("what", 3, remember=True)
    w.ask("what", 3)
    # Header and chunk are two whole blocks; the exchange fills less than one.
    exchange = len(engine.encode_exchange("what", [1, 2, 3]).token_ids)
    assert exchange < 16
    assert ledger.rows[-1]["computed_tokens_naive"] == exchange + QUERY


def test_answers_are_compared_with_a_reprefill_that_is_not_counted() -> None:
    engine, plain = FakeEngine(), FakeEngine()
    ledger, other = Ledger(engine, reference=True), Ledger(plain)
    for each, book in ((engine, ledger), (plain, other)):
        w = window(each)
        book.watch(w)
        w.extend([chunk(name) for name in "abc"])
        w.ask("what", 3)
        w.slide(1)
        w.ask("what", 3)
        book.truth("never")
    assert [r["computed_tokens"] for r in ledger.rows] == [r["computed_tokens"] for r in other.rows]
    first, second = ledger.rows
    assert first["answer"] == first["answer_reprefill"]
    assert second["answer"] != second["answer_reprefill"], "survivors remember what left, and this engine shows it"
    summary = ledger.summary()
    assert (summary["asks"], summary["known"], summary["right"], summary["agree"], summary["compared"]) == (
        2,
        1,
        0,
        1,
        2,
    )
    assert "right: 0 of 1" in ledger.table()
    assert summary["patches"] == {"formed": 0, "served": 0, "dropped": 0}
    by_lane = ", ".join(
        f"{lane} {tokens:,}" for lane, tokens in sorted(summary["tokens_by_lane"].items(), key=lambda x: -x[1])
    )
    assert f"chunks' tokens by lane: {by_lane}\npatches: 0 formed, 0 served, 0 dropped\n" in ledger.table()
    assert sum(summary["tokens_by_lane"].values()) < summary["prompt_tokens"], "the rest is system prompt and questions"


def test_background_work_counts(ledger: Ledger, w: Window) -> None:
    _, b, c = w.extend([chunk(name) for name in "abc"])
    w.ask("what", 2)
    before = ledger.summary()["computed_tokens"]
    w.evict(b)
    assert w.maintenance.refresh() == [c]
    assert ledger.summary()["computed_tokens"] == before + 16


@pytest.mark.parametrize("op", ["evict", "reorder"])
def test_edits_with_a_meaning_are_followed(ledger: Ledger, w: Window, op: str) -> None:
    a, b, c = w.extend([chunk(name) for name in "abc"])
    w.ask("what", 2)
    if op == "evict":
        w.evict(a)
        left = 2
    else:
        w.reorder([c, b, a])
        left = 3
    w.ask("what", 2)
    assert {ledger.rows[-1][f"computed_tokens_{p}"] for p in ("naive", "trim", "append")} == {left * 16 + QUERY}


def test_a_window_is_counted_once_however_often_it_is_watched(ledger: Ledger, w: Window) -> None:
    ledger.watch(w)
    w.append(chunk("a"))
    w.ask("what", 2)
    branch = w.fork()
    ledger.watch(branch)  # it is, as a fork
    branch.ask("what", 2)
    assert [row["window"] for row in ledger.rows] == [w.id, branch.id]


def test_a_window_on_another_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="must run on the ledger's engine"):
        Ledger(FakeEngine()).watch(window(FakeEngine()))


def test_a_branch_may_be_closed_before_it_is_adopted(ledger: Ledger, w: Window) -> None:
    a, _, _ = w.extend([chunk(name) for name in "abc"])
    w.ask("what", 2)
    with w.fork() as branch:
        branch.evict(a)
    w.adopt(branch)
    w.ask("what", 2)
    assert {ledger.rows[-1][f"computed_tokens_{p}"] for p in ("naive", "trim", "append")} == {2 * 16 + QUERY}


def test_testing_what_is_disposable_is_work_of_ours_alone(engine: FakeEngine, ledger: Ledger, w: Window) -> None:
    a, _ = w.extend([chunk(name) for name in "ab"])
    w.ask("what", 2)
    before = ledger.summary()
    w.disposable(a, "what", 2)
    after = ledger.summary()
    assert after["computed_tokens"] == engine.counters.prefill_tokens > before["computed_tokens"]
    assert {k: v for k, v in after.items() if "computed" not in k and "share" not in k} == {
        k: v for k, v in before.items() if "computed" not in k and "share" not in k
    }
    assert all(after[f"computed_tokens_{p}"] == before[f"computed_tokens_{p}"] for p in ("naive", "trim", "append"))
    w.ask("when", 2)
    assert ledger.summary()["computed_tokens"] == engine.counters.prefill_tokens


def test_work_of_another_window_during_a_reprefill_is_not_hidden() -> None:
    engine = FakeEngine()
    ledger = Ledger(engine, reference=True)
    w, busy = window(engine), window(engine)
    ledger.watch(w)
    w.append(chunk("a"))
    busy.append(chunk("b"))
    real, extra = engine.generate, []

    def generate(*args: Any, salt: str = "", **options: Any) -> Any:
        if salt and not extra:  # the re-prefill; now another thread computes
            extra.append(None)
            extra.append(busy.ask("what", 2).usage.computed_tokens)
        return real(*args, salt=salt, **options)

    engine.generate = generate  # type: ignore[method-assign]
    answer = w.ask("what", 2)
    assert ledger.summary()["computed_tokens"] == answer.usage.computed_tokens + extra[1]


def test_an_answer_is_compared_with_a_reprefill_as_long_as_its_limit_let_it_grow() -> None:
    engine = FakeEngine()
    ledger = Ledger(engine, reference=True)
    w = window(engine)
    ledger.watch(w)
    w.append(chunk("a"))
    for limit in (1, 2, 50):
        w.ask("what", limit)
        assert ledger.rows[-1]["answer_reprefill"] == ledger.rows[-1]["answer"] != ""
