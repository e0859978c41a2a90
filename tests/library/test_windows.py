"""Windows that draw from libraries: what is placed, which version, what is prepared, and whose store it lies in."""

from __future__ import annotations

import numpy as np
import pytest

from ctxwin import Chunk, Fidelity, Library, Window
from ctxwin.errors import BudgetExceeded, UnknownFile
from ctxwin.media import png
from window.fake import FakeEngine

ANIMALS = ("cat", "dog", "elk", "fox")


@pytest.fixture
def zoo(shelf: Library) -> Library:
    for i, name in enumerate(ANIMALS):
        shelf.add(png(np.full((4, 4, 3), 50 * i, np.uint8)), f"{name}.png", caption=f"a {name}")
    return shelf


def labels(window: Window) -> list[str]:
    return [window.chunk(i).label for i in window.ids]


def test_what_is_found_is_placed_once(zoo: Library, engine: FakeEngine) -> None:
    with Window(engine, "hd") as window:
        window.append(Chunk.text("first"))
        (fox,) = window.retrieve("the fox", zoo)
        assert labels(window) == ["", "fox.png"]
        again = window.retrieve("a fox and a dog", zoo, k=2)
        assert fox in again and labels(window) == ["", "fox.png", "dog.png"]
        before = window.version
        assert window.retrieve("zebra", zoo) == [] and len(window.ids) == 3
        window.check()
        assert window.version > before  # it has read the library
        answer = window.ask("which?", max_tokens=3)
    plain = Window(FakeEngine(), "hd")
    plain.extend([Chunk.text("first"), *(Chunk.image(np.full((4, 4, 3), s, np.uint8)) for s in (150, 50))])
    assert answer.token_ids == plain.ask("which?", max_tokens=3).token_ids


def test_files_are_placed_by_name_whatever_search_would_find(zoo: Library, engine: FakeEngine) -> None:
    """MPIC, section 3.1: a prompt names the stored picture by its id."""
    zoo.add(b"fox.png fox.png cat.png: a fox and a cat. " * 60, "notes.txt", ttl=100)
    names = ["fox.png", "notes.txt", "cat.png", "fox.png"]
    zoo.prepare(engine)
    encodes = engine.counters.vision_encodes
    with Window(engine, "hd", fidelity=Fidelity("blind")) as window:
        ids = window.retrieve(names, zoo, k=1)
        assert labels(window) == ["fox.png", *["notes.txt"] * 3, "cat.png"] and ids == list(window.ids)
        assert window.ask("which?", max_tokens=2).usage.vision_encodes == 0 == engine.counters.vision_encodes - encodes
        assert {e.lane for e in window.plan().entries} == {"canonical"}
        state = window.snapshot()
        with pytest.raises(UnknownFile, match=r"got 'foxes.png'; it may have expired, or be 'fox.png'"):
            window.retrieve(["cat.png", "foxes.png"], zoo)
        assert window.snapshot() == state
        zoo.remove("fox.png")
        assert not {i for i in window.ids if window.chunk(i).origin == ""}, "so that they go with their file"
        window.evict(ids[0])
        with pytest.raises(UnknownFile):
            window.retrieve(["fox.png"], zoo)
    with Window(engine, "hd") as other:
        assert other.retrieve([], zoo) == []
        with pytest.raises(TypeError, match="query must be a list, got int; pass a list, with a file's name for each"):
            other.retrieve(5, zoo)  # type: ignore[arg-type]


def test_a_chunk_without_a_label_takes_the_name_of_its_file(shelf: Library, engine: FakeEngine) -> None:
    picture = Chunk.image(np.full((4, 4, 3), 7, np.uint8))
    added = shelf.add(picture, "plan.png", caption="a plan").passages[0].chunk
    shelf.add(Chunk.text("a plan of old", label="mine"), "old.txt")
    assert added.id == picture.id and (added.label, picture.label) == ("plan.png", "")
    with Window(engine, "hd") as window:
        window.retrieve("plan", shelf)
        assert sorted(labels(window)) == ["mine", "plan.png"]


def test_a_running_window_keeps_what_it_opened_with(zoo: Library, engine: FakeEngine) -> None:
    old, late = Window(engine, "hd"), Window(engine, "hd")
    old.retrieve("cat", zoo)
    zoo.add(png(np.full((4, 4, 3), 255, np.uint8)), "dog.png", caption="a dog", replace=True)
    zoo.remove("elk.png")
    (dog,) = (dog_before,) = old.retrieve("dog", zoo)
    assert old.chunk(dog).id == Chunk.image(np.full((4, 4, 3), 50, np.uint8)).id
    assert not old.retrieve("elk", zoo) and not late.retrieve("elk", zoo), "what is removed is gone for everybody"
    (dog,) = late.retrieve("dog", zoo)
    assert late.chunk(dog).id == Chunk.image(np.full((4, 4, 3), 255, np.uint8)).id
    restored = Window.restore(engine, old.snapshot().model_dump_json())
    assert restored.retrieve("dog", zoo) and restored.snapshot().libraries == {"shelf": 4}
    assert old.fork().retrieve("dog", zoo) == [dog_before]


def test_a_window_that_looked_before_there_was_a_file_reads_the_first_ones(shelf: Library, engine: FakeEngine) -> None:
    with Window(engine, "hd") as window:
        assert window.retrieve("pump", shelf) == []
        shelf.add(b"The pump is red.", "a.txt")
        assert len(window.retrieve("pump", shelf)) == 1
        shelf.add(b"The pump is blue.", "a.txt", replace=True)
        with window.fork("another") as branch, Window(engine, "hd") as late:
            for reader in (window, branch, late):
                (found,) = reader.retrieve("pump", shelf)
                assert ("red" in str(reader.chunk(found).parts)) == (reader is not late)
            assert branch.snapshot().unit == window.id != late.snapshot().unit


def test_what_is_found_does_not_leave_with_a_lazy_eviction(shelf: Library, engine: FakeEngine) -> None:
    shelf.add(b"The pump is red.", "a.txt")
    with Window(engine, "hd", budget=60) as window:
        window.append(Chunk.text("a word in front of it."))
        (pump,) = window.retrieve("pump", shelf, k=1)
        window.append(Chunk.text("and one behind it"))
        window.evict(pump, lazy=True)
        assert window.retrieve("pump", shelf, k=1, reserve_tokens=60 - window.tokens + 5) == [pump]
        assert pump in window.ids and not window.pending


def test_others_leave_for_what_is_found(zoo: Library, engine: FakeEngine) -> None:
    with Window(engine, "hd", budget=20) as window:
        window.extend([Chunk.text("aaaaaa"), Chunk.text("bbbbbb")])
        window.retrieve("cat", zoo, reserve_tokens=8)
        assert [window.chunk(i).label or "text" for i in window.ids] == ["text", "cat.png"] and len(window.evicted) == 1
        window.pin(window.ids[0])
        state = window.snapshot()
        with pytest.raises(BudgetExceeded):
            window.retrieve("a", zoo, k=4, reserve_tokens=9)
        assert window.snapshot() == state


@pytest.mark.parametrize("shared", [True, False], ids=["one store", "a store of its own"])
def test_what_was_prepared_is_not_computed_again(zoo: Library, engine: FakeEngine, shared: bool) -> None:
    reader = engine if shared else FakeEngine()
    assert zoo.prepare(engine) == 4 and zoo.prepare(engine) == 0
    encodes = reader.counters.vision_encodes
    with Window(reader, "another prompt", fidelity=Fidelity("blind")) as window:
        window.retrieve("the cat, the elk and the fox", zoo, k=3)
        entries = window.plan().entries
        assert reader.counters.vision_encodes == encodes
        assert [e.lane for e in entries] == ["canonical"] * 3
        assert not any(e.compute for e in entries) and not any(e.exact for e in entries)
        answer = window.ask("which?", max_tokens=2)
        assert answer.usage.reused_tokens["canonical"] == window.tokens - len("another prompt") - 1
        window.check()
    with Window(reader, "", fidelity=Fidelity("blind")) as window:
        window.retrieve("cat", zoo)
        assert [e.exact for e in window.plan().entries] == [True]  # behind that very header


def test_preparation_stops_when_it_is_told(zoo: Library, engine: FakeEngine) -> None:
    left = iter([False, False, True])
    assert zoo.prepare(engine, lambda: next(left)) == 2 and zoo.prepare(engine) == 2


def test_exact_windows_take_no_neutral_kv(zoo: Library, engine: FakeEngine) -> None:
    zoo.prepare(engine)
    with Window(engine, "hd", fidelity=Fidelity("exact")) as window:
        window.retrieve("a", zoo)
        assert {e.lane for e in window.plan().entries} == {"computed"}
        window.toggle(window.ids[1], conditioned=False)
        window.check()
        assert [e.lane for e in window.plan().entries][1] == "canonical"
        window.ask("which?", max_tokens=2)
        kept = window.snapshot()
    assert Window.restore(engine, kept).plan().entries[0].lane == "resident"
