"""Pages of evicted chunks: whatever is edited, a record and its pages are the whole state, and nothing else is stored."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window, open_store
from ctxwin.errors import UnknownVersion
from ctxwin.window.state import State
from ctxwin_server.registry import pages
from ctxwin_server.registry.pages import EvictedPages
from window.fake import FakeEngine

PROGRAMS = st.lists(st.tuples(st.sampled_from("aaaeeerfuq"), st.integers(0, 99)), max_size=40)


def parse_of(state: State) -> Any:
    bare = state.model_dump(mode="json", exclude={"placed", "evicted"})
    return lambda page: State.model_validate({**bare, **page})


def edit(window: Window, op: str, number: int) -> None:
    ids, evicted = window.ids, window.evicted
    if op == "a" or not ids:
        window.append(Chunk.text(f"secret{window.core.state.arrivals}"))
    elif op in "ef":
        window.evict(ids[number % len(ids)], forget=op == "f")
    elif op == "r" and evicted:
        window.recall(evicted[number % len(evicted)])
    elif op == "u" and window.version:
        with suppress(UnknownVersion):  # what was forgotten does not come back
            window.undo()
    elif op == "q":
        window.ask("q", 1)


@settings(max_examples=40, deadline=None)
@given(program=PROGRAMS, size=st.integers(1, 5))
def test_a_record_and_its_pages_are_the_state(program: list[tuple[str, int]], size: int) -> None:
    store = open_store("memory:")
    with pytest.MonkeyPatch.context() as patched, FakeEngine() as engine:
        patched.setattr(pages, "SIZE", size)
        with Window(engine, "hd", budget=4000, fidelity=Fidelity("patched")) as window:
            kept = EvictedPages(store, window.id)
            for op, number in program:
                edit(window, op, number)
                state = window.core.state
                newest, keys = kept.write(state)
                kept.keep(keys)
                assert len(newest.evicted) < size and set(store.list("evicted/")) == {*keys}
                again = EvictedPages(store, window.id)
                whole = newest.replace(evicted=(*again.read(keys, parse_of(state)), *newest.evicted))
                assert whole == state
                puts = store.stats().puts
                assert again.write(whole) == (newest, keys) and store.stats().puts == puts
                again.release()
            stored = b"".join(store.get(key) or b"" for key in store.list())
            gone = {f"secret{i}" for i in range(state.arrivals)} if program else set()
            gone -= {part.text for p in (*state.placed, *state.evicted) for part in p.chunk.parts} if program else set()
            assert not [text for text in gone if f'"{text}"'.encode() in stored]
            kept.delete(list(store.list("evicted/")))
            assert not list(store.list())


def test_a_version_writes_what_is_new(engine: FakeEngine) -> None:
    store, sizes = open_store("memory:"), []
    with Window(engine, "hd", budget=4000, fidelity=Fidelity("patched")) as window:
        kept = EvictedPages(store, window.id)
        for i in range(400):
            window.append(Chunk.text(f"c{i}"))
            if len(window.ids) > 3:
                window.evict(window.ids[0])
            newest, keys = kept.write(window.core.state)
            kept.keep(keys)
            sizes.append(len(json.dumps(newest.model_dump(mode="json"))))
        whole = len(json.dumps(window.core.state.model_dump(mode="json")))
        assert max(sizes[200:]) < 1.1 * max(sizes[:200]) < whole / 3
        assert store.stats().puts == len(keys) == 397 // pages.SIZE, "each was written once"
        window.recall(window.evicted[10])
        newest, after = kept.write(window.core.state)
        assert store.stats().puts == len(keys) + 1 and len({*after} - {*keys}) == 1, "one page lost a chunk"


def test_what_a_store_refuses_or_loses(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store("memory:")
    with Window(engine, "hd", budget=4000, fidelity=Fidelity("patched")) as window:
        for i in range(200):
            window.append(Chunk.text(f"c{i}"))
        for placement in window.ids[:-1]:
            window.evict(placement)
        state = window.core.state
        assert EvictedPages(open_store("memory:", max_bytes=100), window.id).write(state) == (state, [])
        _, keys = EvictedPages(store, window.id).write(state)
        store.delete(keys[0])
        store.commit(keys[1], b"{}", 1)
        older = EvictedPages(store, window.id).read([*keys, "window/another"], parse_of(state))
        assert older == state.evicted[2 * pages.SIZE : 3 * pages.SIZE] and len(keys) == 3
        assert sum("cannot be recalled" in record.message for record in caplog.records) == 3
