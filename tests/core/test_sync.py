"""Windows brought to a wanted list, against the list itself."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window
from ctxwin.errors import BudgetExceeded
from ctxwin.window.events import Event
from ctxwin.window.sync import plan_sync, sync
from window.fake import FakeEngine

LISTS = st.lists(st.sampled_from("abcde"), max_size=6)


def naive(placed: list[tuple[str, str]], evicted: list[tuple[str, str]], wanted: list[str]) -> list[str]:
    """Contents after the planned edits, applied to a plain list."""
    contents = dict([*placed, *evicted])
    ids = [i for i, _ in placed]
    for edit in plan_sync(placed, evicted, wanted):
        if edit.op == "evict":
            ids = [i for i in ids if i not in edit.ids]
        elif edit.op == "reorder":
            assert sorted(edit.ids) == sorted(ids)
            ids = list(edit.ids)
        elif edit.op == "recall":
            ids.insert(edit.at, edit.ids[0])
        else:
            contents[f"new{edit.at}"] = wanted[edit.at]
            ids.insert(edit.at, f"new{edit.at}")
    return [contents[i] for i in ids]


@given(LISTS, LISTS, LISTS)
def test_a_plan_gives_the_wanted_list_with_the_fewest_edits(have: list[str], gone: list[str], want: list[str]) -> None:
    placed = [(f"p{i}", c) for i, c in enumerate(have)]
    evicted = [(f"e{i}", c) for i, c in enumerate(gone)]
    assert naive(placed, evicted, want) == want
    plan = plan_sync(placed, evicted, want)
    leaving = [i for e in plan if e.op == "evict" for i in e.ids]
    assert Counter(dict(placed)[i] for i in leaving) == Counter(have) - Counter(want)
    missing = Counter(want) - Counter(have)
    back = [dict(evicted)[e.ids[0]] for e in plan if e.op == "recall"]
    assert Counter(back) == missing & Counter(gone)
    assert Counter(want[e.at] for e in plan if e.op == "insert") == missing - Counter(gone)
    staying = len(have) - len(leaving)
    in_order = any(  # brute force: some way to keep as many without moving one
        is_subsequence([have[i] for i in kept], want) for kept in combinations(range(len(have)), staying)
    )
    assert sum(e.op == "reorder" for e in plan) == (not in_order)


def is_subsequence(short: list[str], long: list[str]) -> bool:
    rest = iter(long)
    return all(c in rest for c in short)


@settings(deadline=None, max_examples=40)
@given(st.lists(LISTS, min_size=1, max_size=4))
def test_a_window_places_what_is_wanted_and_answers_like_a_fresh_one(lists: list[list[str]]) -> None:
    engine = FakeEngine()
    with Window(engine, "h", fidelity=Fidelity("exact")) as window:
        for wanted in lists:
            ids = sync(window.core, [Chunk.text(c) for c in wanted])
            window.check()
            assert tuple(ids) == window.ids
            assert [window.chunk(i).id for i in ids] == [Chunk.text(c).id for c in wanted]
            with Window(FakeEngine(), "h", fidelity=Fidelity("exact")) as fresh:
                fresh.extend([Chunk.text(c) for c in wanted])
                assert window.ask("q").token_ids == fresh.ask("q").token_ids


@pytest.fixture
def window() -> Window:
    made = Window(FakeEngine(), "h", budget=40, fidelity=Fidelity("patched", rank=2))
    sync(made.core, texts("aa", "bb", "cc"))
    made.ask("q", 3)
    return made


def texts(*of: str) -> list[Chunk]:
    return [Chunk.text(t) for t in of]


def lanes(window: Window) -> list[str]:
    return [e.lane for e in window.chunks]


def test_the_same_list_costs_nothing(window: Window) -> None:
    before = window.version
    sync(window.core, texts("aa", "bb", "cc"))
    assert (window.version, window.plan().computed_tokens) == (before, 0)


def test_kv_is_kept_where_it_can_be(window: Window) -> None:
    sync(window.core, texts("bb", "cc"))
    assert lanes(window) == ["survivor", "survivor"]
    sync(window.core, texts("aa", "bb", "cc"))
    assert lanes(window) == ["resident", "resident", "resident"]
    sync(window.core, texts("aa", "xx", "bb", "cc"))
    assert lanes(window) == ["resident", "computed", "survivor", "survivor"]
    sync(window.core, texts("aa", "bb", "cc", "dd"))
    assert lanes(window) == ["resident", "resident", "resident", "computed"]


def test_edits_are_told_one_by_one(window: Window) -> None:
    told: list[Event] = []
    window.observe(told.append)
    first, second, third = window.ids
    new = sync(window.core, texts("cc", "bb", "dd"))
    new += sync(window.core, texts("aa", "cc", "bb", "dd"))
    assert [(e.op, e.ids) for e in told] == [
        ("evict", (first,)), ("reorder", (third, second)), ("append", (new[2],)), ("recall", (first,)),
    ]  # fmt: skip
    assert window.at(told[0].version).ids == (second, third)


def test_all_or_nothing(window: Window) -> None:
    state = window.snapshot()
    with pytest.raises(BudgetExceeded):
        sync(window.core, texts("bb", "new", "x" * 60))
    assert window.snapshot() is state


def test_a_seed_gives_the_same_ids() -> None:
    engine = FakeEngine()
    state = Window(engine, "h").snapshot()
    made = [sync(Window.restore(engine, state, seed="s").core, texts("a", "b")) for _ in range(2)]
    assert made[0] == made[1]
