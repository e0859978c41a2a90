"""The persistent list of placements beside an ordinary one, whose placements it must have in every version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import Chunk
from ctxwin.window.placed_list import PlacedList, difference, unshared
from ctxwin.window.state import Placed

CHUNK = Chunk.text("a")


def entry(number: int) -> Placed:
    fields: Any = {"tokens": 1 + number % 3, "advance": 1, "arrival": number, "read": number * 7 % 5}
    pending: Any = {"evict": ""} if number % 4 == 3 else {}
    return Placed(id=f"{number}", chunk=CHUNK, chunk_id="c", pending=pending, **fields)


@dataclass
class Naive:
    """One version: the list, and what it must be."""

    placed: PlacedList
    entries: list[Placed]


def is_right(version: Naive) -> None:
    placed, entries = version.placed, version.entries
    assert len(placed) == len(entries) and placed.ids == tuple(p.id for p in entries)
    assert placed.tokens == sum(p.tokens for p in entries)
    assert placed.pending == [p for p in entries if p.pending]
    assert list(placed.least_recently_read()) == [p.id for p in sorted(entries, key=lambda p: (p.read, p.arrival))]
    for at, p in [*enumerate(entries)][:: max(1, len(entries) // 5)]:
        assert (placed.place_of(p.id), placed.get(p.id), placed[at], placed[at - len(entries)]) == (at, p, p, p)
    assert placed.place_of("none") is None and placed.get("none") is None
    with pytest.raises(IndexError):
        placed[len(entries)]


@settings(max_examples=60)
@given(st.integers(0, 200), st.lists(st.tuples(st.sampled_from("aiewmrsn"), st.integers(0, 999)), max_size=40))
def test_every_version_has_the_placements_of_an_ordinary_list(count: int, ops: list[tuple[str, int]]) -> None:
    start = [entry(i) for i in range(count)]
    versions, number = [Naive(PlacedList.of(start), start)], count
    for op, at in ops:
        placed, entries = versions[-1].placed, list(versions[-1].entries)
        at %= len(entries) + 1
        if op in "ai":
            at, number = (len(entries) if op == "a" else at), number + 1
            new = entry(number)
            placed = placed.splice(at, at, [new], late=(new.id,))
            behind = [p.replace(unseen=(*p.unseen, new.id)) for p in entries[at:]]
            entries = [*entries[:at], new, *behind]
        elif op in "ew":
            out = {p.id for p in (entries[at : at + 1] if op == "e" else entries[at::3])}
            placed = placed.without(out)
            left = [p for p in entries if p.id not in out]
            entries = [p.replace(unseen=tuple(u for u in p.unseen if u not in out)) for p in left]
        elif op == "m" and at < len(entries):
            new = entries[at].replace(read=at)
            placed, entries[at] = placed.splice(at, at + 1, [new]), new
        elif op == "r":
            assert (
                list(placed) == entries and list(reversed(placed)) == entries[::-1] and placed[at:] == (*entries[at:],)
            )
            entries = [*entries[at:], *entries[:at]]
            placed = placed.followed_by(entries)
        elif op == "s":
            version = at % 5
            placed = placed.read_until(version)
            entries = [p.replace(read=version) if p.read > version else p for p in entries]
        elif op == "n":
            placed, entries = placed.newest(at), entries[len(entries) - at :]
        assert placed.place_behind(at) == next((i for i, p in enumerate(entries) if p.arrival > at), len(entries))
        versions.append(Naive(placed, entries))
    for version in versions:
        is_right(version)
        assert version.placed == tuple(version.entries) and list(version.placed) == version.entries
        is_right(version)


def test_an_edit_shares_all_placements_but_those_that_it_changes() -> None:
    old = PlacedList.of(entry(i) for i in range(1000))
    new = old.without(["0", "500"]).splice(998, 998, [entry(1000)])
    left, came = difference(old.contents, new.contents)
    assert ({p.id for p in left}, {p.id for p in came}) == ({"0", "500"}, {"1000"})
    assert unshared([old], [new]) == 2 and unshared([new], [old]) == 1
    changed = [p.replace(read=9) if p.id == "7" else p for p in new]
    left, came = difference(new.contents, new.followed_by(changed).contents)
    assert [p.id for p in left] == [p.id for p in came] == ["7"]


def test_an_insertion_changes_none_behind_it_before_they_are_read() -> None:
    old = PlacedList.of(entry(i) for i in range(1000))
    new = old.splice(0, 0, [entry(1000)], late=("1000",))
    left, came = difference(old.contents, new.contents)
    assert len(left) <= 32 and len(came) <= 33, "but for the block that it stands in"
    assert unshared([old], [new]) == 1000, "as many as there will be"
    assert list(new.without(["1000"])) == list(old)
    assert all(p.unseen == ("1000",) for p in list(new)[1:])
    assert difference(old.contents, new.contents) == (left, came), "once they are read, too"


def test_what_leaves_again_changes_none_behind_it_before_they_are_read() -> None:
    old = PlacedList.of(entry(i) for i in range(1000))
    new = old.splice(0, 0, [entry(1000)], late=("1000",))
    assert all(p.unseen == ("1000",) for p in list(new)[1:])
    again = new.without(["1000"])
    assert len(difference(new.contents, again.contents)[0]) <= 33, "but for the block that it stood in"
    assert not again[999].unseen and again.place_of("1000") is None
    back = again.splice(500, 500, [entry(1000)], late=("1000",))
    assert [p.unseen for p in back] == [*[()] * 501, *[("1000",)] * 500]
    assert list(again) == list(back.without(["1000"])) == list(old)


def test_many_edits_leave_blocks_that_are_not_small() -> None:
    placed = PlacedList.of(entry(i) for i in range(640))
    for i in range(640, 2000):
        placed = placed.without([placed[i * 7919 % len(placed)].id]).splice(639, 639, [entry(i)])
        assert len(placed._blocks) <= 8 + 2 * len(placed) // 32
    assert len(placed) == 640
