"""`RemoteWindow` against a server on loopback: what `ctxwin.Window` does in process on the same engine."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import APIStatusError, OpenAI

from adapters.server.serving import Server
from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.errors import BudgetExceeded, ChunkUnavailable, ReadOnlyWindow, UnknownChunk, UnsupportedModel, WindowBusy
from ctxwin.tiny import world
from ctxwin.window.idle import prefiller_of
from ctxwin.window.maintenance import Maintenance
from ctxwin_client import RemoteWindow, chunk_part, upload
from ctxwin_client.errors import UnknownUpload, UnknownWindow
from ctxwin_client.window import RemoteMaintenance

FRAMES = world.make_stream(seed=5, n_frames=12)
CHUNKS = [Chunk.image(world.render(f), text=f"t={i} s") for i, f in enumerate(FRAMES)]
QUESTION = f"color of {FRAMES[2].marks[0]:02d}?"
TIMES = ("ttft_s", "total_s", "planned_s")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine("tiny:hf") as opened:
        yield opened


@pytest.fixture
def window(client: OpenAI) -> Iterator[RemoteWindow]:
    with RemoteWindow(client, system_prompt="You watch a camera.", budget=900) as made:
        yield made


def program(seed: int, window: Any) -> Iterator[Any]:
    """A random program; what it sees, with placement ids as ranks of their arrival."""
    draw = random.Random(seed)
    names: list[str] = []
    for _ in range(9):
        placed, evicted = list(window.ids), list(window.evicted)
        op = draw.choice(["append", "append", "insert", "slide", "evict", "recall", "reorder", "toggle", "ask", "fork"])
        if op == "append" or not placed:
            names.append(window.append(draw.choice(CHUNKS)))
        elif op == "insert":
            names.append(window.insert(draw.randrange(len(placed) + 1), draw.choice(CHUNKS)))
        elif op == "slide":
            window.slide(1)
        elif op == "evict":
            window.evict(draw.choice(placed))
        elif op == "recall" and evicted:
            yield window.recall(draw.choice(evicted))
        elif op == "reorder":
            window.reorder(draw.sample(placed, len(placed)))
        elif op == "toggle":
            window.toggle(draw.choice(placed), conditioned=draw.random() < 0.5)
        elif op == "fork":
            branch = window.fork()
            names.append(branch.append(draw.choice(CHUNKS)))
            window.adopt(branch)
            branch.close()
        answer = asdict(window.ask(QUESTION, 3, logprobs=5, remember=draw.random() < 0.2))
        usage = answer.pop("usage")
        # Uploads run the tower before a window is asked.
        yield {k: v for k, v in usage.items() if k not in (*TIMES, "vision_encodes", "bytes_loaded")}
        remembered = answer.pop("remembered")
        names += [remembered] if remembered else []
        yield answer
        yield [names.index(i) for i in window.ids], [names.index(i) for i in window.evicted]
        plan = window.plan()
        yield [(names.index(e.id), e.chunk_id, e.lane, e.tokens, e.start, e.exact, e.depth) for e in plan.entries]
        yield window.tokens, window.version, plan.salted, plan.computed_tokens
        window.check()


@pytest.mark.parametrize("seed", range(2))
def test_random_programs_see_what_the_same_program_sees_in_process(client: OpenAI, seed: int) -> None:
    # Engines of their own, so that neither finds in its store what the other one left.
    from adapters.server.serving import serving

    with (
        open_engine("tiny:hf") as engine,
        Window(engine, "You watch.", 4000) as local,
        serving() as other,
        RemoteWindow(other.client(max_retries=0), "You watch.", 4000) as remote,
    ):
        here, there = list(program(seed, local)), list(program(seed, remote))
    assert len(here) == len(there) > 20
    assert here == there


def test_it_has_the_methods_of_a_window() -> None:
    public = {name for name, _ in inspect.getmembers(Window) if not name.startswith("_")}
    # The engine, policies, old versions, observers, tokens as they come and whence a fork came stay in process.
    assert public - {*dir(RemoteWindow), *RemoteWindow.__annotations__} == {
        "at",
        "engine",
        "eviction",
        "observe",
        "parent",
        "retrieval",
        "answer",
        "from_core",
    }
    for name in (
        "append",
        "insert",
        "evict",
        "slide",
        "recall",
        "retrieve",
        "reorder",
        "toggle",
        "fork",
        "adopt",
        "disposable",
    ):
        ours, theirs = (inspect.signature(getattr(w, name)).parameters for w in (Window, RemoteWindow))
        assert list(ours) == list(theirs), name


def test_its_maintenance_has_the_methods_of_a_windows() -> None:
    ours, theirs = (
        {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_")}
        for kind in (Maintenance, RemoteMaintenance)
    )
    assert ours.keys() == theirs.keys()
    for name, method in theirs.items():
        if isinstance(ours[name], property):
            assert isinstance(method, property), name
        else:
            assert list(inspect.signature(method).parameters) == list(inspect.signature(ours[name]).parameters), name


@pytest.mark.parametrize("name", ["dependents", "touch", "prepare_orbit", "refresh", "compress", "merge", "prefill"])
def test_names_of_maintenance_say_where_they_have_gone(window: RemoteWindow, name: str) -> None:
    assert not hasattr(window, name)
    with pytest.raises(AttributeError, match=rf"RemoteWindow\.maintenance\.{name}$"):
        getattr(window, name)
    with pytest.raises(AttributeError, match=r"^'RemoteWindow' object has no attribute 'mergee'$"):
        getattr(window, "mergee")  # noqa: B009


@pytest.mark.parametrize("mark", [0.5, 300])
def test_a_low_water_mark_is_the_windows(client: OpenAI, engine: Engine, mark: float) -> None:
    sizes: dict[str, list[int]] = {"remote": [], "local": []}
    with (
        RemoteWindow(client, "You watch a camera.", 600, low_water=mark) as remote,
        Window(engine, "You watch a camera.", 600, low_water=mark) as local,
    ):
        for made, name in ((remote, "remote"), (local, "local")):
            for chunk in CHUNKS:
                made.append(chunk)
                made.slide(reserve_tokens=32)
                sizes[name].append(len(made.ids))
            ids, cheapest = made.ids, made.evicted[-1]
            assert made.slide(to=0.25) == list(ids[: -len(made.ids)])
            made.recall(cheapest, "cheapest")
            sizes[name].append(made.ids.index(cheapest))
    assert sizes["remote"] == sizes["local"] and min(sizes["local"][8:12]) < max(sizes["local"])
    with pytest.raises((ValueError, APIStatusError), match="low_water"):
        RemoteWindow(client, low_water=1.5)


def test_lazy_edits_wait_for_the_next_slide(window: RemoteWindow) -> None:
    first, second, third = window.extend(CHUNKS[:3])
    with pytest.raises(TypeError, match="chunks must be a list, got int; pass a list, with a Chunk for each"):
        window.extend(5)  # type: ignore[arg-type]
    window.evict(second, lazy=True)
    window.toggle(third, conditioned=False, lazy=True)
    late = window.insert(0, CHUNKS[3], lazy=True)
    assert window.ids == (first, second, third, late) and window.pending == (second, third, late)
    assert all(p.conditioned for p in window.snapshot().placed)
    window.slide(1)
    assert window.ids == (third, late), "its place was in front of the first, which has left"
    assert not window.snapshot().find(third).conditioned


def test_a_window_has_its_next_ask_computed_ahead(client: OpenAI, server: Server) -> None:
    with RemoteWindow(client, "You watch a camera.", 600, Fidelity("exact"), prefill="idle") as remote:
        remote.extend(CHUNKS[:3])
        assert prefiller_of(server.engines[""]).drain(120)
        usage = remote.ask(QUESTION).usage
        assert usage.prefilled_tokens == remote.tokens and usage.missed_tokens == 0
        with server.service.tenant_state("").windows.using(remote.id) as local:
            counts = local.maintenance.prefill_counts
        assert remote.maintenance.prefill_counts == counts and counts.used == remote.tokens
    with RemoteWindow(client, "You watch a camera.") as other:
        assert other.maintenance.prefill_counts is None
    with pytest.raises((ValueError, APIStatusError), match="prefill"):
        RemoteWindow(client, prefill="busy")  # type: ignore[arg-type]


def test_a_chunk_is_uploaded_once(client: OpenAI, server: Server, window: RemoteWindow) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    chunk = Chunk.image(pixels, text="new", label="first")
    before = server.engines[""].counters.vision_encodes
    first, second = window.append(chunk), window.append(Chunk.image(pixels, text="new", label="again", pin=True))
    assert server.engines[""].counters.vision_encodes == before + 1
    assert first != second and window.chunk(first).id == chunk.id == window.chunk(second).id
    assert window.chunk(second).label == "again" and [e.pinned for e in window.chunks] == [False, True]
    assert upload(client, chunk) == chunk.id


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chunk.text("a note"),
        lambda: Chunk.tokens([5, 6, 7]),
        lambda: Chunk.image(world.render(FRAMES[0])),
        lambda: Chunk.video([world.render(f) for f in FRAMES[:4]], fps=4.0, text="clip"),
        lambda: Chunk.video([world.render(f) for f in FRAMES[:2]], as_frames=True),
        lambda: Chunk.message("user", ["look", {"type": "image", "image": world.render(FRAMES[1])}, "there"]),
        lambda: Chunk.message("assistant", "fine"),
    ],
)
def test_every_kind_of_chunk_arrives_as_it_is(window: RemoteWindow, engine: Engine, make: Callable[[], Chunk]) -> None:
    chunk = make()
    try:
        tokens = engine.encode(chunk).tokens
    except ValueError as refused:  # not every template has every turn: refused here, refused there
        with pytest.raises(type(refused)):
            window.append(chunk)
        return
    placed = window.append(chunk)
    assert window.chunk(placed).id == chunk.id
    assert window.chunks[0].tokens == tokens


def test_a_chunk_from_a_file_leaves_its_path_here(tmp_path: Path, client: OpenAI, window: RemoteWindow) -> None:
    from PIL import Image

    Image.fromarray(world.render(FRAMES[3])).save(tmp_path / "frame.png")
    chunk = Chunk.image(tmp_path / "frame.png")
    assert chunk.source is not None
    placed = window.append(chunk)
    assert window.chunk(placed).source is None and window.chunk(placed).id == chunk.id


def test_content_that_the_server_lost_is_sent_again(client: OpenAI, server: Server, window: RemoteWindow) -> None:
    window.append(CHUNKS[7])
    server.service.tenant_state("").uploads.delete(CHUNKS[7].id)
    assert window.chunk(window.append(CHUNKS[7])).id == CHUNKS[7].id
    with pytest.raises(ChunkUnavailable, match="pixels"):
        window.append(Chunk.image(np.full((30, 30, 3), 7, np.uint8)).light())


def test_errors_are_those_of_a_window(client: OpenAI, window: RemoteWindow) -> None:
    first = window.append(CHUNKS[0])
    with pytest.raises(UnknownChunk, match="nobody"):
        window.evict("nobody")
    with pytest.raises(ValueError, match="permutation"):
        window.reorder([first, first])
    with pytest.raises(ValueError, match="temperature"):
        window.ask("x", 2, temperature=-1.0)
    with pytest.raises(ValueError, match="streem"):
        window.ask("x", 2, streem=True)
    with pytest.raises(BudgetExceeded) as full:
        window.ask(QUESTION, 2000)
    assert full.value.needed > full.value.budget == 900
    with pytest.raises(BudgetExceeded):
        RemoteWindow(client, system_prompt="far too long " * 40, budget=20)
    with pytest.raises(UnknownWindow):
        RemoteWindow.attach(client, "0" * 12)
    with pytest.raises(TypeError, match="Chunk"):
        window.append("text")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel, match="takes no sound yet"):
        window.append(Chunk.audio(np.zeros(1600, np.float32), 16000))
    window.close()
    window.close()
    with pytest.raises(ReadOnlyWindow):
        window.ask(QUESTION, 2)
    assert window.id not in repr(client)


def test_an_error_that_is_not_ours_stays_the_official_clients(client: OpenAI, window: RemoteWindow) -> None:
    with pytest.raises(APIStatusError) as found:
        window._post("dance")
    assert found.value.status_code == 404


def test_a_second_writer_is_refused_at_once(client: OpenAI, server: Server, window: RemoteWindow) -> None:
    window.append(CHUNKS[0])
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with server.service.tenant_state("").windows.using(window.id) as held, held.core.writing():
            entered.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(10)
    try:
        with pytest.raises(WindowBusy):  # also by a client that would retry conflicts
            RemoteWindow.attach(server.client(max_retries=2), window.id).ask(QUESTION, 2)
    finally:
        leave.set()
        holder.join()
    assert window.ask(QUESTION, 2).text


def test_a_fork_is_handed_to_another_agent_and_back(client: OpenAI, server: Server, engine: Engine) -> None:
    other, shown, setting = server.client(), CHUNKS[:3], ("You watch a camera.", 900, Fidelity("exact"))

    def answered(chunks: list[Chunk]) -> str:
        with Window(engine, *setting) as fresh:
            fresh.extend(chunks)
            return fresh.ask(QUESTION, 4).text

    with RemoteWindow(client, *setting) as mine:
        mine.extend(shown)
        for i in range(3, 7):
            fork, edited = mine.fork(), [*shown[1:], CHUNKS[i]]
            with RemoteWindow.attach(other, fork.id) as theirs:
                theirs.evict(theirs.ids[0])
                theirs.append(CHUNKS[i])
                assert fork.ids == theirs.ids and theirs.ask(QUESTION, 4).text == answered(edited)
                assert mine.ask(QUESTION, 4).text == answered(shown)
                if i % 2:
                    mine.adopt(theirs)
                    shown = edited
                else:
                    mine.append(CHUNKS[0])
                    shown = [*shown, CHUNKS[0]]
                    with pytest.raises(ValueError, match="must not have moved since the fork"):
                        mine.adopt(theirs)
                assert mine.ask(QUESTION, 4).text == answered(shown)
            with pytest.raises(UnknownWindow):
                fork.append(CHUNKS[i])


def test_streaming(window: RemoteWindow) -> None:
    window.extend(CHUNKS[:3])
    whole = window.ask(QUESTION, 6)
    stream = window.stream(QUESTION, 6)
    assert stream.answer is None
    assert "".join(stream) == whole.text
    assert stream.answer is not None and stream.answer.token_ids == whole.token_ids
    with pytest.raises(BudgetExceeded):
        window.stream(QUESTION, 2000)


def test_a_stream_that_is_closed_leaves_the_window_as_it_was(
    window: RemoteWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Window.answer

    def held(*args: Any, on_token: Any, stopped: Any, **options: Any) -> Any:
        """Goes on behind its first token only when the client has left, however fast the model is."""

        def told(token: int, text: str) -> Any:
            wanted = on_token(token, text)
            while not stopped():
                time.sleep(0.01)
            return wanted

        return ask(*args, on_token=told, stopped=stopped, **options)

    monkeypatch.setattr(Window, "answer", held)
    window.extend(CHUNKS[:3])
    before = window.version, window.ids
    stream = window.stream(QUESTION, 400, remember=True, temperature=2.0, seed=1)
    next(stream)
    stream.close()
    window.maintenance.touch(window.ids[0])  # waits for the writer
    assert (window.version - 1, window.ids) == before
    monkeypatch.undo()
    for seed in range(10):
        for _ in window.stream(QUESTION, 400, temperature=2.0, seed=seed):
            break
        assert window.ask(QUESTION, 1).text


def test_async_asks_stream_and_cancel(client: OpenAI, window: RemoteWindow, monkeypatch: pytest.MonkeyPatch) -> None:
    window.extend(CHUNKS[:3])
    ask, asked = Window.answer, threading.Event()

    def endless(*args: Any, stopped: Any, **options: Any) -> Any:
        asked.set()
        while not stopped():  # the server hears that the client has left
            time.sleep(0.01)
        return ask(*args, stopped=stopped, **options)

    expected = window.ask(QUESTION, 4)

    async def use() -> None:
        answer = await window.aask(QUESTION, 4)
        assert answer.token_ids == expected.token_ids
        assert "".join([text async for text in window.astream(QUESTION, 4)]) == expected.text
        with pytest.raises(BudgetExceeded):
            await window.aask(QUESTION, 2000)
        monkeypatch.setattr(Window, "answer", endless)
        task = asyncio.ensure_future(window.aask(QUESTION, 400, remember=True, temperature=2.0, seed=1))
        assert await asyncio.to_thread(asked.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = window.ids
    asyncio.run(use())
    window.maintenance.touch(window.ids[0])
    assert window.ids == before


def test_snapshots_and_attaching(client: OpenAI, engine: Engine, window: RemoteWindow) -> None:
    ids = window.extend(CHUNKS[:3])
    window.evict(ids[0])
    answer = window.ask(QUESTION, 3)
    state = window.snapshot()
    with RemoteWindow.restore(client, state) as same:
        assert same.ids == window.ids and same.evicted == window.evicted and same.id != window.id
        assert same.ask(QUESTION, 3).text == answer.text
    attached = RemoteWindow.attach(client, window.id)
    assert attached.system_prompt == window.system_prompt and attached.budget == 900
    assert attached.append(CHUNKS[5]) in window.ids
    assert window.fidelity == Fidelity(**window.fidelity.model_dump())


def test_what_is_disposable(client: OpenAI, engine: Engine) -> None:
    """Of no other test, so that both compute it in the same cuts: in others bfloat16 rounds differently on some processors."""
    system_prompt = "You watch a camera that nobody else does."
    with Window(engine, system_prompt, budget=900) as local, RemoteWindow(client, system_prompt, budget=900) as remote:
        expected, found = (w.disposable(w.extend(CHUNKS[:3])[2], QUESTION, 3) for w in (local, remote))
    assert found.kl == pytest.approx(expected.kl, rel=1e-4)
    assert dataclasses.replace(found, kl=expected.kl) == expected


def test_maintenance_is_done_on_the_server(window: RemoteWindow) -> None:
    first, second = window.extend([Chunk.text("a first note"), Chunk.text("a second one")])
    assert window.maintenance.prefill() == [first, second]
    assert window.maintenance.dependents(first) == (second,)
    assert window.maintenance.refresh() == [] and window.maintenance.compress(if_short=True) == 0
    window.maintenance.touch(first)
    window.maintenance.check()
    assert window.snapshot().find(first).reads > window.snapshot().find(second).reads
    plan = window.maintenance.plan_orbit([first, second])
    assert plan["forwards"] >= 2
    with pytest.raises(BudgetExceeded, match="token_limit must be at least"):
        window.maintenance.prepare_orbit([first, second], token_limit=plan["tokens"] - 1)
    assert window.maintenance.prepare_orbit([first, second], token_limit=plan["tokens"]) == [first, second]
    with pytest.raises(ValueError, match="allow merged KV"):
        window.maintenance.merge(first, 0.5)
    with pytest.raises(UnknownChunk):
        window.maintenance.touch("nobody")


def test_pending_edits_and_evicted_chunks_are_as_in_process(engine: Engine, client: OpenAI) -> None:
    def states(window: Any) -> Iterator[Any]:
        ids = window.extend(CHUNKS[:5])
        window.evict(ids[1], lazy=True)
        window.toggle(ids[3], conditioned=False, lazy=True)
        yield [ids.index(i) for i in window.pending], [ids.index(i) for i in window.ids]
        yield [ids.index(i) for i in window.maintenance.apply_pending()]
        yield window.pending, window.maintenance.apply_pending(), [ids.index(i) for i in window.ids]
        window.evict(ids[0])
        window.evict(ids[4])
        for most in (5, 2, 0):
            window.maintenance.forget_beyond(most)
            yield [ids.index(i) for i in window.evicted], window.version
        window.check()

    exact = Fidelity("exact")
    with Window(engine, "You watch.", 900, exact) as local, RemoteWindow(client, "You watch.", 900, exact) as remote:
        here, there = list(states(local)), list(states(remote))
    assert here == there and here[0][0] == [1, 3] and here[-1][0] == []


def test_unknown_chunks_in_a_chat_are_not_found(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": [chunk_part("0" * 64), {"type": "text", "text": "what?"}]}]
    with pytest.raises(APIStatusError) as found:
        client.chat.completions.create(model="tiny", messages=messages)
    assert found.value.status_code == 404 and found.value.code == "unknown_upload"
    with pytest.raises(UnknownUpload):
        from ctxwin_client.transport import get

        get(client, "/chunks/" + "0" * 64)


def test_importing_the_adapter_loads_no_engine() -> None:
    code = (
        "import sys, ctxwin_client as a; a.RemoteWindow; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'vllm', 'transformers', 'fastapi')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
