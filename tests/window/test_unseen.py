"""What a chunk may leave unseen: only what a recall or an insertion put in front of it where it stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.window.state import State
from window.fake import FakeEngine


@pytest.fixture
def empty(engine: FakeEngine) -> Window:
    return Window(engine, "h", budget=100, fidelity=Fidelity("patched", rank=2))


def lanes(window: Window) -> dict[str, str]:
    window.check()
    return {e.id: e.lane for e in window.chunks}


@pytest.mark.parametrize("query", ["{a} {b}", "{b} {a}"])
def test_chunks_that_come_back_together_see_each_other(empty: Window, query: str) -> None:
    a = empty.append(Chunk.text("aa"))
    empty.ask("q")
    empty.evict(a)
    b = empty.append(Chunk.text("bb"))  # never behind a
    empty.ask("q")
    empty.evict(b)
    empty.look_back(query.format(a=a, b=b))
    assert empty.ids == (a, b)
    assert lanes(empty)[b] == "formed"


def test_what_left_is_no_longer_unseen(empty: Window) -> None:
    a, c = empty.extend([Chunk.text("aa"), Chunk.text("cc")])
    empty.ask("q")
    x = empty.insert(1, Chunk.text("xx"))
    assert lanes(empty)[c] == "survivor"
    empty.evict(x)
    empty.recall(x, at=2)
    empty.reorder([a, x, c])
    assert lanes(empty)[c] == "formed"


def test_what_moved_behind_is_no_longer_unseen(empty: Window) -> None:
    a, c = empty.extend([Chunk.text("aa"), Chunk.text("cc")])
    empty.ask("q")
    empty.evict(a)
    x = empty.insert(0, Chunk.text("xx"))
    empty.reorder([c, x])
    empty.ask("q")
    assert lanes(empty)[c] == "survivor"
    empty.reorder([x, c])
    assert lanes(empty)[c] == "formed"


@dataclass(frozen=True)
class _Given:
    ids: tuple[str, ...]

    def order(self, window: Window) -> Iterable[str]:
        return self.ids


def test_what_comes_back_does_not_leave_whatever_the_policy_says(engine: FakeEngine) -> None:
    window = Window(engine, "h", budget=8)
    a, b = window.extend([Chunk.text("aaa"), Chunk.text("bbb")])
    window.evict(a)
    c = window.append(Chunk.text("ccc"))
    window.eviction = _Given((a, b))
    assert window.look_back(a) == [a]
    assert window.ids == (c, a)


def test_ids_of_edits_that_an_adoption_dropped_are_not_given_again(engine: FakeEngine) -> None:
    window = Window.restore(engine, Window(engine, "h").snapshot(), seed="s")
    branch = window.fork()
    dropped = window.append(Chunk.text("a"))
    window.adopt(branch, force=True)
    assert window.append(Chunk.text("a")) != dropped
    window.check()


def test_a_snapshot_from_before_windows_had_ids(engine: FakeEngine) -> None:
    window = Window(engine, "h")
    window.append(Chunk.text("a"))
    old = window.snapshot().model_dump(mode="json")
    del old["window"], old["placed"][0]["read"], old["placed"][0]["chunk"]["priority"]
    first, second = Window.restore(engine, old), Window.restore(engine, State.model_validate(old))
    assert first.ids == second.ids == window.ids
    assert first.ask("q").text == window.ask("q").text
    assert len({"", window.id, first.id, second.id}) == 4
    assert Window.restore(engine, first.snapshot()).id == first.id
