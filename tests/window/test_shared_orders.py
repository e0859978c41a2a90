"""Runs of shared orders, survivors by them, and what changed between two versions, against naive lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from ctxwin.window.antecedents import Antecedents, Order, pack, unpack
from ctxwin.window.changes import changed, common_front
from ctxwin.window.survival import Survival

IDS = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)


def run_of(order: Order, data: st.DataObject) -> Antecedents:
    begin = data.draw(st.integers(0, len(order.ids)))
    return Antecedents(order, begin, data.draw(st.integers(0, len(order.ids) - begin)))


@given(IDS, st.data())
def test_a_run_is_a_list_of_ids(ids: list[str], data: st.DataObject) -> None:
    run = run_of(Order(ids), data)
    expected = tuple(ids[run.begin : run.end])
    where = data.draw(st.slices(len(expected)))
    assert run == expected and hash(run) == hash(expected) and [*run] == [*expected] and run[where] == expected[where]
    assert [p in run for p in "abcdefgh"] == [p in expected for p in "abcdefgh"]
    assert (
        [run.place(p) for p in expected] == [*range(len(expected))] == [expected.index(run[i]) for i in range(len(run))]
    )
    other = run_of(run.order, data)
    assert (run == other) == (expected == tuple(other)) and run.starts_with(other) == (
        expected[: len(other)] == tuple(other)
    )


@given(IDS, IDS, st.data())
def test_an_order_goes_on_only_with_what_continues_it(ids: list[str], more: list[str], data: st.DataObject) -> None:
    order = Order(ids)
    begin = data.draw(st.integers(0, len(ids)))
    wanted = ids[begin : data.draw(st.integers(begin, len(ids)))] + more
    assume(len(set(wanted)) == len(wanted))
    earlier = run_of(order, data)
    before, run = tuple(earlier), order.run(begin, wanted)
    known = ids[begin : begin + len(wanted)]
    fits = wanted[: len(known)] == known and not set(wanted[len(known) :]) & set(ids)
    assert (run is not None) == fits and (run is None or run == tuple(wanted)) and earlier == before
    assert order.ids == ids + (wanted[len(known) :] if fits else []) and order.places == {
        p: i for i, p in enumerate(order.ids)
    }


def test_an_order_ends_once_more_has_left_than_stays() -> None:
    order, window, restarts = Order("a"), ["a"], 0
    for i in range(1000):
        window = [*window, str(i)][-10:]
        run = order.run(max(0, len(order.ids) - 9), window) if len(window) == 10 else order.run(0, window)
        if run is None:
            order, restarts = Order(window), restarts + 1
        assert len(order.ids) <= 84
    assert 5 < restarts < 20


@given(st.lists(IDS, min_size=1, max_size=3), st.data())
def test_a_state_packs_and_unpacks_to_the_same_antecedents(lists: list[list[str]], data: st.DataObject) -> None:
    orders = [Order(ids) for ids in lists]
    fronts: dict[str, list[Antecedents | None]] = {
        name: [run_of(data.draw(st.sampled_from(orders)), data) if data.draw(st.booleans()) else None for _ in range(4)]
        for name in ("placed", "evicted")
    }
    dumped: dict[str, Any] = {
        n: [{"kv": None if f is None else {"span": "s"}} for f in row] for n, row in fronts.items()
    }
    packed = pack(dumped, fronts)
    assume("ids" in packed)
    unpacked = unpack(packed)
    for name, row in fronts.items():
        assert [c["kv"] and c["kv"]["antecedents"] for c in unpacked[name]] == row


@given(IDS, st.data())
def test_a_survivor_follows_its_antecedents_without_those_that_left(ids: list[str], data: st.DataObject) -> None:
    order = Order(ids)
    now = data.draw(
        st.one_of(IDS, st.permutations(ids), st.lists(st.sampled_from(ids or "a"), unique=True).map(sorted))
    )
    shared = order.run(data.draw(st.integers(0, len(ids))), list(now)) if data.draw(st.booleans()) else None
    survival = Survival(shared or Antecedents(now))
    for _ in range(3):
        was = run_of(order, data)
        index, unseen = data.draw(st.integers(0, len(now))), tuple(data.draw(IDS))
        entry: Any = SimpleNamespace(kv=SimpleNamespace(lane="computed", antecedents=was), unseen=unseen)
        front = now[:index]
        fresh = [p for p in front if p not in was]
        survives = [p for p in was if p in front] == [p for p in front if p in was] and set(fresh) <= set(unseen)
        expected = (tuple(fresh), tuple(p for p in was if p not in front)) if survives else None
        found = survival.of(entry, index)
        assert (found and (tuple(found[0]), tuple(found[1]))) == expected


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_what_changed_lies_between_the_common_ends(old: list[int], new: list[int]) -> None:
    left, came = changed(old, new)
    front = common_front(old, new)
    back = len(old) - front - len(left)
    assert (
        old == old[:front] + list(left) + old[front + len(left) :]
        and new == old[:front] + list(came) + old[len(old) - back :]
    )
    assert not (left and came) or (left[0] != came[0] and left[-1] != came[-1])
