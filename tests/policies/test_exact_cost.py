"""Exact windows against users of a prefix cache who slide, trim, and look back at the end, by tokens computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window
from ctxwin.baselines import PrefixCache, PrefixUser, Prompt
from ctxwin.engines.base import Engine
from ctxwin.engines.segments import Encoded
from ctxwin.policies import ByPriority, LowWater
from twins import twins
from window.fake import FakeEngine

BUDGET, QUERY, SYSTEM = 120, "q?", "sys"


class Opponent:
    """A user who, when the prompt is full, drops the oldest down to ``mark`` tokens, or one by one."""

    def __init__(self, engine: Engine, reserve: int, mark: int | None, *, at_end: bool) -> None:
        self.user: PrefixUser[int] = PrefixUser("append" if at_end else "trim")
        self.cache, self.tokens, self.shown = PrefixCache(block=1), 0, 0
        self._system, self._query = engine.encode_system_prompt(SYSTEM), engine.encode_query(QUERY)
        self._reserve, self._mark = self._system.tokens + reserve, mark
        self._at_end = at_end

    def _total(self, chunks: Sequence[int], encoded: Sequence[Encoded]) -> int:
        return self._reserve + sum(encoded[i].tokens for i in chunks)

    def arrive(self, new: int, encoded: Sequence[Encoded]) -> None:
        drop = 1
        if self._mark is not None:
            sizes = [self._total([*self.user.held[n:], new], encoded) for n in range(len(self.user.held) + 1)]
            drop = next((n for n, size in enumerate(sizes) if size <= self._mark), len(sizes) - 1)
        later = () if self._at_end else range(new + 1, len(encoded))
        self.user.arrive(new, lambda ids: self._total(ids, encoded) <= BUDGET, before=later, drop=drop)

    def ask(self, encoded: Sequence[Encoded]) -> None:
        held = [encoded[i] for i in self.user.held]
        self.tokens += self.cache.serve(Prompt.of([self._system, *held, self._query]))[0]
        self.shown += sum(part.tokens for part in held)


STEPS = st.lists(st.tuples(st.integers(3, 14), st.none() | st.none() | st.integers(0, 30)), min_size=40, max_size=60)


def check_cost(steps: list[tuple[int, int | None]], mark: float, policy: bool) -> None:
    with FakeEngine() as engine:
        reserve = engine.encode_query(QUERY).tokens + 1
        marks = {"low_water": None, "eviction": LowWater(mark)} if policy else {"low_water": mark}
        with Window(engine, SYSTEM, BUDGET, Fidelity("exact"), **marks) as window:  # type: ignore[arg-type]
            trimming, slid = int(mark * BUDGET), None
            opponents = [
                Opponent(engine, reserve, kept, at_end=at_end)
                for kept, at_end in ((slid, False), (trimming, False), (trimming, True))
            ]
            encoded: list[Encoded] = []
            ids: list[str] = []
            tokens = shown = 0
            for i, (size, back) in enumerate(steps):
                chunk = Chunk.tokens([1000 + 20 * i + n for n in range(size)])
                encoded.append(engine.encode(chunk))
                ids.append(window.append(chunk))
                window.slide(reserve_tokens=reserve)
                for opponent in opponents:
                    opponent.arrive(i, encoded)
                if back is not None and window.evicted:
                    placement = window.evicted[back % len(window.evicted)]
                    assert window.look_back(placement, reserve_tokens=reserve) == [placement]
                    for opponent in opponents:
                        opponent.arrive(ids.index(placement), encoded)
                tokens += window.ask(QUERY, 1).usage.computed_tokens
                shown += window.tokens - window.snapshot().system_prompt_tokens
                for opponent in opponents:
                    opponent.ask(encoded)
            best = min(opponent.tokens for opponent in opponents)
            assert tokens <= 1.05 * best
            assert shown >= 0.9 * opponents[-1].shown


test_an_exact_window_costs_no_more_than_the_best_user_of_a_prefix_cache, test_many_windows_cost_no_more = twins(
    check_cost, 4, 20, STEPS, st.sampled_from([0.35, 0.5, 0.7]), st.booleans()
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(1, 9), st.sampled_from(["ask", "slide"]), st.lists(st.integers(0, 9), min_size=1, max_size=2)),
        max_size=40,
    )
)  # fmt: skip
def test_what_returned_leaves_first_while_nothing_computed_follows_it(steps: list[int | str | list[int]]) -> None:
    """Against a list: each entry is the id, its tokens, and whether it returned to the end or was computed."""
    budget, reserve = 60, 5
    with FakeEngine() as engine, Window(engine, "h", budget, Fidelity("exact")) as window:
        placed: list[str] = []
        size: dict[str, int] = {}
        returned: set[str] = set()
        computed: set[str] = set()
        read: list[str] = []

        def fall(stay: set[str]) -> list[str] | None:
            """Let leave what must; None where not enough can."""
            leaving: list[str] = []
            tail = []
            for one in reversed(placed):
                if one in returned:
                    tail.append(one)
                elif one in computed:
                    break
            for one in (*tail, *sorted(placed, key=read.index)):
                over = 2 + sum(size[p] for p in placed if p not in leaving) + reserve - budget
                if over > 0 and one not in stay and one not in leaving:
                    leaving.append(one)
            over = 2 + sum(size[p] for p in placed if p not in leaving) + reserve - budget
            return None if over > 0 else leaving

        for step in steps:
            if isinstance(step, int):
                new = window.append(Chunk.text("x" * step))
                placed.append(new)
                size[new] = step
                read.append(new)
            elif step == "ask":
                if window.tokens + reserve <= budget:
                    window.ask("q", 1)
                    computed |= set(placed)
            elif step == "slide":
                leaving = fall(set())
                assert leaving is not None
                assert window.slide(reserve_tokens=reserve) == leaving
                placed = [p for p in placed if p not in leaving]
                returned -= set(leaving)
            elif window.evicted:
                backs = list(dict.fromkeys(window.evicted[i % len(window.evicted)] for i in step))  # type: ignore[union-attr]
                before, evicted = list(placed), window.evicted
                placed += sorted(backs, key=lambda i: int(i.split("-")[0]))
                leaving = fall(set(backs))
                if leaving is None:
                    placed = before
                    continue
                assert window.look_back(" ".join(backs), reserve_tokens=reserve) == backs
                placed = [p for p in placed if p not in leaving]
                returned = returned - set(leaving) | set(backs)
                computed -= set(backs)
                for one in sorted(backs, key=lambda i: int(i.split("-")[0])):
                    read.remove(one)
                    read.append(one)
                assert window.evicted == (*(e for e in evicted if e not in backs), *leaving)
            assert list(window.ids) == placed
            window.maintenance.check()


def test_who_says_where_or_that_it_was_read_decides(engine: FakeEngine) -> None:
    class AtFront(ByPriority):
        def place(self, window: object, backs: object) -> int:
            return 0

    with Window(engine, "h", 100, Fidelity("exact")) as window:
        a, b, c, d = window.extend([Chunk.text(t * 4) for t in "abcd"])
        window.ask("q", 1)
        window.evict(a)
        window.evict(b)
        window.look_back(a)
        assert window.ids == (c, d, a)
        window.maintenance.touch(a)  # as needed as any other now
        assert window.slide(1) == [c]
        window.eviction = AtFront()
        window.look_back(b)
        assert window.ids == (b, d, a)
        window.reorder([d, a, b])
        assert window.slide(1) == [a], "by priority, the oldest of equals"
    with Window(engine, "h", 100, Fidelity("patched", rank=2)) as window:
        a, b = window.extend([Chunk.text("aaaa"), Chunk.text("bbbb")])
        window.ask("q", 1)
        window.evict(a)
        window.look_back(a)
        assert window.ids == (a, b), "its own place, where KV may be approximate"


@pytest.mark.parametrize("restored", [False, True])
def test_a_second_look_back_keeps_the_prefix_also_after_a_restart(engine: FakeEngine, restored: bool) -> None:
    window = Window(engine, "h", 40, Fidelity("exact"))
    a, b, *_ = window.extend([Chunk.text(t * 8) for t in "abcd"])
    window.slide(2)
    window.append(Chunk.text("e" * 8))
    window.ask("q", 1)
    for back, gone in ((a, b), (b, a), (a, b)):
        window.look_back(back, reserve_tokens=5)
        if restored:
            window = Window.restore(engine, window.snapshot().model_dump_json())
        assert window.ids[-1] == back and gone not in window.ids
        assert window.ask("q", 1).usage.computed_tokens <= 8 + 3, "what returned and the question"
    window.close()
