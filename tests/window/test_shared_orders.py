"""Runs of shared orders, and survivors by them, against naive lists."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ctxwin.window.antecedents import Antecedents, Order, pack, unpack
from ctxwin.window.survival import Survival

IDS = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)


def order_of(ids: list[str], data: st.DataObject) -> Order:
    """An order of which some ids left and some came back."""
    return Order(ids, data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=6)) if ids else ())


def listed(order: Order, begin: int, end: int, version: int) -> tuple[str, ...]:
    """The ids of a run, by what left and came back step by step."""
    there, steps = {*range(len(order.ids))}, []
    while version:
        version, step = order.versions[version]
        steps.append(step)
    for step in steps:
        there ^= {step}
    return tuple(order.ids[i] for i in range(begin, end) if i in there)


def run_of(order: Order, data: st.DataObject) -> Antecedents:
    begin = data.draw(st.integers(0, len(order.ids)))
    end, version = data.draw(st.integers(begin, len(order.ids))), data.draw(st.integers(0, len(order.versions) - 1))
    return Antecedents(order, begin, end, len(listed(order, begin, end, version)), version)


@given(IDS, st.booleans(), st.data())
def test_a_run_is_a_list_of_ids(ids: list[str], twice: bool, data: st.DataObject) -> None:
    run = run_of(order_of(ids + ids[: 3 * twice], data), data)
    expected = listed(run.order, run.begin, run.end, run.version)
    where = data.draw(st.slices(len(expected)))
    assert run == expected and hash(run) == hash(expected) and [*run] == [*expected] and run[where] == expected[where]
    assert [p in run for p in "abcdefgh"] == [p in expected for p in "abcdefgh"]
    assert [run[i] for i in range(len(run))] == [*expected] and len(run) == len(expected)
    other = run_of(run.order, data)
    assert (run == other) == (expected == tuple(other)) == (run == tuple(other))


@given(IDS, IDS, st.data())
def test_an_order_goes_on_only_with_what_stands_in_it(ids: list[str], more: list[str], data: st.DataObject) -> None:
    order = order_of(ids, data)
    wanted = [p for p in ids if data.draw(st.booleans())] + more
    assume(wanted and len(set(wanted)) == len(wanted))
    earlier, version = run_of(order, data), data.draw(st.integers(0, len(order.versions) - 1))
    before, run = tuple(earlier), order.run(version, wanted)
    places = [ids.index(p) for p in wanted if p in ids]
    fits = wanted[0] in ids and places == sorted(places) and not {*wanted[len(places) :]} & {*ids}
    assert (run is not None) == fits and (run is None or run == tuple(wanted)) and earlier == before
    assert order.ids == ids + (wanted[len(places) :] if fits else []) and order.places == {
        p: i for i, p in enumerate(order.ids)
    }
    if run is not None:
        versions = len(order.versions)
        assert order.run(run.version, wanted) == run == order.run(version, wanted) and len(order.versions) == versions
        assert [run.through(p, i) for i, p in enumerate(wanted, 1)] == [
            tuple(wanted[:i]) for i in range(1, len(wanted) + 1)
        ]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=60))
def test_windows_that_were_forked_share_an_order(edits: list[tuple[int, int]]) -> None:
    """Three of them append, lose and regain ids by turns, each from its own last version."""
    start = [f"{i}" for i in range(9)]
    windows = [(start, Antecedents(start))] * 3
    for i, (kind, number) in enumerate(edits):
        ids, run = windows[number % 3]
        gone = [p for p in run.order.ids if p in start and p not in ids]
        if kind == 0:
            ids = [*ids, f"n{i}"]
        elif kind == 1 and gone:
            ids = sorted([*(p for p in ids if p in start), gone[number % len(gone)]]) + [
                p for p in ids if p not in start
            ]
        elif len(ids) > 4:
            ids = ids[: number % len(ids)] + ids[number % len(ids) + 1 :]
        after = run.order.run(run.version, ids)
        assert after is not None and after.order is windows[0][1].order
        windows[number % 3] = ids, after
        assert all(tuple(run) == tuple(ids) for ids, run in windows)


@pytest.mark.parametrize("gone", [0, 4])
def test_an_order_ends_once_more_has_left_than_stays(gone: int) -> None:
    window = ["a"]
    run, restarts = Antecedents(window), 0
    for i in range(1000):
        window = [*window, str(i)]
        if len(window) > 10:
            del window[gone]
        after = run.order.run(run.version, window)
        run, restarts = after or Antecedents(window), restarts + (after is None)
        assert run == tuple(window) and len(run.order.ids) <= 84 and len(run.order.versions) <= 84
    assert 5 < restarts < 20


@given(st.lists(IDS, min_size=1, max_size=3), st.data())
def test_a_state_packs_and_unpacks_to_the_same_antecedents(lists: list[list[str]], data: st.DataObject) -> None:
    orders = [order_of(ids, data) for ids in lists]
    fronts: dict[str, list[Antecedents | None]] = {
        name: [run_of(data.draw(st.sampled_from(orders)), data) if data.draw(st.booleans()) else None for _ in range(4)]
        for name in ("placed", "evicted")
    }
    dumped: dict[str, Any] = {
        n: [{"kv": None if f is None else {"span": "s"}} for f in row] for n, row in fronts.items()
    }
    packed = json.loads(json.dumps(pack(dumped, fronts)))
    assume("orders" in packed)
    unpacked = unpack(packed)
    for name, row in fronts.items():
        assert [c["kv"] and c["kv"].get("antecedents", ()) for c in unpacked[name]] == row


@given(IDS, st.data())
def test_a_survivor_follows_its_antecedents_without_those_that_left(ids: list[str], data: st.DataObject) -> None:
    order = order_of(ids, data)
    now = data.draw(
        st.one_of(IDS, st.permutations(ids), st.lists(st.sampled_from(ids or "a"), unique=True).map(sorted))
    )
    shared = (
        order.run(data.draw(st.integers(0, len(order.versions) - 1)), list(now))
        if now and data.draw(st.booleans())
        else None
    )
    placed = shared or Antecedents(now)
    survival = Survival(placed)
    for _ in range(3):
        was = run_of(order, data)
        index, unseen = data.draw(st.integers(0, len(now))), tuple(data.draw(IDS))
        entry: Any = SimpleNamespace(kv=SimpleNamespace(lane="computed", antecedents=was), unseen=unseen)
        front, before = now[:index], placed.through(now[index - 1], index) if index else Antecedents()
        fresh = [p for p in front if p not in was]
        survives = [p for p in was if p in front] == [p for p in front if p in was] and set(fresh) <= set(unseen)
        expected = (tuple(fresh), tuple(p for p in was if p not in front)) if survives else None
        found = survival.of(entry, before)
        assert (found and (tuple(found[0]), tuple(found[1]))) == expected
        assert found is None or (len(found[1]) == len(tuple(found[1])) and found[1] == tuple(found[1]))
        assert found is None or found[1].first == (tuple(was)[: len(found[1])] == tuple(found[1]))
