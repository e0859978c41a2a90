"""Files that are removed, expire, or go with their library leave nothing behind, and running windows do not find them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Library, Window, open_store
from ctxwin.errors import ChunkUnavailable
from ctxwin.library import Vectors
from ctxwin.library.library import KEPT, granted_libraries
from ctxwin.media import png
from ctxwin.store.base import Store
from library.conftest import Clock
from store.redis_server import Server
from window.fake import FakeEngine

ANIMALS = ("cat", "dog", "elk", "fox")
WAYS = ("expiry", "remove", "delete")


def picture(seed: int) -> np.ndarray:
    return np.full((4, 4, 3), 40 * seed + 7, np.uint8)


def fill(library: Library, ttl: float | None = None) -> None:
    for i, name in enumerate(ANIMALS):
        library.add(png(picture(i)), f"{name}.png", caption=f"a {name}", ttl=ttl)
    library.add(b"the owl says hoo", "owl.txt", ttl=ttl)


def take_out(library: Library, clock: Clock, way: str) -> None:
    """Every file, one way or another."""
    if way == "expiry":
        clock.now += 1e6
        library.view()
    elif way == "remove":
        for name in [row.name for row in library.files()]:
            library.remove(name)
    else:
        library.delete()


def left(store: Store) -> set[str]:
    """What a store holds, the records of libraries and grants apart, which name no file."""
    return {key for key in store.list() if not key.startswith(("library/", "edition/", "grants/"))}


def independent(keys: set[str], engine: FakeEngine) -> set[str]:
    return {key for key in keys if engine.repo.record_of(key).get("provenance") == "system_prompt"}


def ways_out() -> Iterator[Any]:
    """Each way out of each store, of a store that is the reader's or is not; both of each way."""
    places = ["memory:", "disk:{}/own", "tiered:memory:,disk:{}/tiers", "redis"]
    for i, (place, way) in enumerate(product(places, WAYS)):
        shared = i % 2 == 0
        name = f"{'one store' if shared else 'a store of its own'}-{place}-{way}"
        yield pytest.param(way, place, shared, id=name, marks=[pytest.mark.redis] * (place == "redis"))


@pytest.mark.parametrize(("way", "place", "shared"), list(ways_out()))
def test_nothing_of_a_file_stays(way: str, place: str, shared: bool, clock: Clock, tmp_path: Path) -> None:
    """Records, pixels, embeddings, vectors, what was prepared and KV, in every tier, in the reader's store, too."""
    with ExitStack() as held:
        if place == "redis":
            place = held.enter_context(Server(tmp_path)).url
        store = held.enter_context(closing(open_store(place.format(tmp_path))))
        reader = FakeEngine(store if shared else None)

        def embed(inputs: Any) -> np.ndarray:
            return np.array([[1.0, len(getattr(one, "label", one))] for one in inputs], dtype=np.float32)

        library = Library(store, "zoo", clock=clock, retriever=Vectors(embed, "length"))
        fill(library, 1000.0)
        library.prepare(reader)
        with Window(reader, "hd", fidelity=Fidelity("patched", rank=2)) as window:
            window.retrieve("the elk and the owl", library, k=5)
            window.ask("which?", max_tokens=2)
            window.evict(window.ids[1])
            window.ask("which?", max_tokens=2)
            kept = left(store) | left(reader.store)
            assert any(key.startswith("embed/") for key in kept) and any(key.startswith("prepared/") for key in kept)
        take_out(library, clock, way)
        assert not library.view().rows
        library.sweep(reader)
        assert not left(store) - independent(left(store), reader)
        assert not left(reader.store) - independent(left(reader.store), reader)
        editions = set(store.list("edition/"))
        assert len(editions) <= 2 * len(ANIMALS) + 3 and (way != "delete" or not editions)


@pytest.mark.parametrize("way", WAYS)
def test_a_running_window_serves_what_it_placed_and_finds_nothing_again(way: str, clock: Clock) -> None:
    engine = FakeEngine()
    library = Library(engine.store, "zoo", clock=clock)
    fill(library, 1000.0)
    with Window(engine, "hd") as window:
        fox, owl, elk = (window.retrieve(name, library, k=1)[0] for name in ("fox", "owl", "elk"))
        window.evict(elk)
        before = window.ask("which?", max_tokens=3)
        version = window.snapshot().libraries["zoo"]
        take_out(library, clock, way)
        assert window.ask("which?", max_tokens=3).token_ids == before.token_ids
        assert window.ids == (fox, owl) and window.evicted == ()
        with pytest.raises(ChunkUnavailable, match="was removed or has expired"):
            window.recall(elk)
        if way != "delete":
            assert window.retrieve("the elk, the cat, the fox and the owl", library, k=5) == []
            assert library.view(version).rows == () and library.view(version).search("elk") == []
        window.check()
        window.evict(owl)
        window.evict(fox)
        for placement in (fox, owl):
            with pytest.raises(ChunkUnavailable):
                window.recall(placement)
        assert window.look_back(f"{fox} {owl} {elk}") == []
        library.sweep(engine)
        assert not left(engine.store) - independent(left(engine.store), engine), "it went when it had left the window"


def test_what_others_need_stays(clock: Clock) -> None:
    """The same picture in another file, in another library, under another caption, and of a window's own."""
    engine = FakeEngine()
    one, other = (Library(engine.store, name, clock=clock) for name in ("one", "other"))
    one.add(png(picture(1)), "a.png", caption="alpha")
    one.add(Chunk.image(picture(1), text="again"), "b", caption="beta")
    other.add(png(picture(1)), "c.png", caption="gamma")
    for library in (one, other):
        library.prepare(engine)
    encodes = engine.counters.vision_encodes
    one.remove("a.png")
    with Window(engine, "hd") as window:
        window.retrieve("beta", one)
        window.retrieve("gamma", other)
        assert window.ask("which?", max_tokens=1).usage.vision_encodes == 0
    assert engine.counters.vision_encodes == encodes
    other.delete()
    with Window(engine, "hd") as window:
        own = window.append(Chunk.image(picture(1), text="mine"))
        window.evict(own)
        one.remove("b")
        for key in list(engine.store.list("embed/")):
            engine.store.delete(key)
        window.recall(own)
        assert window.ask("which?", max_tokens=1).text


def test_a_grantee_loses_what_is_removed_elsewhere(clock: Clock) -> None:
    """Another process takes the file out: the reader's store is cleaned when the library is next used there."""
    references, reader = open_store("memory:"), FakeEngine()
    written, read = (Library(references, "manual", clock=clock) for _ in range(2))
    fill(written)
    written.grant("acme")
    written.prepare(FakeEngine())
    with Window(reader, "hd") as window:
        window.retrieve("cat", read)
        window.ask("which?", max_tokens=1)
    assert left(reader.store)
    written.remove("cat.png")
    with Window(reader, "hd") as window:
        window.retrieve("dog", read)
    written.remove("dog.png")
    read.sweep(reader)
    assert not left(reader.store) - independent(left(reader.store), reader)
    written.delete()
    assert granted_libraries(references, "acme") == ()


def test_what_was_replaced_goes_with_its_last_reader(clock: Clock) -> None:
    engine = FakeEngine()
    library = Library(engine.store, "notes", clock=clock)
    for i in range(KEPT + 3):
        library.add(f"the count is {i}".encode(), "count.txt", replace=True)
        clock.now += 1
    assert len(list(engine.store.list("entry/"))) == KEPT == len(list(engine.store.list("edition/")))
    library.remove("count.txt")
    assert not list(engine.store.list("entry/")) and not left(engine.store)
    library.add(b"the count is 1", "count.txt")
    assert [hit.file for hit in library.search("count")] == ["count.txt"]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(("add", "replace", "remove", "wait", "use", "ask", "evict")), st.integers(0, 5)),
        max_size=14,
    )
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_store_lists_what_a_library_of_the_files_alone_lists(steps: list[tuple[str, int]]) -> None:
    """A random life, after which only the files that are there have anything in the store."""
    clock, engine = Clock(), FakeEngine()
    library = Library(engine.store, "life", clock=clock)
    moves: dict[str, Callable[[Window, int], object]] = {
        "add": lambda w, i: library.add(
            png(picture(i)), f"{i}.png", caption=f"number {i}", ttl=100.0 if i % 2 else None
        ),
        "replace": lambda w, i: library.add(f"text {i}".encode(), f"{i}.png", replace=True),
        "remove": lambda w, i: library.remove(f"{i}.png"),
        "wait": lambda w, i: setattr(clock, "now", clock.now + 30 * i),
        "use": lambda w, i: w.retrieve(f"number text {i}", library, k=2),
        "ask": lambda w, i: w.ask("which?", max_tokens=1),
        "evict": lambda w, i: w.evict(w.ids[i % len(w.ids)]),
    }
    with Window(engine, "hd", fidelity=Fidelity("patched", rank=2)) as window:
        for name, i in steps:
            try:
                moves[name](window, i)
            except (ValueError, LookupError, ZeroDivisionError):
                continue
            clock.now += 1
    for row in library.files():
        library.remove(row.name)
    library.sweep(engine)
    assert not left(engine.store) - independent(left(engine.store), engine)
