"""Victims and places by expected cost, at prices that are set by hand."""

from __future__ import annotations

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.cost import Fit
from ctxwin.policies import ByCost, OldestFirst
from window.fake import FakeEngine

pytestmark = pytest.mark.learns_prices

PATCHED = Fidelity("patched", rank=2)


@pytest.fixture
def priced(engine: FakeEngine) -> FakeEngine:
    """Ten milliseconds a token for a forward, nothing for a request, next to nothing for a read."""
    engine.costs.engine = Fit((0.0, 10.0, 0.0, 0.0, 0.0, 0.0))
    engine.costs.learn = lambda *args: None  # type: ignore[method-assign]
    return engine


def test_an_exact_window_keeps_its_beginning(priced: FakeEngine) -> None:
    with Window(priced, "h", fidelity=Fidelity("exact"), eviction=ByCost()) as window:
        ids = window.extend([Chunk.text(t * 3) for t in "abcd"])
        window.ask("q")
        new = window.append(Chunk.text("nnn"))
        assert window.slide(1) == [ids[-1]], "the others stand in front of it, and the new one was not read yet"
        assert window.plan().computed_tokens == 3
        window.eviction = OldestFirst()
        window.slide(1)
        assert window.plan().computed_tokens == 3 * len(window.ids)
        assert new in window.ids


def test_the_oldest_leaves_where_kv_is_kept_and_what_was_read_long_ago_where_it_is_lost(priced: FakeEngine) -> None:
    with Window(priced, "h", fidelity=PATCHED, eviction=ByCost()) as window:
        a, b, c, d = window.extend([Chunk.text(t * 3) for t in "abcd"])
        window.ask("q")
        window.maintenance.touch(a)
        left = window.snapshot().placed[-1].kv
        window.evict(d)
        assert left and list(window.eviction.order(window)) == [a, b, c]
        priced.repo.delete(left.span)  # what leaves this window is lost, and would be computed again
        assert list(window.eviction.order(window)) == [b, c, a]


def test_what_was_needed_often_stays_longer_than_what_was_needed_last_where_kv_is_lost(priced: FakeEngine) -> None:
    with Window(priced, "h", fidelity=PATCHED, eviction=ByCost()) as window:
        a, b, c, d = window.extend([Chunk.text(t * 3) for t in "abcd"])
        window.ask("q")
        left = window.snapshot().placed[-1].kv
        window.evict(d)
        assert left
        priced.repo.delete(left.span)
        for read in (a, a, c):
            window.maintenance.touch(read)
        assert list(window.eviction.order(window)) == [b, c, a]
        window.evict(c)
        window.recall(c)
        assert [p.reads for p in window.snapshot().placed] == [2, 0, 2]


def test_pinned_chunks_stay_and_unread_ones_leave_last(priced: FakeEngine) -> None:
    with Window(priced, "h", fidelity=PATCHED, eviction=ByCost()) as window:
        a, b = window.extend([Chunk.text("aaa"), Chunk.text("bbb")])
        window.ask("q")
        c = window.append(Chunk.text("ccc"))
        window.pin(a)
        assert list(window.eviction.order(window)) == [b, c]


def test_a_chunk_comes_back_at_the_front_where_the_middle_would_form_it(priced: FakeEngine) -> None:
    """d came when a was out: behind a, which it lacks, it must be formed; in front of everything it is served as it is."""

    def looked_back(eviction: ByCost | OldestFirst) -> tuple[tuple[str, ...], int]:
        with Window(priced, "h", fidelity=PATCHED, eviction=eviction) as window:
            a, b = window.extend([Chunk.text("aaa"), Chunk.text("bbb")])
            window.ask("q")
            window.evict(a)
            d = window.append(Chunk.text("ddd"))
            window.ask("q")
            window.evict(d)
            window.recall(a, at=0)
            window.ask("q")
            window.recall(d)
            window.check()
            names = {a: "a", b: "b", d: "d"}
            return tuple(names[i] for i in window.ids), window.plan().computed_tokens

    assert looked_back(OldestFirst()) == (("a", "b", "d"), 3)
    assert looked_back(ByCost()) == (("d", "a", "b"), 0)


def test_looked_back_chunks_go_to_the_front_together_and_in_order(priced: FakeEngine) -> None:
    with Window(priced, "h", fidelity=PATCHED, eviction=ByCost()) as window:
        a = window.append(Chunk.text("aaa"))
        window.ask("q")
        window.evict(a)
        b, c, d = window.extend([Chunk.text(t * 3) for t in "bcd"])
        window.ask("q")
        window.evict(b)
        window.evict(c)
        window.recall(a, at=0)
        window.ask("q")
        window.look_back(f"{c} {b}")
        window.check()
        assert window.ids == (b, c, a, d)
        assert window.plan().computed_tokens == 0, "c absorbed b, and neither has anything in front that it lacks"


def test_the_chronological_place_is_kept_where_nothing_is_saved(priced: FakeEngine) -> None:
    with Window(priced, "h", fidelity=PATCHED, eviction=ByCost()) as window:
        a, b, c = window.extend([Chunk.text(t * 3) for t in "abc"])
        window.ask("q")
        window.evict(b)
        assert window.recall(b) == 1
        assert window.ids == (a, b, c)
