"""Prefill of chats without an engine: what is sent when, and what never is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from ctxwin_chats import prefill
from ctxwin_chats.prediction import Prediction
from ctxwin_chats.prefill import Ahead, ChatPrefill


class Engine:
    """Is busy while told to be; computes a prediction in steps, and gives way between two of them."""

    def __init__(self) -> None:
        self.busy, self.sent, self.results = False, list[Prediction](), list[tuple[str, str]]()
        self.steps, self.seconds, self.fails = 3, 0.0, False
        self.slices = list[float]()

    def is_busy(self) -> bool:
        return self.busy

    def count(self, tenant: str, result: str) -> None:
        self.results.append((tenant, result))

    async def send(self, ahead: Ahead) -> None:
        self.sent.append(ahead.prediction)
        self.slices.append(ahead.slice_s)
        if self.fails:
            raise OSError("gone")
        ahead.prediction.seconds += self.seconds
        for _ in range(self.steps):
            await asyncio.sleep(0)
            if self.busy or ahead.prediction.cancelled:
                ahead.result = "interrupted"
                return
        ahead.result = "complete"


def prediction(size: int = 1) -> Prediction:
    return Prediction({"messages": []}, size, ("a",), 0)


def run(work: Callable[[Engine, ChatPrefill], Awaitable[None]]) -> Engine:
    async def body() -> Engine:
        engine = Engine()
        worker = ChatPrefill(engine.is_busy, engine.count)
        await asyncio.wait_for(work(engine, worker), 60)
        await worker.stop()
        return engine

    return asyncio.run(body())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_what_waits_is_sent_once_the_engine_idles() -> None:
    first, second = prediction(), prediction()

    async def work(engine: Engine, worker: ChatPrefill) -> None:
        engine.busy = True
        worker.submit("a", first, engine.send)
        worker.submit("b", second, engine.send)
        await asyncio.sleep(4 * prefill.QUIET_S)
        assert not engine.sent
        engine.busy = False
        await until(lambda: len(engine.results) == 2)

    engine = run(work)
    assert engine.results == [("a", "complete"), ("b", "complete")] and engine.sent == [
        first,
        second,
    ]  # the oldest first
    assert first.body == second.body == {}


def test_it_gives_way_and_goes_on_afterwards() -> None:
    async def work(engine: Engine, worker: ChatPrefill) -> None:
        engine.steps = 10**9
        worker.submit("a", prediction(), engine.send)
        await until(lambda: bool(engine.sent))
        engine.busy = True
        await until(lambda: bool(engine.results))
        assert engine.results == [("a", "interrupted")]
        engine.busy, engine.steps = False, 2
        await until(lambda: len(engine.results) == 2)

    assert run(work).results == [("a", "interrupted"), ("a", "complete")]


def test_slices_are_short_while_others_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the time since a request of another conversation, up to half a second."""
    clock = [100.0]
    monkeypatch.setattr(prefill, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def work(engine: Engine, worker: ChatPrefill) -> None:
        async def sent_again(seconds: float) -> None:
            await asyncio.sleep(0)  # the worker reads the clock first
            sent = len(engine.sent)
            engine.busy = False
            clock[0] += seconds
            await until(lambda: len(engine.sent) > sent)

        async def interrupted() -> None:
            results = len(engine.results)
            engine.busy = True
            await until(lambda: len(engine.results) > results)

        engine.steps = 10**9
        worker.submit("a", first := prediction(), engine.send)
        await sent_again(60.0)
        await interrupted()
        await sent_again(1.0)
        await interrupted()
        await sent_again(9.0)
        first.cancelled = True  # its own conversation goes on
        await until(lambda: len(engine.results) == 3)
        worker.submit("a", prediction(), engine.send)
        await sent_again(1.0)

    assert run(work).slices == pytest.approx([0.5, 0.2, 0.5, 0.5])
    long, short = Ahead(prediction(), 0.5), Ahead(prediction(), 0.0)
    assert [long.slice_tokens(pace) for pace in (0.0, 20.0, 300.0, 1000.0, 20_000.0)] == [0, 10, 150, 256, 1000]
    assert [short.slice_tokens(pace) for pace in (0.0, 300.0, 20_000.0)] == [0, 15, 1000]


def test_what_is_cancelled_refused_or_failed_is_not_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    cancelled, refused, failed = prediction(), prediction(), prediction()
    cancelled.cancelled = True

    async def refuse(ahead: Ahead) -> None:
        pass

    async def work(engine: Engine, worker: ChatPrefill) -> None:
        engine.fails = True
        worker.submit("a", cancelled, engine.send)
        worker.submit("a", refused, refuse)
        worker.submit("a", failed, engine.send)
        await until(lambda: len(engine.results) == 2)
        await asyncio.sleep(2 * prefill.QUIET_S)

    engine = run(work)
    assert engine.results == [("a", "refused")] * 2 and engine.sent == [failed]
    assert "was not computed ahead (gone)" in caplog.text


def test_a_tenant_that_has_spent_its_share_waits_and_a_hit_gives_it_back() -> None:
    async def work(engine: Engine, worker: ChatPrefill) -> None:
        engine.seconds = 1000.0
        first, second, other = prediction(), prediction(), prediction()
        worker.submit("a", first, engine.send)
        await until(lambda: len(engine.results) == 1)
        worker.submit("a", second, engine.send)
        worker.submit("b", other, engine.send)
        await until(lambda: len(engine.results) == 2)
        assert engine.sent == [first, other]
        worker.refund("a", first)
        await until(lambda: len(engine.results) == 3)
        assert engine.sent[-1] is second

    run(work)


def test_the_queue_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MOST_BYTES", 10)
    waiting = [prediction(4) for _ in range(3)]

    async def work(engine: Engine, worker: ChatPrefill) -> None:
        engine.busy = True
        for one in waiting:
            worker.submit("a", one, engine.send)
        assert not waiting[0].body and waiting[1].body
        worker.submit("a", large := prediction(11), engine.send)  # larger than the queue: the others wait on
        assert not large.body and waiting[1].body
        engine.busy = False
        await until(lambda: len(engine.results) == 2)

    assert {*run(work).sent} == {*waiting[1:]}


def test_nothing_runs_behind_its_end() -> None:
    async def work(engine: Engine, worker: ChatPrefill) -> None:
        engine.steps = 10**9
        worker.submit("a", prediction(), engine.send)
        worker.submit("a", prediction(), engine.send)
        await until(lambda: bool(engine.sent))
        await worker.stop()
        assert len(engine.sent) == 1

    run(work)
