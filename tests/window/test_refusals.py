"""Bad input: the documented error and the window unchanged. And defects that were found once, so that they stay mended."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ctxwin import Chunk, Fidelity, Library, Window, open_store
from ctxwin.errors import BudgetExceeded, EngineFailed, UnknownChunk, WindowBusy
from ctxwin.policies import LeastRecentlyRead, LowWater
from ctxwin.profiles import Profile, model_digest, write_profile
from window.fake import FakeEngine


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda w: w.evict("nope"), UnknownChunk, "must be a placed chunk, got 'nope'"),
        (lambda w: w.evict([w.ids[0]]), UnknownChunk, r"must be a placed chunk, got \['0-.*\]: pass one id, a str; "),
        (
            lambda w: w.evict(w.chunks[0]),
            UnknownChunk,
            r"got PlanEntry\(.{70}: pass one id, a str; this version places",
        ),
        (lambda w: w.recall("nope"), UnknownChunk, "must be an evicted chunk"),
        (lambda w: w.recall({w.ids[0]}), UnknownChunk, r"must be an evicted chunk, got \{'0-"),
        (lambda w: w.extend(Chunk.text("x")), TypeError, "chunks must be a list, got Chunk; pass a list, with a Chunk"),
        (lambda w: w.reorder(w.ids[0]), TypeError, "ids must be a list, got str; pass a list, with a placed id for"),
        (lambda w: w.recall(w.ids[0]), UnknownChunk, "placed already"),
        (lambda w: w.toggle("nope", conditioned=False), UnknownChunk, "placed chunk"),
        (lambda w: w.reorder(w.ids[:2]), ValueError, "must be a permutation"),
        (lambda w: w.reorder([*w.ids[:2], w.ids[0]]), ValueError, "must be a permutation"),
        (lambda w: w.reorder([*w.ids[:2], 1, None]), ValueError, r"must be a permutation .*, got \['0-"),
        (
            lambda w: w.reorder(None),
            TypeError,
            "ids must be a list, got NoneType; pass a list, with a placed id for each",
        ),
        (lambda w: w.extend(5), TypeError, "chunks must be a list, got int; pass a list, with a Chunk for each"),
        (lambda w: w.remember("q", 5), TypeError, "answer must be a list, got int; pass a list, with a token id"),
        (lambda w: w.remember(5, "a"), ValueError, "query and answer must be text .* got 5, 'a'"),
        (lambda w: w.insert(9, Chunk.text("x")), ValueError, "index must be an int in -3..3, got 9"),
        (lambda w: w.slide(4), ValueError, "at most the 3 unpinned"),
        (lambda w: w.slide(-1), ValueError, "int >= 0"),
        (lambda w: w.append("text"), TypeError, "must be a ctxwin.Chunk, got str"),
        (lambda w: w.append(Chunk.text("x" * 101)), BudgetExceeded, "must fit the budget of 100"),
        (lambda w: w.extend([Chunk.text("x"), Chunk.text("x" * 101)]), BudgetExceeded, "must fit the budget"),
        (lambda w: w.ask(""), ValueError, "query must be a non-empty str"),
        (lambda w: w.ask("caf\udce9"), ValueError, "query must be Unicode, got half of a surrogate pair"),
        (lambda w: w.fork("caf\udce9"), ValueError, "system_prompt must be Unicode, got"),
        (lambda w: w.ask("q" * 90), BudgetExceeded, "must fit the budget of 100"),
        (lambda w: w.ask("q", max_tokens=0), ValueError, "max_tokens must be an int >= 1"),
        (lambda w: w.ask("q", temperature=-1), ValueError, "temperature must be >= 0, got -1"),
        (lambda w: w.disposable("nope", "q"), UnknownChunk, "placed chunk"),
        (lambda w: w.maintenance.prepare_orbit(w.ids[:2], orders=0), ValueError, "orders must be"),
        (lambda w: w.retrieve("x", "manuals"), TypeError, r"must be a ctxwin.Library, got 'manuals'; open it with"),
        (lambda w: w.ask("q", libraries="manuals"), TypeError, "libraries must be a list, got str"),
        (
            lambda w: w.ask("q", libraries=["manuals"]),
            TypeError,
            "each of libraries must be a ctxwin.Library, got 'man",
        ),
        (lambda w: w.ask("q", json_schema=[1]), TypeError, "json_schema must be a dict or JSON text, got list"),
        (lambda w: w.slide(reserve_tokens=-5), ValueError, "reserve_tokens must be an int >= 0, got -5"),
        (lambda w: w.slide(to=0.5, reserve_tokens="9"), ValueError, "reserve_tokens must be an int >= 0, got '9'"),
        (lambda w: w.look_back(None), TypeError, "query must be a str or a Chunk, got NoneType"),
        (lambda w: w.adopt(w.snapshot()), TypeError, r"a window that fork\(\) returned, got State"),
        (lambda w: w.observe(None), TypeError, "observer must be callable, got None"),
        (lambda w: LowWater(0.5, "lru"), TypeError, r"eviction must be a policy .* got 'lru'"),
        (lambda w: Library("disk:./shelf", "manuals"), TypeError, r"pass open_store\('disk:./shelf'\)"),
        (lambda w: Window("tiny"), TypeError, "engine must be one that open_engine returns, got 'tiny'"),
        (lambda w: Window(w.engine, fidelity="exact"), TypeError, r"as Fidelity\('exact'\), got 'exact'"),
        (lambda w: Window(w.engine, eviction="lru"), TypeError, r"eviction must be a policy .* got 'lru'"),
        (lambda w: Window(w.engine, eviction=LeastRecentlyRead), TypeError, r"pass LeastRecentlyRead\(\)"),
        (lambda w: setattr(w, "eviction", "lru"), TypeError, r"eviction must be a policy .* got 'lru'"),
        (
            lambda w: setattr(w, "retrieval", None),
            TypeError,
            r"retrieval must be a policy .* got None, which has no choose",
        ),
        (lambda w: Window(w.engine, retrieval=LeastRecentlyRead()), TypeError, r"which has no choose\(\)"),
        (lambda w: Window.restore(w.engine, None), ValueError, "its dict or its JSON, got NoneType"),
        (lambda w: Window.restore(w.engine, {"format": 3, "panes": []}), ValueError, "use the ctxwin that wrote"),
        (lambda w: Window.restore(w.engine, '{"format": 3, "panes": []}'), ValueError, "format must be 2, got 3"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(
    window: Window, act: Any, error: type[Exception], message: str
) -> None:
    state = window.snapshot()
    with pytest.raises(error, match=message) as caught:
        act(window)
    assert "'" in str(caught.value) or "got" in str(caught.value) or "budget" in str(caught.value)
    assert window.snapshot() == state
    window.check()


def test_a_failing_engine_leaves_the_window_as_it_was(engine: FakeEngine, window: Window) -> None:
    window.append(Chunk.text("dd"))
    state = window.snapshot()
    engine.fail = EngineFailed("out of memory")
    with pytest.raises(EngineFailed):
        window.ask("q")
    assert window.snapshot() == state
    engine.fail = None
    assert window.ask("q").text


def test_budgets_of_the_window_itself(engine: FakeEngine) -> None:
    with pytest.raises(ValueError, match=r"budget must be an int in 1\.\.4096"):
        Window(engine, budget=5000)
    with pytest.raises(BudgetExceeded, match="must exceed the system prompt's 11 tokens"):
        Window(engine, "0123456789", budget=11)
    window = Window(engine, "h", budget=12)
    window.append(Chunk.text("aaaa", pin=True))
    window.append(Chunk.text("bbbb"))
    window.append(Chunk.text("cccc"))
    assert window.tokens > window.budget
    assert window.slide() == [window.evicted[0]]
    assert [e.pinned for e in window.chunks] == [True, False]
    window.pin(window.ids[1])
    window.append(Chunk.text("dddd", pin=True))
    with pytest.raises(BudgetExceeded, match="reserved tokens must fit"):
        window.slide()


def test_a_store_that_refuses_everything_costs_time_only() -> None:
    engine = FakeEngine(open_store("memory:", max_bytes=600))
    window, roomy = (Window(e, "hd", fidelity=Fidelity("exact")) for e in (engine, FakeEngine()))
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    for each in (window, roomy):
        each.extend([Chunk.text("aaaaaaaaaaaa"), Chunk.image(picture), Chunk.text("bbbbbbbbbbbb")])
    assert window.ask("q").text == window.ask("q").text == roomy.ask("q").text
    window.evict(window.ids[1], forget=True)
    assert engine.repo.get_source(Chunk.image(picture).media[0].content) is None


def test_forgetting_one_of_two_chunks_that_show_a_picture_keeps_the_other(engine: FakeEngine, window: Window) -> None:
    picture = np.full((4, 4, 3), 9, np.uint8)
    twin = window.append(Chunk.image(picture, text="later"))
    window.evict(window.ids[1], forget=True)
    for key in list(engine.store.list("span/")):
        engine.repo.delete(key)
    assert window.ask("q").text
    window.evict(twin, forget=True)
    assert not list(engine.store.list("source/"))
    assert not list(engine.store.list("embed/"))


def test_forgetting_leaves_no_kv_of_earlier_orders(engine: FakeEngine) -> None:
    window = Window(engine, "hd", fidelity=Fidelity("patched", rank=2))
    a, b, c = window.extend([Chunk.text("aa"), Chunk.text("secret"), Chunk.text("cc")])
    window.ask("q")
    window.reorder([b, c, a])
    window.ask("q")
    window.evict(b, forget=True)
    clean = FakeEngine()
    other = Window(clean, "hd", fidelity=Fidelity("patched", rank=2))
    other.extend([Chunk.text("aa"), Chunk.text("secret"), Chunk.text("cc")])
    other.ask("q")
    first = other.snapshot().placed[0].kv
    system_prompt = [
        k for k in clean.store.list("span/") if k not in {p.kv.span for p in other.snapshot().placed if p.kv}
    ]
    assert first is not None
    # Only the system prompt, and what stood in front of the secret, may be left.
    assert set(engine.store.list("span/")) <= {first.span, *system_prompt}
    assert window.ids == (c, a)


def test_a_restored_auto_window_keeps_its_profile(tmp_path: Any, engine: FakeEngine) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    profile = Profile(
        weights=model_digest(tmp_path), model="m", verdict="", finding="binds", n=1, date="", ctxwin="0",
        fidelity=Fidelity("patched", bytes_share=0.2, layers="deep"),
    )  # fmt: skip
    write_profile(profile, tmp_path)
    engine.spec = dataclasses.replace(engine.spec, model=str(tmp_path))
    window = Window(engine, "hd")
    again = Window.restore(engine, window.snapshot().model_dump_json())
    assert again.fidelity.bytes_share == window.fidelity.bytes_share == 0.2
    assert Window(engine, "hd", fidelity=Fidelity(rank=4)).fidelity.patch_rank == 4


def test_blind_costs_what_the_plan_says(engine: FakeEngine) -> None:
    window = Window(engine, "a long system prompt", fidelity=Fidelity("blind"))
    window.extend([Chunk.text("aa"), Chunk.text("bb"), Chunk.text("cc")])
    plan = window.plan()
    assert window.ask("q").usage.computed_tokens == plan.computed_tokens + 3


def test_a_dropped_stream_frees_the_window(engine: FakeEngine, window: Window) -> None:
    engine.delay = 0.05
    for _ in window.stream("q", max_tokens=3, remember=True):
        break
    assert len(window.ids) == 3
    window.append(Chunk.text("free"))


def test_the_refusal_of_a_second_stream_keeps_no_first_one_open(engine: FakeEngine, window: Window) -> None:
    """Without a search for garbage: what is refused refers to the frame that dropped the first one."""

    def ask_twice() -> None:
        first, second = window.stream("q", max_tokens=3), window.stream("r", max_tokens=3)
        next(first)
        next(second)

    engine.delay = 1.0  # the first must not end before the second, on a busy machine either
    gc.disable()
    try:
        with pytest.raises(WindowBusy) as refused:
            ask_twice()
        del refused
        window.append(Chunk.text("free"))
    finally:
        gc.enable()


def test_an_interrupted_stream_frees_the_window_also_where_its_traceback_is_kept(
    engine: FakeEngine, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.delay = 0.05
    stream = window.stream("q", max_tokens=3)
    monkeypatch.setattr(stream, "_items", SimpleNamespace(get=Mock(side_effect=KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    window.append(Chunk.text("free"))
    with window.stream("q", max_tokens=3) as other:
        next(other)
    window.append(Chunk.text("free"))


def test_a_process_that_ends_stops_its_open_stream() -> None:
    script = """
import sys, time
from ctxwin.window.stream import TokenStream

def answer(on_token, stopped):
    on_token(0, "a")
    while not stopped():
        time.sleep(0.01)
    print("stopped")

stream = TokenStream(answer)
next(stream)
sys.exit(3)
"""
    ended = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (3, "stopped\n")


def test_an_exact_window_is_not_compressed(engine: FakeEngine) -> None:
    window = Window(engine, "hd", fidelity=Fidelity("exact"))
    window.extend([Chunk.text("a" * 9), Chunk.text("b" * 30)])
    window.ask("q")
    assert window.maintenance.compress() == 0
    assert window.plan().computed_tokens == 0


def test_what_is_not_placed_is_not_remembered_as_unseen(window: Window) -> None:
    for _ in range(5):
        window.evict(window.insert(0, Chunk.text("x")), forget=True)
    assert all(not p.unseen for p in window.snapshot().placed)
    kept = window.insert(0, Chunk.text("y"))
    window.evict(kept)
    assert all(not p.unseen for p in window.snapshot().placed)
    window.recall(kept, 0)
    assert [p.unseen for p in window.snapshot().placed] == [(), (kept,), (kept,), (kept,)]


@pytest.mark.parametrize("options", [{"temperature": float("nan")}, {"logprobs": -7}, {"logprobs": "x"}])
def test_bad_options_are_refused(window: Window, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        window.ask("q", **options)


def test_a_generator_of_chunks_is_as_good_as_a_list(window: Window) -> None:
    assert len(window.extend(Chunk.text(t) for t in "xy")) == 2
    window.reorder(reversed(window.ids))


def test_an_evicted_chunk_can_be_forgotten_too(engine: FakeEngine, window: Window) -> None:
    a, b, c = window.ids
    window.slide(1)
    assert [e.lane for e in window.chunks] == ["survivor", "survivor"]
    window.evict(a, forget=True)
    assert window.evicted == ()
    assert [e.lane for e in window.chunks] == ["formed", "formed"]
    assert window.ask("q").usage.exact
    with pytest.raises(UnknownChunk):
        window.evict("nope", forget=True)
    assert window.ids == (b, c)
