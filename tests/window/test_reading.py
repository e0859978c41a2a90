"""Stored KV is read several keys at a time, beside what is computed; what fails or is late is computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.cost import Fit
from ctxwin.kv.layout import SpanKV
from ctxwin.store.memory import MemoryStore
from ctxwin.store.spans import SpanRepository
from ctxwin.window import reading
from ctxwin.window.assembly import Assembly
from ctxwin.window.layout import Work
from window.fake import FakeEngine

TEXTS = ["a" * 30, "b" * 30, "c" * 30, "d" * 30]


class SlowStore(MemoryStore):
    """Reads of KV take a while, or whatever `read` does; the system prompt's, which all wait for, does not.

    ``most``: how many went on at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.going = self.most = 0
        self.slow = False
        self.read: Callable[[str], None] = lambda key: time.sleep(0.3)
        self._main = threading.get_ident()
        self._going = threading.Lock()

    def tier(self, key: str) -> str:
        return "SlowStore"

    def get(self, key: str) -> bytes | None:
        if self.slow and key.startswith(("span/", "patch/")) and threading.get_ident() != self._main:
            with self._going:
                self.going += 1
                self.most = max(self.most, self.going)
            try:
                self.read(key)
            finally:
                with self._going:
                    self.going -= 1
        return super().get(key)


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine(SlowStore())
    made.repo = SpanRepository(made.store, made.spec.identity, max_live_bytes=0)  # nothing is at hand
    return made


def store_of(engine: FakeEngine) -> SlowStore:
    assert isinstance(engine.store, SlowStore)
    return engine.store


def expensive(engine: FakeEngine) -> None:
    """Prices of a slow store and a slower engine: 400 ms a read, 40 ms a token; long beside what a busy machine stalls."""
    engine.costs.tiers["SlowStore"] = Fit((400.0, 0.0))
    engine.costs.engine = Fit((4.0, 40.0, 0.0, 0.002, 0.2, 0.004))


def test_keys_are_read_at_a_time(engine: FakeEngine) -> None:
    window = Window(engine, "hd", fidelity=Fidelity("exact"))
    window.extend([Chunk.text(text) for text in TEXTS])
    before = window.ask("q")
    store_of(engine).slow = True
    assert window.ask("q").token_ids == before.token_ids
    assert store_of(engine).most >= 4


def test_what_stands_in_front_is_computed_meanwhile(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks come back, two new ones stand in front of them: blind, so that what is held can serve behind them."""
    window = Window(engine, "hd", fidelity=Fidelity("patched", rank=64, survivors="keep"))
    window.extend([Chunk.text(text) for text in TEXTS[:2]])
    window.ask("q")
    first = window.insert(0, Chunk.text(TEXTS[2]))
    window.insert(1, Chunk.text(TEXTS[3]))
    lanes = [e.lane for e in window.plan().entries]
    assert lanes[:2] == ["computed", "computed"] and "computed" not in lanes[2:]
    with window.fork() as serial:
        want = serial.ask("q")
    needed = window.snapshot().keys()
    for key in [key for key in engine.store.list("span/") if key not in needed]:
        engine.store.delete(key)  # what the fork has computed
    expensive(engine)
    store, made, meanwhile = store_of(engine), engine._forward, list[int]()

    def forward(front: list[SpanKV], *rest: object) -> SpanKV:
        for _ in range(0 if any(meanwhile) else 200):  # on a busy machine the threads that read begin late
            time.sleep(0 if store.going else 0.01)
        meanwhile.append(store.going)
        return made(front, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "_forward", forward)
    store.slow = True
    got = window.ask("q")
    assert got.token_ids == want.token_ids and got.usage.computed_tokens >= want.usage.computed_tokens
    assert max(meanwhile) >= 1, "a forward ran while reads went on"
    assert window.chunks[0].id == first and [e.lane for e in window.chunks[:2]] == ["resident"] * 2
    kept = [p.kv.span for p in window.snapshot().placed[:2] if p.kv]
    assert all(engine.repo.contains(key) for key in kept), "what was computed ahead is stored as ever"


def test_what_was_computed_ahead_is_settled_by_whoever_runs_the_answer(engine: FakeEngine) -> None:
    """As behind plain chats, whose answers the server's own engine gives."""
    window = Window(engine, "hd", fidelity=Fidelity("patched", rank=64, survivors="keep"))
    window.extend([Chunk.text(text) for text in TEXTS[:2]])
    window.ask("q")
    window.insert(0, Chunk.text(TEXTS[2]))
    expensive(engine)
    store_of(engine).slow = True
    state, assembly, work = window.snapshot(), Assembly(engine), Work()
    laid = assembly.build_layout(state, window.fidelity, work)
    assert list(laid.ahead) == [1] and laid.segments[1].span is not None and work.tokens == 30
    settled = assembly.write_back(state, laid, {}, window.fidelity)
    assert all(p.kv is not None and assembly.has(p.kv.span) for p in settled.placed)


@pytest.mark.parametrize("how", ["fails", "is late"])
def test_a_read_that_brings_nothing_is_a_computation(
    engine: FakeEngine, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = Window(engine, "hd", fidelity=Fidelity("exact"))
    window.extend([Chunk.text(text) for text in TEXTS[:3]])
    before = window.ask("q")
    store, second = store_of(engine), window.snapshot().placed[1].kv
    assert second is not None
    held, end = second.span, threading.Event()

    def read(key: str) -> None:
        if key == held:
            if how == "fails":
                MemoryStore.delete(store, key)
            else:
                end.wait(30)

    take = reading.Reads.take

    def take_in_time(reads: reading.Reads, key: str, tokens: int, stored: Callable[[], Any]) -> Any:
        monkeypatch.setattr(reading, "PATIENCE_S", 0.05 if key == held else 30.0)  # on a busy machine all are late
        return take(reads, key, tokens, stored)

    monkeypatch.setattr(reading.Reads, "take", take_in_time)
    store.slow, store.read = True, read
    try:
        again = window.ask("q")
    finally:
        end.set()
    assert again.token_ids == before.token_ids and again.usage.exact
    assert again.usage.misses == 1 and again.usage.computed_tokens == before.usage.computed_tokens - 60 - 3
    store.slow = False
    assert window.ask("q").usage.misses == 0


def test_what_reads_raise_reaches_the_caller(engine: FakeEngine) -> None:
    window = Window(engine, "hd", fidelity=Fidelity("exact"))
    window.append(Chunk.text(TEXTS[0]))
    answer = window.ask("q")

    def read(key: str) -> None:
        raise MemoryError("no room to read")

    store_of(engine).slow, store_of(engine).read = True, read
    with pytest.raises(MemoryError):
        window.ask("q")
    store_of(engine).slow = False
    assert window.ask("q").token_ids == answer.token_ids


def test_equal_to_one_read_after_the_other(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random edits on a slow store against the same on a fast one, whatever was computed ahead."""
    generator = torch.Generator().manual_seed(3)
    fast = FakeEngine()
    windows = [Window(e, "hd", fidelity=Fidelity("patched", rank=64)) for e in (engine, fast)]
    store_of(engine).read = lambda key: time.sleep(0.002)
    expensive(engine)
    for window in windows:
        window.extend([Chunk.text(text) for text in TEXTS])
    for step in range(12):
        pick = int(torch.randint(0, 4, (1,), generator=generator))
        for window in windows:
            ids = [e.id for e in window.chunks]
            if step % 3 == 0:
                window.insert(pick % (len(ids) + 1), Chunk.text(f"new {step}" * 4))
            elif step % 3 == 1:
                window.evict(ids[pick % len(ids)])
            else:
                window.reorder([*ids[1:], ids[0]])
        store_of(engine).slow = True
        ours, theirs = (window.ask(f"q{step}") for window in windows)
        store_of(engine).slow = False
        assert ours.token_ids == theirs.token_ids
        assert ours.usage.computed_tokens == theirs.usage.computed_tokens
        assert [e.lane for e in windows[0].chunks] == [e.lane for e in windows[1].chunks]
