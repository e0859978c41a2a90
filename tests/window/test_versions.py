"""Versions without holes, `Window.undo`, and what a slide spares."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.errors import UnknownChunk, UnknownVersion
from ctxwin.window import edits
from ctxwin.window.events import Event
from window.fake import FakeEngine
from window.growth import lines


def test_undo_is_told(window: Window) -> None:
    events: list[Event] = []
    window.observe(events.append)
    window.slide(1)
    window.undo()
    event = events[-1]
    assert (event.op, event.version, [p.id for p in event.state.placed]) == ("undo", window.version, list(window.ids))


def test_every_edit_is_one_version(engine: FakeEngine) -> None:
    with Window(engine, "hd", budget=12) as window:
        window.extend([Chunk.text("aa"), Chunk.text("bb"), Chunk.text("cc")])
        assert window.version == 1 and window.at(0).ids == ()
        first, second, third = window.ids
        window.slide(2)
        before = window.version, window.ids
        assert window.look_back(f"{first} and {second}", reserve_tokens=5) == [first, second]  # and ``third`` leaves
        assert (window.version, window.ids) == (before[0] + 1, (first, second))
        assert window.at(window.version - 1).ids == before[1] == (third,)
        window.maintenance.touch(first)
        window.slide(1)
        assert window.ids == (first,), "what was read last stays, also behind edits of several steps"
        window.check()


def test_undo_goes_back_one_edit_at_a_time_and_an_edit_behind_it_begins_anew(window: Window) -> None:
    one, two, three = window.ids
    window.evict(two)
    window.reorder([three, one])
    asked = window.ask("q", max_tokens=3)
    version = window.version
    window.undo()
    assert (window.ids, window.version) == ((one, three), version + 1)
    window.undo()
    assert window.ids == (one, two, three) and window.evicted == ()
    window.evict(one)
    window.undo()
    assert window.ids == (one, two, three)
    window.undo()
    assert window.ids == ()
    with pytest.raises(UnknownVersion, match="must be kept"):
        window.undo()
    assert window.at(version).ids == (three, one) and window.at(version).ask("q", max_tokens=3).text == asked.text
    again = window.append(Chunk.text("aa"))
    assert again not in (one, two, three), "ids of edits that were taken back are not given again"
    window.check()


def test_nothing_that_was_forgotten_comes_back_by_undo(window: Window) -> None:
    window.evict(window.ids[0], forget=True)
    with pytest.raises(UnknownVersion):
        window.undo()


def test_undo_of_an_adoption_is_the_window_before_it(window: Window) -> None:
    version, ids = window.version, window.ids
    with window.fork() as branch:
        for text in ("dd", "ee", "ff"):
            branch.append(Chunk.text(text))
        window.adopt(branch)
    assert window.at(window.version - 1).ids == window.at(version).ids == ids
    window.undo()
    assert window.ids == ids


def test_a_slide_spares_what_was_just_recalled(engine: FakeEngine) -> None:
    with Window(engine, "hd", budget=10) as window:
        first, second, third, fourth = window.extend([Chunk.text(text) for text in ("aa", "bb", "cc", "dd")])
        window.slide(1)
        window.recall(first)
        assert window.slide(reserve_tokens=window.budget - window.tokens + 3) == [second, third]
        assert window.ids == (first, fourth)


def test_an_id_that_there_is_not_names_a_few_that_there_are(engine: FakeEngine) -> None:
    with Window(engine, "hd") as window:
        ids = window.extend([Chunk.text("a")] * 40)
        with pytest.raises(UnknownChunk, match="32 more") as placed:
            window.evict("zzz")
        window.slide(40)
        with pytest.raises(UnknownChunk, match="32 more") as error:
            window.recall("zzz")
        assert ids[-1] in str(error.value) and max(len(str(e.value)) for e in (error, placed)) < 250


def test_kept_versions_take_bounded_memory_in_a_stream() -> None:
    """A frame that comes into a full window changes what it holds of all others: 1,024 versions were 100 MB a window."""
    with Window(FakeEngine(), "h", fidelity=Fidelity("patched")) as window:
        window.extend([Chunk.text(f"{i}") for i in range(100)])
        for i in range(300):
            with window.core.writing() as state:  # as an append, a slide and a prefill do, in seconds
                changed = tuple(p.replace(read=i) for p in (*state.placed[1:], state.placed[0]))
                window.core.commit(state.edited(placed=changed))
        kept = {id(p): p for state, _ in window.core._history.values() for p in (*state.placed, *state.evicted)}
        assert len(kept) < 16384 + 2 * 400, len(kept)
        assert window.at(window.version - 16).version == window.version - 16
        newest = window.ids
        window.undo()
        assert window.ids != newest


def test_slides_of_a_long_stream_look_at_what_leaves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once the oldest evicted chunks are let go, so that none of them stands where it stood."""
    monkeypatch.setattr(edits, "MAX_EVICTED", 200)
    with Window(FakeEngine(), "h") as window:
        window.extend([Chunk.text(f"{i}") for i in range(4)])
        work = []
        for i in range(240):
            window.append(Chunk.text(f"{i}"))
            work.append(lines(lambda: window.slide(1)))
            if i in (100, 230):  # one comes back from the middle, and stays
                window.recall(window.evicted[50])
        assert max(work[205:230]) <= work[105] + 64, (work[105], work[205:230])
        held = [{id(p) for p in (*s.placed, *s.evicted)} for s, _ in window.core._history.values()]
        held.append({id(p) for p in (*window.snapshot().placed, *window.snapshot().evicted)})
        assert [len(old - new) for old, new in pairwise(held)] == [*window.core._unshared.values()]
