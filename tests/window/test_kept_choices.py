"""Choices and layouts that go on from one plan to the next, and what makes them fall."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from functools import partial

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.store.memory import MemoryStore
from ctxwin.window.continuation import Continuation
from ctxwin.window.layout import Work
from ctxwin.window.placed_list import PlacedList
from store.wrappers import WrapperStore
from window.fake import FakeEngine, planned_anew
from window.growth import LARGE, SMALL, engine_for, lay_out, lines, opened, standing

PATCHED = Fidelity("patched", rank=2, survivors="removal")
ORBITS = Fidelity("patched", rank=2, orbit=True, advanced={"forbid": ("survivor", "patched")})


def survivors(n: int = SMALL, fidelity: Fidelity | None = None) -> Window:
    window = opened(n + 1) if fidelity is None else Window(engine_for(n), "h", 10**6, fidelity=fidelity)
    if fidelity is not None:
        window.extend([Chunk.tokens([i % 40, 7, 9, i // 40]) for i in range(n + 1)])
        window.ask("q", 1)
        window.maintenance.compress()
    window.slide(1)
    window.ask("q", 1)
    return window


def orbits(n: int = SMALL) -> Window:
    window = Window(engine_for(n), "h", 10**6, fidelity=ORBITS)
    window.extend([Chunk.tokens([i % 40, 7, 9, i // 40]) for i in range(n)])
    window.maintenance.prepare_orbit(window.ids[:2])
    window.reorder([window.ids[1], window.ids[0], *window.ids[2:]])
    window.ask("q", 1)
    return window


def clean(n: int = SMALL) -> Window:
    window = opened(n)
    for placement in window.ids:
        window.toggle(placement, conditioned=False)
    window.ask("q", 1)
    return window


def merged(n: int = SMALL) -> Window:
    window = Window(engine_for(n), "h", 10**6, fidelity=Fidelity("patched", merge=0.5))
    window.extend([Chunk.tokens([i % 40, 7, 9, i // 40]) for i in range(n)])
    window.ask("q", 1)
    for placement in window.ids:
        window.maintenance.merge(placement)
    window.ask("q", 1)
    return window


INEXACT: dict[str, Callable[..., Window]] = {
    "survivor": survivors,
    "patched": partial(survivors, fidelity=PATCHED),
    "orbit": orbits,
    "canonical": clean,
    "merged": merged,
}
"""Windows whose chunks are served in a lane, mostly."""


def again(window: Window) -> Window:
    """The window, planned and asked once more: the first time a placement's own KV becomes what served it."""
    window.ask("q", 1)
    window.plan()
    return window


@pytest.mark.parametrize("lane", INEXACT)
def test_what_is_no_exact_kv_goes_on_in_few_steps_as_well(lane: str) -> None:
    window = again(INEXACT[lane](min(LARGE, 60)))
    n, assembly, fidelity = len(window.ids), window.core.assembly, window.core.fidelity
    assert [e.lane for e in window.plan().entries].count(lane) > n / 2
    window.append(Chunk.tokens([7]))
    window.plan()
    assert lines(lambda: assembly.plan(window.snapshot(), fidelity)) / n <= 25
    assert lines(partial(lay_out, window)) / n <= 60
    assert len(assembly.newest.loaded.chunks) == n
    goes_on, anew = planned_anew(window)
    assert goes_on == anew


@pytest.mark.parametrize(("lane", "most"), [("survivor", 10), ("patched", 20), ("merged", 10), ("orbit", 20)])
def test_a_layout_of_what_stands_takes_few_steps_for_each_chunk_more(lane: str, most: int) -> None:
    few, many = (again(again(INEXACT[lane](n))) for n in (30, 60))
    for window in (few, many):
        window.append(Chunk.tokens([7]))
        window.plan()
    assert (lines(partial(lay_out, many)) - lines(partial(lay_out, few))) / 30 <= most


def withdraw_trust(window: Window) -> None:
    window.core.audits._fixed = window.fidelity.with_advanced(forbid=("survivor", "patched", "orbit", "merged"))


def demote(window: Window) -> None:
    window.core.audits._exact |= {window.ids[3]}


def discard(window: Window) -> None:
    kv = window.snapshot().placed[3].kv
    assert kv is not None and window.engine.repo.delete(kv.patch or kv.span)


def lose_the_lease(window: Window) -> None:
    """What nobody leases leaves a store that needs room."""
    store = window.engine.store
    window.core.leases.follow(window.core._leased, PlacedList())
    assert store.put("span/large", bytes(store.limit() - 1)) and not list(store.list("patch/"))
    store.delete("span/large")


def store_exact_kv(window: Window) -> None:
    """Another window computes what this one has an approximation of."""
    with Window(window.engine, "h", 10**6, fidelity=Fidelity("exact")) as other:
        other.extend([window.chunk(placement) for placement in window.ids])
        other.ask("q", 1)


CHANGES: list[Callable[[Window], None]] = [withdraw_trust, demote, discard, lose_the_lease, store_exact_kv]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("lane", [lane for lane in INEXACT if lane != "canonical"])
def test_a_choice_falls_with_what_it_was_made_on(lane: str, change: Callable[[Window], None]) -> None:
    """Trust withdrawn, an audit's finding, a patch discarded, a lease lost, exact KV found: the plan is as if made anew, and
    the answer as that of a window that remembers nothing."""
    windows = [again(INEXACT[lane](12)) for _ in range(2)]
    before = windows[0].plan()
    for window in windows:
        change(window)
    goes_on, anew = planned_anew(windows[0])
    assert goes_on == anew and goes_on[3].lane != before.entries[3].lane
    windows[1].core.assembly.newest = Continuation()
    first, second = (window.ask("q", 3, logprobs=-1) for window in windows)
    assert first.first_token_logprobs == second.first_token_logprobs


@pytest.mark.parametrize("lane", INEXACT)
def test_kv_that_left_the_store_behind_a_plan_is_not_served(lane: str) -> None:
    """It is gone, or another record stands under its key, between two asks: neither is taken from what was loaded."""
    window = again(INEXACT[lane](12))
    choice, repo = window.core.assembly.newest.selection.choices[3], window.engine.repo
    kv = choice.conditioning
    stored = repo.get_span(kv.span)
    assert stored is not None and repo.put_span(kv.span, stored[0], {**stored[1], "token_ids": [39] * stored[0].tokens})
    assert repo.get_span(kv.span), "another chunk's, in memory"
    answer = window.ask("q", 1)
    assert answer.usage.misses + answer.usage.computed_tokens > window.ask("q", 1).usage.computed_tokens
    assert planned_anew(window)[0] == planned_anew(window)[1]


def test_what_was_served_before_is_so_only_as_long_as_it_is_remembered() -> None:
    window = Window(FakeEngine(), "h", fidelity=Fidelity("patched", rank=2))
    z, a, b, c = window.extend([Chunk.text(text) for text in "zabc"])
    window.ask("q", 1)
    window.evict(z)
    window.ask("q", 1)
    for order in ([b, a, c], [a, b, c]):
        window.reorder(order)
        window.ask("q", 1)
    assert any(entry.reused for entry in window.plan().entries)
    window.core.assembly.memo.clear()
    goes_on, anew = planned_anew(window)
    assert goes_on == anew and not any(entry.reused for entry in goes_on)


def test_a_dear_choice_goes_on_at_the_same_prices_and_falls_with_them() -> None:
    """Where loading takes milliseconds another lane may be cheaper at other prices."""
    window = again(survivors(SMALL))
    rates = window.engine.costs.engine.rates
    window.engine.costs.engine.rates = (*rates[:1], 9.0, rates[2], 6.0, *rates[4:])
    window.plan()
    assert lines(window.plan) / SMALL <= 80, "as it was chosen"
    assert all(entry.lane == "survivor" and entry.ms > 5 for entry in window.plan().entries)
    window.engine.costs.engine.rates = (*rates[:1], 0.5, rates[2], 70.0, *rates[4:])
    goes_on, anew = planned_anew(window)
    assert goes_on == anew and [entry.lane for entry in goes_on].count("formed") > SMALL / 2


def test_a_chunk_that_did_not_move_is_planned_at_its_price_now() -> None:
    window = standing(SMALL)
    before, costs = window.plan(), window.engine.costs
    costs.engine.rates = tuple(2 * rate for rate in costs.engine.rates)
    assert lines(window.plan) / SMALL <= 240, "no entry is made anew"
    after = window.plan()
    assert all(new.ms > old.ms for new, old in zip(after.entries, before.entries, strict=True))
    window.core.assembly.forget()
    assert window.plan() == after


def test_a_layout_goes_on_with_what_the_one_before_loaded() -> None:
    window, work = standing(SMALL), Work()
    window.append(Chunk.tokens([7, 8]))
    assembly, state = window.core.assembly, window.snapshot()
    layout = assembly.build_layout(state, window.fidelity, work)
    chunks = assembly.newest.loaded.chunks
    assert len(chunks) == SMALL and all(c.segment.span is None for c in chunks)
    assembly.forget()
    whole = assembly.build_layout(state, window.fidelity, work)
    for new, old in zip(layout.segments, whole.segments, strict=True):
        assert new.span is old.span and all(
            getattr(new, f.name) == getattr(old, f.name) for f in fields(new) if f.name != "span"
        )
    assert (layout.contents, layout.counts, layout.salt) == (whole.contents, whole.counts, whole.salt)


def test_kv_that_is_not_what_was_checked_is_checked_before_it_serves_again() -> None:
    window = standing(8)
    key, repo = window.core.assembly.newest.loaded.chunks[3].conditioning.span, window.engine.repo
    span, record = repo.get_span(key)
    assert repo.put_span(key, span, {**record, "token_ids": [39]}) and repo.get_span(key), "another chunk's, in memory"
    assert window.ask("q", 1).usage.misses == 1
    assert window.ask("q", 1).usage.misses == 0
    window.engine.store.delete(key)
    assert window.ask("q", 1).usage.computed_tokens > window.ask("q", 1).usage.computed_tokens


class AskedStore(WrapperStore):
    """Counts the times it is asked for one key, or for several at once."""

    asked = 0

    def get(self, key: str) -> bytes | None:
        self.asked += 1
        return super().get(key)

    def contains(self, key: str) -> bool:
        self.asked += 1
        return super().contains(key)

    def missing(self, keys: Collection[str]) -> list[str]:
        self.asked += 1
        return self.inner.missing(keys)


def test_kv_that_stays_is_looked_up_at_once_behind_a_slide() -> None:
    """A store elsewhere takes a round trip each time: two for each survivor remain, for exact KV of its new place."""
    asked = {}
    for n in (8, 32):
        store = AskedStore(MemoryStore(1 << 30))
        window = Window(FakeEngine(store, max_tokens=10**6), "s", 10**6, fidelity=Fidelity("patched"))
        window.extend([Chunk.tokens([i, 1]) for i in range(n + 1)])
        window.ask("q", 1)
        window.ask("q", 1)
        window.slide(1)
        store.asked = 0
        assert window.ask("q", 1).usage.reused_tokens["survivor"] == 2 * n
        asked[n] = store.asked
    assert asked[32] - asked[8] == 2 * (32 - 8) and asked[8] <= 2 * 8 + 4
