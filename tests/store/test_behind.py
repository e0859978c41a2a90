"""Spans that are written behind: found at once, in the store when `flush` returns, with the leases that were taken meanwhile."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ctxwin.kv.layout import SpanKV
from ctxwin.store.disk import DiskStore
from ctxwin.store.memory import MemoryStore
from ctxwin.store.spans import SpanRepository
from ctxwin.store.tiered import TieredStore
from forks import refusals
from store.wrapped import FaultStore
from store.wrappers import WrapperStore

IDS = [1, 2, 3]
KEYS = st.sampled_from(["span/a", "span/b", "span/c"])


def span(number: int) -> SpanKV:
    k = torch.full((2, 3, 1, 4), float(number))
    return SpanKV(k, k + 0.5, torch.arange(3).repeat(3, 1), 0)


class GatedStore(WrapperStore):
    """A store whose next writes wait until they are let through."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.gate = threading.Semaphore(0)

    def put(self, key: str, value: bytes) -> bool:
        if key.startswith("span/"):
            self.gate.acquire()
        return super().put(key, value)


class Machine(RuleBasedStateMachine):
    """What a repository answers while writes are pending is what one that writes at once would answer."""

    def __init__(self) -> None:
        super().__init__()
        self.store = GatedStore()
        self.repo = SpanRepository(self.store, "engine", behind=True)
        self.numbers: dict[str, int] = {}
        self.leases: Counter[str] = Counter()
        self.puts = self.opened = 0

    def let_through(self) -> None:
        """Enough for all that were begun; writes that were deleted take none."""
        for _ in range(self.puts - self.opened):
            self.store.gate.release()
        self.opened = self.puts

    @rule(key=KEYS, number=st.integers(0, 99))
    def put(self, key: str, number: int) -> None:
        self.puts += 1
        assert self.repo.put_span(key, span(number), {"token_ids": IDS, "number": number})
        self.numbers[key] = number

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.let_through()  # one that is being written is waited for
        assert self.repo.delete(key) == (key in self.numbers)
        self.numbers.pop(key, None)
        self.leases.pop(key, None)

    @rule(key=KEYS)
    def lease(self, key: str) -> None:
        assert self.repo.lease(key) == (key in self.numbers)
        self.leases[key] += key in self.numbers

    @rule(key=KEYS)
    def release(self, key: str) -> None:
        if self.leases[key]:
            self.repo.release(key)
            self.leases[key] -= 1

    @rule()
    def let_one_through(self) -> None:
        if self.opened < self.puts:
            self.opened += 1
            self.store.gate.release()

    @rule()
    def flush(self) -> None:
        self.let_through()
        self.repo.flush()
        assert set(self.store.list()) == set(self.numbers)
        for key, number in self.numbers.items():
            stored = SpanRepository(self.store, "engine").get_span(key)
            assert stored is not None and stored[1]["number"] == number
        assert self.store.inner._tally.leased() == {key for key, count in self.leases.items() if count}

    @invariant()
    def every_span_is_found(self) -> None:
        for key in ("span/a", "span/b", "span/c"):
            number = self.numbers.get(key)
            found = self.repo.get_span(key, IDS)
            assert self.repo.contains(key) == (found is not None) == (number is not None)
            if found is not None:
                assert float(found[0].k[0, 0, 0, 0]) == number == found[1]["number"]
                assert self.repo.record_of(key)["number"] == number
            assert self.repo.leased(key) == bool(self.leases[key])

    def teardown(self) -> None:
        self.flush()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_it_goes_on_as_the_same_span() -> None:
    """So that its copies on a device go on as well."""
    repo = SpanRepository(MemoryStore(), "engine", behind=True)
    put = span(1)
    repo.put_span("span/a", put, {"token_ids": IDS})
    repo.flush()
    written, again = repo.get_span("span/a"), repo.get_span("span/a")
    assert written is not None and again is not None and written[0].blob is not None
    assert written[0].origin is again[0].origin is put.origin is not written[0].slice(0, 1).origin


def test_what_is_pending_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A put waits for earlier ones, not for a time, where they hold too much memory."""
    monkeypatch.setattr("ctxwin.store.spans._PENDING_BYTES", 2 * span(0).nbytes)
    store = GatedStore()
    repo = SpanRepository(store, "engine", behind=True)
    for number in range(2):
        repo.put_span(f"span/{number}", span(number), {"token_ids": IDS})
    third = threading.Thread(target=lambda: repo.put_span("span/2", span(2), {"token_ids": IDS}))
    third.start()
    assert third.is_alive() and not repo.contains("span/2")
    store.gate.release()
    third.join(60)
    assert not third.is_alive() and repo.contains("span/2")
    store.gate.release(2)
    repo.flush()
    assert sorted(store.list()) == ["span/0", "span/1", "span/2"]


def test_a_forked_process_leaves_what_is_pending_to_its_parent_and_writes_its_own() -> None:
    store = GatedStore()
    repo = SpanRepository(store, "engine", behind=True)
    tiered = TieredStore([MemoryStore(), MemoryStore()])
    repo.put_span("span/a", span(1), {"token_ids": IDS})
    tiered.prefetch(["b"])
    tiered._fetcher.submit(int).result()  # no lock is held

    def write_and_fetch() -> None:
        repo.flush()
        assert not store.contains("span/a")
        store.gate = threading.Semaphore(1)
        repo.put_span("span/b", span(2), {"token_ids": IDS})
        repo.flush()
        assert store.contains("span/b")
        tiered.tiers[1].put("b", b"below")
        tiered.prefetch(["b"])
        while not tiered.tiers[0].contains("b"):
            time.sleep(0.01)

    try:
        assert refusals([write_and_fetch]) == [""]
    finally:
        store.gate.release()
    repo.flush()
    assert store.contains("span/a")


def test_a_refused_or_failed_write_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    refusing = SpanRepository(FaultStore(MemoryStore(), refuse=1.0), "engine", behind=True)
    closed = MemoryStore()
    closing = SpanRepository(closed, "engine", behind=True)
    closed.close()
    for repo in (refusing, closing):
        assert repo.put_span("span/a", span(1), {"token_ids": IDS})
        repo.flush()
        assert repo.counters.refused == 1
    assert refusing.get_span("span/a") is None and not refusing.contains("span/a")
    assert "will be computed again: the store is closed" in caplog.text


def test_what_cannot_be_stored_is_refused_at_once() -> None:
    repo = SpanRepository(MemoryStore(), "engine", behind=True)
    with pytest.raises(ValueError, match="3 ids"):
        repo.put_span("span/a", span(1), {"token_ids": [1]})
    with pytest.raises(TypeError, match="JSON"):
        repo.put_span("span/a", span(1), {"token_ids": IDS, "set": {1}})
    assert not repo.contains("span/a")


def write_until_killed(folder: Path, out: int, seed: int) -> None:
    """Put, delete and flush spans, and write to ``out`` what is begun and what is done."""
    own, repo = random.Random(seed), SpanRepository(DiskStore(folder), "engine", behind=True)

    def say(*event: str | int) -> None:
        os.write(out, json.dumps(event).encode() + b"\n")

    while True:
        for _ in range(own.randrange(12)):
            key, number = f"span/{own.randrange(8)}", own.randrange(1000)
            if own.random() < 0.15:
                say("deleting", key)
                repo.delete(key)
                say("deleted", key)
            else:
                say("put", key, number)
                repo.put_span(key, long_span(number), {"token_ids": [*range(long_span(number).tokens)]})
        say("flushing")
        repo.flush()
        say("flushed")


def long_span(number: int) -> SpanKV:
    """Return a span of up to 60 KB that no other number has."""
    tokens = 1 + number * 7 % 120
    k = torch.randn(2, tokens, 2, 16, generator=torch.Generator().manual_seed(number))
    return SpanKV(k, k + 0.5, torch.arange(tokens).repeat(3, 1), 0)


@pytest.mark.parametrize("kills", [10, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.guard])])
def test_what_a_killed_process_had_flushed_is_there(tmp_path: Path, kills: int) -> None:
    """Whenever it is killed, also within a flush; of what it had not, all or nothing."""
    own, inside = random.Random(kills), 0
    stored: dict[str, set[int | None]] = {f"span/{i}": {None} for i in range(8)}
    for seed in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write_until_killed(tmp_path, writer, seed)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(7)  # only a failure ends it by itself
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            events = [json.loads(pipe.readline())]
            time.sleep(own.uniform(0, 0.06))
            os.kill(child, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), f"writer {seed} failed"
            events += map(json.loads, pipe)
        inside += events[-1] == ["flushing"]
        newest: dict[str, int | None] = {}
        for event, *named in events:
            if event in ("put", "deleting"):
                newest[named[0]] = named[1] if event == "put" else None
                stored[named[0]] |= {newest[named[0]]}
            elif event != "flushing":
                done = newest if event == "flushed" else named
                stored |= {key: {newest[key]} for key in done}
        with closing(DiskStore(tmp_path)) as store:
            repo = SpanRepository(store, "engine")
            for key, numbers in stored.items():
                found = repo.get_span(key)
                same = [n for n in numbers - {None} if found and torch.equal(found[0].k, long_span(n).k)]
                assert same if found else None in numbers, (seed, key, numbers)
                assert found is None or torch.equal(found[0].v, found[0].k + 0.5)
                stored[key] = {same[0] if found else None}
            assert store.stats().corrupt == 0
    assert inside
