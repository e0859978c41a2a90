"""References: small, plain, the same window again; what a store that lost its content costs, and who is told."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
import ormsgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.runtime import ExecutionInfo, Runtime
from PIL import Image

from ctxwin import Chunk, Fidelity, Window, open_store
from ctxwin.errors import ChunkUnavailable
from ctxwin.hashing import digest
from ctxwin.window.state import Conditioning
from langchain_ctxwin.langgraph import WindowContext, load, merge_windows, open_window, save
from langchain_ctxwin.langgraph import reference as references
from store.wrappers import WrapperStore
from window.fake import FakeEngine

Picture = Callable[[int], Chunk]


class State(TypedDict, total=False):
    window: Annotated[dict[str, Any], merge_windows]
    frame: int


def runtime_of(engine: Any, told: list[Any] | None = None) -> Runtime[WindowContext]:
    writer = (lambda event: None) if told is None else told.append
    return Runtime(context=WindowContext(engine), stream_writer=writer)


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(k) is str and _plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def test_encodes_of_one_node_stand_in_the_answer_of_another(engine: Any, picture: Picture) -> None:
    with open_window(None, runtime_of(engine), system_prompt="hd") as window:
        window.extend([picture(1), picture(2)])
        reference = window.ref()
    with open_window(reference, runtime_of(engine)) as window:
        assert window.ask("q", max_tokens=2).usage.vision_encodes == 2
        assert window.ask("q", max_tokens=2).usage.vision_encodes == 0
        assert "encodes" not in window.ref()


def test_a_reference_is_plain_json_and_gives_the_same_window(engine: Any, picture: Picture, tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4, 3), 7, np.uint8)).save(tmp_path / "a.png")
    with Window(engine, "hd", budget=300, fidelity=Fidelity("patched", rank=2, layers="deep")) as window:
        window.append(Chunk.text("ä" * 20, label="hint", pin=True, priority=3))
        window.append(Chunk.image(tmp_path / "a.png", text="on disk"))
        window.append(Chunk.video([np.full((4, 4, 3), i, np.uint8) for i in range(3)], fps=2.0, text="clip"))
        ids = window.extend([picture(1), picture(2)])
        window.ask("q", max_tokens=3, remember=True)
        window.evict(ids[0])
        window.toggle(ids[1], conditioned=False)
        window.ask("q", max_tokens=3)
        reference = save(window, operations=7, notes={"a": [1, "b"]})
        state = window.snapshot()
    assert _plain(reference) and json.loads(json.dumps(reference)) == reference
    assert ormsgpack.unpackb(ormsgpack.packb(reference)) == reference
    with load(engine, reference) as same:
        assert same.snapshot() == state
        same.check()
    fresh = FakeEngine(engine.store)  # another process has decoded nothing yet
    with load(fresh, json.loads(json.dumps(reference))) as same:
        assert same.snapshot() == state


KINDS = ["append", "evict", "recall", "ask", "reorder", "toggle"]
OPERATIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 99)))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_any_window_comes_back(picture: Picture, operations: list[tuple[str, int]]) -> None:
    with FakeEngine() as engine, Window(engine, "hd", fidelity=Fidelity("patched", rank=2)) as window:
        references = []
        for name, n in operations:
            ids = window.ids
            if name == "append":
                window.append(picture(n % 7))
            elif name == "ask":
                window.ask("q", max_tokens=2, remember=bool(n % 2))
            elif name == "recall" and window.evicted:
                window.recall(window.evicted[n % len(window.evicted)])
            elif ids and name == "evict":
                window.evict(ids[n % len(ids)])
            elif ids and name == "reorder":
                window.reorder(sorted(ids, key=lambda i: hash((i, n))))
            elif ids and name == "toggle":
                window.toggle(ids[n % len(ids)], conditioned=bool(n % 2))
            references.append((save(window), window.snapshot()))
        other = FakeEngine(engine.store)
        for reference, state in references:
            with load(other, reference) as same:
                assert same.snapshot() == state


def long_window(engine: Any) -> Window:
    """Return a window of 80 chunks, half of them evicted, all conditioned."""
    window = Window(engine, "hd", fidelity=Fidelity("patched", rank=2))
    for first in range(0, 80, 20):
        window.extend([Chunk.text(f"{i}") for i in range(first, first + 20)])
        window.ask("q", 2)
    window.slide(40)
    return window


def test_entries_do_not_list_their_antecedents(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lists them does, once; and whoever reads them back knows their names."""
    with long_window(engine) as window:
        reference, state = save(window), window.snapshot()
    repo, names = engine.repo, set(engine.store.list("entry/"))
    assert len(names) == 80
    for key in names:
        assert repo.get_json(key, bound=False)["kv"].keys().isdisjoint({"antecedents"})
    listed = [
        repo.get_json(key, bound=False) for key in ("manifest/" + reference["manifest"], *engine.store.list("page/"))
    ]
    assert listed[0]["orders"] and all(len(each["orders"]) <= 1 <= len(each["runs"]) for each in listed), (
        "one order for all; a page of the first chunk alone, which nothing precedes, has none"
    )
    other = FakeEngine(engine.store)
    with load(other, reference) as same:
        assert same.snapshot() == state
        made: list[str] = []
        monkeypatch.setattr(references, "digest", lambda kind, *parts: made.append(kind) or digest(kind, *parts))
        assert save(same) == reference and set(made) == {"page", "manifest"}


def test_kv_without_antecedents_is_not_taken(engine: Any) -> None:
    with long_window(engine) as window:
        reference, state = save(window), window.snapshot()
    repo = engine.repo
    for key in [*engine.store.list("page/"), *engine.store.list("manifest/")]:
        listed = repo.get_json(key, bound=False)
        repo.put_json(key, listed | {"orders": "?"}, bound=False)
    with load(FakeEngine(engine.store), reference) as same:
        assert [p.replace(kv=None) for p in state.evicted] == [*same.snapshot().evicted]
        assert [p.replace(kv=None) for p in state.placed] == [*same.snapshot().placed]


def test_steps_of_new_processes_share_an_order(engine: Any) -> None:
    store, reference = engine.store, None
    for step in range(30):
        each = FakeEngine(store)
        with load(each, reference) if reference else Window(each, "hd") as window:
            window.append(Chunk.text(f"{step}"))
            window.ask("q", 2)
            window.slide(max(0, len(window.ids) - 8))
            reference = save(window)
    assert reference is not None
    listed = [engine.repo.get_json(key, bound=False) for key in store.list("page/")]
    assert max(len(each["names"]) for each in listed) > 8 and max(len(each["orders"]) for each in listed) <= 3
    with load(FakeEngine(store), reference) as window:
        window.check()
        assert len(window.evicted) == 22


class Weighing(WrapperStore):
    """Counts the bytes that are put beside KV, embeddings and sources."""

    weight = 0

    def put(self, key: str, value: bytes) -> bool:
        if key.startswith(("entry/", "page/", "manifest/", "journal/")):
            self.weight += len(value)
        return super().put(key, value)


def long_session(store: Weighing, steps: int) -> tuple[list[int], list[int], dict[str, Any]]:
    """A frame, an ask and a slide a step; bytes of each reference, and bytes each step wrote beside KV and media."""
    engine, reference = FakeEngine(store), None
    runtime = runtime_of(engine)
    operation = Runtime(
        context=runtime.context, execution_info=ExecutionInfo(checkpoint_id="c", checkpoint_ns="", task_id="t")
    )
    sizes, written = [], []
    for step in range(steps):
        before = store.weight
        # Answers are journaled, as they are in a graph.
        with open_window(
            reference, operation, system_prompt="hd", fidelity=Fidelity("patched", rank=2), name=str(step)
        ) as window:
            window.append(Chunk.image(np.full((4, 4, 3), step % 250, np.uint8), text=f"{step}"))
            window.ask("q", max_tokens=3, remember=True)
            window.slide(max(0, len(window.ids) - 10))
            reference = window.ref()
        sizes.append(len(ormsgpack.packb(reference)))
        written.append(store.weight - before)
    assert reference is not None
    return sizes, written, reference


def test_checkpoints_stay_small_and_a_step_writes_little() -> None:
    store = Weighing(open_store("memory:"))
    sizes, written, reference = long_session(store, 80)
    assert len(reference["placed"]) == 10 and reference["evicted"] == 150
    assert max(sizes) < 10_000 and sizes[-1] < 1.1 * sizes[20]
    # An evicted chunk takes about 700 bytes; writing all of them at every step would take 105 KB. Where a page ends is up to
    # the hashes of what it holds, so the last one, which is written anew at every step, has a length of chance.
    late, early = sum(written[60:]) / 20, sum(written[20:40]) / 20
    assert late < 20_000 and late < 2 * early
    with load(FakeEngine(store), reference) as window:
        window.check()
        assert len(window.evicted) == 150


def test_a_manifest_is_written_without_a_walk_of_what_it_lists(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Window(engine, "hd", fidelity=Fidelity("exact")) as window:
        window.extend([Chunk.text(f"{i}") for i in range(20)])
        window.ask("q", 2)
        window.slide(10)
        first = save(window)
        walked: list[Any] = []
        monkeypatch.setattr(Conditioning, "without_antecedents", lambda kv: walked.append(kv) or kv)
        assert save(window) == first and not walked
        assert window.snapshot().model_dump() and walked, "a snapshot's own JSON does walk"


def test_checkpoints_of_a_graph_stay_small(engine: Any, tmp_path: Path, picture: Picture) -> None:
    def look(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state.get("window"), runtime, system_prompt="You browse the web.") as window:
            window.append(picture(state["frame"]))
            window.slide(max(0, len(window.ids) - 10))
            return {"window": window.ref()}

    graph = StateGraph(State, context_schema=WindowContext)
    graph.add_node("look", look)
    graph.add_edge(START, "look")
    with sqlite3.connect(tmp_path / "threads.sqlite", check_same_thread=False) as connection:
        app = graph.compile(checkpointer=SqliteSaver(connection))
        for frame in range(60):
            state = app.invoke({"frame": frame}, {"configurable": {"thread_id": "t"}}, context=WindowContext(engine))
        assert (len(state["window"]["placed"]), state["window"]["evicted"]) == (10, 50)
        (largest,) = connection.execute("select max(length(checkpoint)) from checkpoints").fetchone()
        (written,) = connection.execute("select max(length(value)) from writes").fetchone()
    assert 1000 < largest < 10_000 and written < 10_000
    connection.close()


def test_a_page_ends_by_content() -> None:
    names = [f"{i * 2654435761 % 2**32:064x}" for i in range(1000)]
    pages = references._split_pages(names)
    assert [n for page in pages for n in page] == names and max(map(len, pages)) <= 128
    assert 10 < len(pages) < 100
    for changed in (names[1:], [*names, "f" * 64], names[:500] + names[501:]):
        fresh = [page for page in references._split_pages(changed) if page not in pages]
        assert len(fresh) <= 2


def test_a_lost_store_is_rebuilt_from_the_sources(picture: Picture, tmp_path: Path, oracle: Callable[..., str]) -> None:
    frames = []
    for i in range(3):
        Image.fromarray(np.full((4, 4, 3), 40 + i, np.uint8)).save(tmp_path / f"{i}.png")
        frames.append(Chunk.image(tmp_path / f"{i}.png", text=f"t={i}"))
    with (
        FakeEngine() as engine,
        open_window(None, runtime_of(engine), system_prompt="hd", fidelity=Fidelity("exact")) as window,
    ):
        ids = window.extend([*frames, Chunk.text("note", pin=True)])
        window.ask("what?", max_tokens=3)
        window.evict(ids[0])
        reference = window.ref()
    told: list[Any] = []
    with FakeEngine() as engine:  # an empty store
        with open_window(reference, runtime_of(engine, told), system_prompt="hd") as window:
            assert (window.lost, window.rebuilt) == (1, 3)
            assert told == [
                {"type": "window", "op": "lost", "window": window.id, "version": 2, "lost": 1, "rebuilt": 3}
            ]
            assert window.ids == tuple(ids[1:]) and window.evicted == ()
            assert window.plan().entries[-1].pinned
            answer = window.ask("what?", max_tokens=3)
            assert answer.text == oracle([*frames[1:], Chunk.text("note")], "what?")
            window.check()
            again = window.ref()
        with open_window(again, runtime_of(engine)) as window:
            assert (window.lost, window.rebuilt) == (0, 0)


def test_a_picture_from_memory_does_not_survive_a_lost_store(picture: Picture, oracle: Callable[..., str]) -> None:
    with FakeEngine() as engine, open_window(None, runtime_of(engine), system_prompt="hd") as window:
        ids = window.extend([Chunk.text("note"), picture(1)])
        reference = window.ref()
    with FakeEngine() as engine, open_window(reference, runtime_of(engine)) as window:
        with pytest.raises(ChunkUnavailable, match="neither pixels nor a source"):
            window.ask("what?", max_tokens=3)
        window.evict(ids[1])  # the way on
        assert window.ask("what?", max_tokens=3).text == oracle([Chunk.text("note")], "what?")


@pytest.mark.parametrize("namespace", ["entry/", "page/", "manifest/", "journal/", "span/"])
def test_any_part_of_the_store_may_be_gone(
    namespace: str, engine: Any, picture: Picture, oracle: Callable[..., str]
) -> None:
    with open_window(None, runtime_of(engine), system_prompt="hd", fidelity=Fidelity("exact")) as window:
        ids = window.extend([picture(i) for i in range(4)])
        window.ask("what?", max_tokens=3)
        window.evict(ids[1])
        reference = window.ref()
    for key in list(engine.store.list(namespace)):
        engine.store.delete(key)
    fresh = FakeEngine(engine.store)
    with open_window(reference, runtime_of(fresh)) as window:
        window.check()
        assert window.lost == (namespace in ("entry/", "page/", "manifest/"))
        assert window.ask("what?", max_tokens=3).text == oracle([picture(i) for i in (0, 2, 3)], "what?")
        again = window.ref()
    with open_window(again, runtime_of(FakeEngine(engine.store))) as window:
        assert (window.lost, window.rebuilt) == (0, 0)


def test_what_the_store_dropped_comes_back_as_steps_go_on(engine: Any, picture: Picture) -> None:
    runtime = runtime_of(engine)
    with open_window(None, runtime, system_prompt="hd") as window:
        window.extend([Chunk.text(f"n{i}") for i in range(100)])
        window.slide(90)
        reference = window.ref()
    for key in list(engine.store.list("entry/")):
        engine.store.delete(key)
    for _ in range(5):  # this process still knows them
        with open_window(reference, runtime) as window:
            window.append(picture(1))
            reference = window.ref()
    with open_window(reference, runtime_of(FakeEngine(engine.store))) as window:
        assert window.lost == 0 and len(window.evicted) == 90


def test_a_forgotten_chunk_leaves_the_store(engine: Any) -> None:
    with open_window(None, runtime_of(engine), system_prompt="hd") as window:
        secret, _ = window.extend([Chunk.text("secret"), Chunk.text("plain")])
        window.ask("what?", max_tokens=3)
        earlier = window.ref()
        window.evict(secret, forget=True)
        reference = window.ref()
    assert not any(b"secret" in engine.store.get(key) for key in engine.store.list("entry/"))
    with load(engine, reference) as window:
        assert secret not in (*window.ids, *window.evicted)
    # An older checkpoint still has the text of what it placed: checkpoints are the graph's.
    assert secret in load(engine, earlier).ids


def test_another_model_goes_on_with_the_same_store(engine: Any, picture: Picture, oracle: Callable[..., str]) -> None:
    with open_window(None, runtime_of(engine), system_prompt="hd", fidelity=Fidelity("exact")) as window:
        ids = window.extend([picture(i) for i in range(3)])
        window.ask("what?", max_tokens=3)
        window.evict(ids[0])
        reference = window.ref()
    other = FakeEngine(engine.store, name="other")
    with open_window(reference, runtime_of(other)) as window:
        assert window.lost == 0
        window.recall(ids[0])
        assert window.ask("what?", max_tokens=3).text == oracle([picture(i) for i in range(3)], "what?")


def test_a_store_on_disk(tmp_path: Path) -> None:
    *_, reference = long_session(Weighing(open_store(f"disk:{tmp_path}")), 20)
    with FakeEngine(open_store(f"disk:{tmp_path}")) as engine, load(engine, reference) as window:
        assert len(window.evicted) == reference["evicted"] == 30
