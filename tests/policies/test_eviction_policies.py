"""Who leaves first, against naive sorting and against re-asking by hand."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import BudgetExceeded, EngineFailed, UnknownChunk
from ctxwin.policies import ByDisposability, ByPriority, Eviction, LeastRecentlyRead, OldestFirst
from twins import seeds
from window.fake import FakeEngine


@dataclass(frozen=True)
class Given:
    """The order it was made with; notes how far it is read."""

    ids: Sequence[str]
    read: list[str] = field(default_factory=list)

    def order(self, window: Window) -> Iterator[str]:
        for placement in self.ids:
            self.read.append(placement)
            yield placement


class Reader(FakeEngine):
    """Answers with the letters of the query that stand in the chunks behind the system prompt; ``near`` letters it half sees."""

    near = ""

    def generate(self, layout: Sequence[Segment], query: Encoded, sampling: Sampling, **options: Any) -> Generation:
        made = super().generate(layout, query, sampling, **options)
        seen = {t for segment in layout[1:] for t in segment.encoded.token_ids}
        found = [t for t in query.token_ids if t >= 100 and t in seen][: sampling.max_tokens]
        first = 0.5 + 0.2 * sum(100 + ord(c) in seen for c in self.near)
        return replace(
            made, token_ids=found, text=self.decode(found), logprobs={0: math.log(first), 1: math.log(1 - first)}
        )


@pytest.mark.parametrize("seed", range(5))
def test_orders_are_what_sorting_gives(engine: FakeEngine, seed: int) -> None:
    """A naive model beside a window: lists of arrivals, one stamp a reading."""
    rng = random.Random(seed)
    window = Window(engine, "h", budget=400)
    placed: dict[str, dict[str, int]] = {}
    clock = 0
    for arrival in range(12):
        priority = rng.randrange(-2, 3)
        placement = window.insert(rng.randrange(len(placed) + 1), Chunk.text("x" * (arrival + 1), priority=priority))
        clock += 1
        placed[placement] = {"arrival": arrival, "read": clock, "priority": priority}
        for again in rng.sample(sorted(placed), rng.randrange(min(3, len(placed)))):
            clock += 1
            placed[again]["read"] = clock
            if rng.random() < 0.5:
                window.maintenance.touch(again)
            else:
                window.evict(again)
                window.recall(again, at=rng.randrange(len(window.ids) + 1))

    def naive(*fields: str) -> list[str]:
        return sorted(placed, key=lambda i: [placed[i][f] for f in fields])

    for policy, fields in (
        (OldestFirst(), ("arrival",)),
        (LeastRecentlyRead(), ("read", "arrival")),
        (ByPriority(), ("priority", "arrival")),
    ):
        assert list(policy.order(window)) == naive(*fields)
        with Window.restore(engine, window.snapshot(), eviction=policy) as other:
            assert other.slide(5) == naive(*fields)[:5]
            assert other.evicted == tuple(naive(*fields)[:5])


def test_what_is_placed_together_was_read_together(engine: FakeEngine) -> None:
    """Adopted and restored windows keep the order of readings."""
    window = Window(engine, "h", eviction=LeastRecentlyRead())
    a, b, c = window.extend([Chunk.text(t) for t in "abc"])
    window.maintenance.touch(a)
    branch = window.fork()
    branch.maintenance.touch(b)
    window.adopt(branch)
    assert window.slide(2) == [c, a]


def test_a_window_without_a_policy_drops_the_oldest(engine: FakeEngine) -> None:
    window = Window(engine, "h")
    a, b = window.extend([Chunk.text("a"), Chunk.text("b")])
    window.reorder([b, a])
    assert window.slide(1) == [a]


def test_forks_old_versions_and_restored_windows_keep_or_take_a_policy(engine: FakeEngine) -> None:
    window = Window(engine, "h", eviction=ByPriority())
    a, b = window.extend([Chunk.text("a", priority=2), Chunk.text("b", priority=1)])
    assert window.fork().slide(1) == window.at(window.version).fork().slide(1) == [b]
    state = window.snapshot().model_dump_json()
    assert Window.restore(engine, state).slide(1) == [a]
    assert Window.restore(engine, state, eviction=ByPriority()).slide(1) == [b]


def test_pinned_chunks_are_skipped_and_a_generator_is_read_no_further_than_needed(engine: FakeEngine) -> None:
    window = Window(engine, "h", budget=14)
    a, b, c, d = window.extend([Chunk.text(t * 3) for t in "abcd"])
    window.pin(b)
    window.eviction = policy = Given([b, d, a, c])
    assert window.slide(reserve_tokens=2) == [d]  # 14 tokens and 2 of room: one chunk is enough
    assert policy.read == [b, d]
    window.eviction = policy = Given([b, a, c])
    assert window.slide() == []
    assert policy.read == []
    assert window.slide(1) == [a]
    assert policy.read == [b, a]


def test_an_order_names_each_chunk_once_and_only_placed_ones(engine: FakeEngine) -> None:
    window = Window(engine, "h")
    a, b, c = window.extend([Chunk.text(t) for t in "abc"])
    window.eviction = Given([a, a, b])
    state = window.snapshot()
    with pytest.raises(ValueError, match="at most the 2 unpinned chunks, got 3"):
        window.slide(3)
    window.eviction = Given([a, "nope"])
    with pytest.raises(UnknownChunk, match="must be a placed chunk, got 'nope'"):
        window.slide(2)
    window.eviction = Given([c])  # what it leaves out never leaves
    with pytest.raises(BudgetExceeded, match="the reserved tokens must fit"):
        window.slide(reserve_tokens=4095)
    assert window.snapshot() == state
    window.check()


def naive_leaving(texts: dict[str, str], queries: Sequence[str]) -> tuple[list[str], list[str]]:
    """(disposable, needed), oldest first, by a plain list: an answer is the query's letters that are somewhere."""

    def answers(ids: Sequence[str]) -> list[str]:
        everything = "".join(texts[i] for i in ids)
        return ["".join(c for c in q if c in everything) for q in queries]

    left, leaving = list(texts), []
    for placement in texts:
        rest = [i for i in left if i != placement]
        if answers(rest) == answers(left):
            left = rest
            leaving.append(placement)
    return leaving, left


@pytest.mark.parametrize("seed", seeds(2, 6))
@pytest.mark.parametrize("mode", ["patched", "exact"])
def test_disposable_chunks_leave_first(seed: int, mode: Any) -> None:
    rng = random.Random(seed)
    queries = ["".join(rng.sample("abcdef", 2)) for _ in range(2)]
    with Window(Reader(), "h", fidelity=Fidelity(mode)) as window:
        texts = {}
        for _ in range(6):
            text = "".join(rng.choices("abcdefxyz", k=2))
            texts[window.append(Chunk.text(text))] = text
        window.ask("q")
        leaving, needed = naive_leaving(texts, queries)
        assert list(ByDisposability(queries).order(window)) == leaving + needed
        window.eviction = ByDisposability(queries)
        assert window.slide(4) == (leaving + needed)[:4]
        window.check()


def asks(run: Callable[[], object], window: Window) -> int:
    """Asks that ``run`` makes on the window and its branches."""
    seen: list[str] = []
    stop = window.observe(lambda event: seen.append(event.op))
    run()
    stop()
    return seen.count("ask")


def test_of_two_chunks_that_say_the_same_one_stays() -> None:
    window = Window(Reader(), "h", eviction=ByDisposability(["k"]))
    a, b, c = window.extend([Chunk.text("k1"), Chunk.text("k2"), Chunk.text("x")])
    assert window.disposable(a, "k").disposable and window.disposable(b, "k").disposable
    assert window.slide(2) == [a, c]
    assert window.ids == (b,)


def test_only_as_many_are_tested_as_room_is_needed() -> None:
    window = Window(Reader(), "h", budget=40, eviction=ByDisposability(["k"]))
    a, b, c, d = window.extend([Chunk.text("k" * 3), Chunk.text("xxx"), Chunk.text("yyy"), Chunk.text("zzz")])
    window.pin(a)
    state = window.snapshot()
    assert asks(window.slide, window) == 0  # there is room: nothing is tested
    assert window.snapshot() == state
    assert asks(lambda: window.slide(1), window) == 2  # a is pinned; b is tested and leaves
    assert window.evicted == (b,)
    window.pin(a, pinned=False)
    assert asks(lambda: window.slide(1), window) == 4  # a is needed, c is not
    assert window.evicted == (b, c)
    assert window.ids == (a, d)


def test_a_window_over_its_budget_can_be_tested() -> None:
    """The writer holds its lock meanwhile, and the branches are asked beyond the window's budget."""
    window = Window(Reader(), "h", budget=12, eviction=ByDisposability(["k"], max_tokens=4))
    window.extend([Chunk.text("kkkk"), Chunk.text("xxxx"), Chunk.text("yyyy")])
    assert window.tokens > window.budget
    assert window.slide() == [window.evicted[0]]
    assert window.chunk(window.evicted[0]).parts[0].text == "xxxx"  # type: ignore[union-attr]
    assert window.budget == 12
    assert not window.core._writer.locked()


def test_what_is_beyond_the_engine_leaves_untested_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    window = Window(Reader(max_tokens=16), "h", eviction=ByDisposability(["k"], max_tokens=2))
    k, x, y, z = window.extend([Chunk.text("k" * 4), Chunk.text("x" * 4), Chunk.text("y" * 4), Chunk.text("z" * 4)])
    with caplog.at_level(logging.WARNING, logger="ctxwin"):
        assert window.slide(reserve_tokens=8) == [k, x, y]  # 18 + 3 + 2, then 14 + 5 > 16; the third test fits
    assert sum("leaves untested" in r.message for r in caplog.records) == 2
    assert window.ids == (z,)


def test_kl_keeps_what_moves_the_first_token() -> None:
    engine = Reader()
    engine.near = "y"
    window = Window(engine, "h")
    x, y = window.extend([Chunk.text("x"), Chunk.text("y")])
    moved = window.disposable(y, "k")
    assert moved.disposable
    assert moved.kl == pytest.approx(0.7 * math.log(0.7 / 0.5) + 0.3 * math.log(0.3 / 0.5))
    assert window.disposable(x, "k").kl == 0
    assert list(ByDisposability(["k"], kl=0.0).order(window)) == [x, y]
    window.evict(x)
    x = window.append(Chunk.text("x"))  # now y is the older one
    assert list(ByDisposability(["k"]).order(window)) == [y, x]
    assert list(ByDisposability(["k"], kl=moved.kl).order(window)) == [y, x]
    assert list(ByDisposability(["k"], kl=moved.kl / 2).order(window)) == [x, y]
    engine.near = ""
    assert list(ByDisposability(["k"], kl=0.0).order(window)) == [y, x]


def test_clean_judges_without_what_the_others_absorbed(engine: FakeEngine) -> None:
    """``clean`` is passed on: on the exact fake, only a survivor could still answer alike."""
    window = Window(engine, "h", fidelity=Fidelity("patched"))
    a, _ = window.extend([Chunk.text("a"), Chunk.text("b")])
    window.ask("q")
    results = {c: window.disposable(a, "q", clean=c).answer_without for c in (False, True)}
    assert results[False] != results[True]
    seen: list[bool] = []
    real = Window.disposable

    def spy(self: Window, *args: Any, clean: bool = False) -> Any:
        seen.append(clean)
        return real(self, *args, clean=clean)

    Window.disposable = spy  # type: ignore[method-assign]
    try:
        list(ByDisposability(["q"], clean=True).order(window))
    finally:
        Window.disposable = real  # type: ignore[method-assign]
    assert seen == [True, True]


def test_testing_leaves_nothing_behind() -> None:
    engine = Reader()
    window = Window(engine, "h", eviction=ByDisposability(["k"]))
    window.extend([Chunk.text(t) for t in ("x", "k", "y", "z")])
    window.ask("q")
    state, leased = window.snapshot(), engine.store.stats().leased
    opened: set[str] = set()
    closed: set[str] = set()
    window.observe(lambda e: opened.add(e.other) if e.op == "fork" else None)  # type: ignore[arg-type]
    window.observe(lambda e: closed.add(e.window) if e.op == "close" else None)
    order = window.eviction.order(window)
    next(iter(order))
    order.close()  # type: ignore[attr-defined]  # what a window does when there is room
    assert opened and opened == closed
    assert window.snapshot() == state
    assert engine.store.stats().leased == leased
    window.slide(1)
    assert opened == closed, "no branch outlives a slide"
    engine.fail = EngineFailed("out of memory")
    state = window.snapshot()
    with pytest.raises(EngineFailed):
        window.slide(1)
    assert window.snapshot() == state
    assert opened == closed
    window.check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": "one"}, "queries must be a non-empty list of questions, got 'one'"),
        ({"queries": []}, "queries must be"),
        ({"queries": ["a", ""]}, "queries must be"),
        ({"queries": ["a"], "max_tokens": 0}, "max_tokens must be an int >= 1, got 0"),
        ({"queries": ["a"], "kl": -1.0}, "kl must be nats >= 0 or None, got -1.0"),
        ({"queries": ["a"], "kl": float("nan")}, "kl must be"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ByDisposability(**arguments)


def test_policies_are_values() -> None:
    queries = ["a", "b"]
    policy: Eviction = ByDisposability(queries)
    queries.append("c")
    assert policy == ByDisposability(("a", "b"))
    assert hash(policy) == hash(ByDisposability(["a", "b"]))
    assert LeastRecentlyRead() == LeastRecentlyRead()
