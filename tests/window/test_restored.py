"""Windows restored elsewhere, KV that the store lost, and leases."""

from __future__ import annotations

import gc
import json
import threading

import numpy as np
import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.errors import ChunkUnavailable, ReadOnlyWindow
from window.fake import FakeEngine


def lanes(window: Window) -> list[str]:
    return [e.lane for e in window.chunks]


def test_a_snapshot_is_small_json_and_restores_elsewhere(engine: FakeEngine, window: Window) -> None:
    window.slide(1)
    text = window.snapshot().model_dump_json()
    assert len(text) < 1000 * (len(window.ids) + len(window.evicted))
    for state in (window.snapshot(), json.loads(text), text):
        again = Window.restore(engine, state)
        again.check()
        assert again.ids == window.ids
        assert lanes(again) == lanes(window)
        assert again.ask("q").token_ids == window.ask("q").token_ids
    with pytest.raises(ValueError, match="format must be 2, got 3; use the ctxwin that"):
        Window.restore(engine, {**json.loads(text), "format": 3})


def test_restoring_on_another_model_encodes_again(engine: FakeEngine, window: Window) -> None:
    other = FakeEngine(engine.store, name="other")
    again = Window.restore(other, window.snapshot())
    again.check()
    assert lanes(again) == ["computed"] * 3
    assert again.ask("q").text
    assert other.counters.vision_encodes == 1


def test_a_mark_keeps_its_share_of_a_smaller_engine() -> None:
    for mark, restored in ((200, 50), (0.5, 50), ("auto", "auto"), (1, 1)):
        with Window(FakeEngine(max_tokens=400), "hd", low_water=mark) as window:
            window.extend([Chunk.text("a" * 20) for _ in range(6)])
            again = Window.restore(FakeEngine(max_tokens=100), window.snapshot())
            assert (again.budget, again.snapshot().low_water) == (100, restored)
            if mark == 200:
                again.slide()
                assert again.tokens <= 50
            again.close()


def test_lost_kv_is_recomputed_and_counted(engine: FakeEngine, window: Window) -> None:
    expected = window.ask("q", max_tokens=3).token_ids
    engine.repo.delete(window.snapshot().placed[1].kv.span)  # type: ignore[union-attr]
    assert lanes(window) == ["resident", "formed", "resident"]
    assert window.ask("q", max_tokens=3).token_ids == expected


def test_corrupt_kv_is_a_counted_miss(engine: FakeEngine, window: Window) -> None:
    expected = window.ask("q", max_tokens=3).token_ids
    key = window.snapshot().placed[1].kv.span  # type: ignore[union-attr]
    blob = engine.store.get(key) or b""
    engine.repo.delete(key)
    engine.store.put(key, blob[:-1])
    answer = window.ask("q", max_tokens=3)
    assert answer.token_ids == expected
    assert answer.usage.misses == 1


def test_lost_content_without_a_source_is_said_so() -> None:
    engine = FakeEngine()
    window = Window(engine, "hd", fidelity=Fidelity("exact"))
    window.append(Chunk.image(np.zeros((4, 4, 3), np.uint8), keep_source=False))
    window.ask("q")
    state = window.snapshot()
    for key in list(engine.store.list()):
        engine.repo.delete(key)
    again = Window.restore(engine, state)
    with pytest.raises(ChunkUnavailable):
        again.ask("q")
    assert again.snapshot() == state


def test_a_window_may_be_collected_while_the_store_is_locked(engine: FakeEngine) -> None:
    """The garbage collector runs finalizers anywhere, inside a call of the store in the same thread, too."""
    window = Window(engine, "hd")
    window.append(Chunk.text("aa"))
    window.ask("q")
    [key] = [k for k in window.core.leases.keys if k.startswith("span/")]
    done = threading.Event()

    def collect() -> None:
        nonlocal window
        with engine.store._lock:  # type: ignore[attr-defined]
            del window
            gc.collect()
        done.set()

    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(30), "its finalizer waits for a lock that its own thread holds"
    assert not engine.repo.leased(key)
    assert engine.store.stats().leased == 0


def test_leases_follow_the_window(engine: FakeEngine, window: Window) -> None:
    assert engine.store.stats().leased == 4
    branch = window.fork()  # three spans, and the pixels of the image
    assert engine.store.stats().leased == 4
    window.close()
    assert engine.store.stats().leased == 4
    branch.close()
    assert engine.store.stats().leased == 0
    with pytest.raises(ReadOnlyWindow, match="closed"):
        window.append(Chunk.text("x"))
