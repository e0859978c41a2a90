"""What a window tells its observers: one event an operation, of its kind, and nothing where nothing took effect."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.errors import BudgetExceeded, EngineFailed, UnknownChunk, WindowBusy
from ctxwin.policies import ByToolCall
from ctxwin.window.events import Event, Op
from window.fake import FakeEngine


class Told:
    """Keeps the events; ``of`` gives those of one window."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, window: Window) -> list[Event]:
        return [e for e in self.events if e.window == window.id]


@pytest.fixture
def told(window: Window) -> Told:
    made = Told()
    window.observe(made)
    return made


def one(told: Told, window: Window, op: Op) -> Event:
    """The only event since the last call; it has the window's version and state, and names its ids as a tuple."""
    (event,) = told.of(window)
    told.events.clear()
    assert event.op == op
    assert (event.window, event.version, event.state) == (window.id, window.version, window.snapshot())
    assert isinstance(event.ids, tuple)
    assert event.parent is None
    assert event.seconds >= 0
    return event


def test_edits_tell_what_arrived_left_came_back_and_was_switched(window: Window, told: Told) -> None:
    a, b, c = window.ids
    d = window.append(Chunk.text("dd"))
    assert one(told, window, "append").ids == (d,)
    e, f = window.extend([Chunk.text("ee"), Chunk.text("ff")])
    assert one(told, window, "append").ids == (e, f)
    g = window.insert(0, Chunk.text("gg"))
    event = one(told, window, "insert")
    assert event.ids == (g,)
    assert event.state.placed[0].id == g
    window.evict(g)
    assert one(told, window, "evict").ids == (g,)
    assert window.slide(2) == [a, b]
    assert one(told, window, "slide").ids == (a, b)
    window.recall(b)
    assert one(told, window, "recall").ids == (b,)
    assert window.look_back(f"{g} and {a}") == [g, a]
    assert one(told, window, "look_back").ids == (g, a)
    window.evict(g, forget=True)
    assert one(told, window, "forget").ids == (g,)
    order = tuple(reversed(window.ids))
    window.reorder(order)
    assert one(told, window, "reorder").ids == order
    for conditioned, note in ((False, "clean"), (True, "conditioned")):
        window.toggle(c, conditioned=conditioned)
        event = one(told, window, "toggle")
        assert (event.ids, event.note) == ((c,), note)
    for pinned, note in ((True, "pinned"), (False, "free")):
        window.pin(c, pinned=pinned)
        event = one(told, window, "pin")
        assert (event.ids, event.note) == ((c,), note)
    window.maintenance.touch(d)
    assert one(told, window, "touch").ids == (d,)


def test_asking_tells_the_answer_and_how_each_chunk_was_served(window: Window, told: Told) -> None:
    a, b, c = window.ids
    window.slide(1)
    told.events.clear()
    lanes = {e.id: e.lane for e in window.chunks}
    answer = window.ask("what?", max_tokens=3)
    event = one(told, window, "ask")
    assert (event.query, event.answer, event.ids) == ("what?", answer, ())
    assert event.lanes == lanes == {b: "survivor", c: "survivor"}
    answer = window.ask("what?", max_tokens=3, remember=True)
    event = one(told, window, "ask")
    assert event.answer is answer
    assert event.ids == (answer.remembered,) == (window.ids[-1],)
    assert answer.remembered not in (event.lanes or {}), "it was not there to be served"
    exchange = window.remember("asked elsewhere", "yes")
    assert one(told, window, "append").ids == (exchange,)
    assert a in window.evicted


def test_streams_and_async_asks_tell_the_same(window: Window, told: Told) -> None:
    stream = window.stream("q", max_tokens=3)
    text = "".join(stream)
    event = one(told, window, "ask")
    assert event.answer is not None and event.answer.text == text
    answer = asyncio.run(window.aask("q", max_tokens=3))
    assert one(told, window, "ask").answer is answer

    async def streamed() -> str:
        return "".join([part async for part in window.astream("q", max_tokens=3)])

    assert asyncio.run(streamed()) == text
    one(told, window, "ask")


def test_a_stream_that_is_dropped_tells_nothing(engine: FakeEngine, window: Window, told: Told) -> None:
    engine.delay = 0.05
    for _ in window.stream("q", max_tokens=3):
        break
    engine.delay = 0.0
    assert told.events == []


def test_an_exchange_that_was_cancelled_too_late_is_told_to_be_forgotten(window: Window, told: Told) -> None:
    committed, goes_on = threading.Event(), threading.Event()

    def slow(event: Event) -> None:
        if event.op == "ask":
            committed.set()
            goes_on.wait(10)

    window.observe(slow)
    before = window.snapshot()

    async def cancelled() -> None:
        task = asyncio.ensure_future(window.aask("q", max_tokens=3, remember=True))
        while not committed.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert window.snapshot() == before
    assert [e.op for e in told.events] == ["ask", "forget"]
    assert told.events[0].ids == told.events[1].ids
    assert told.events[1].state == before


def test_idle_work_is_told_only_where_something_was_done(window: Window, told: Told) -> None:
    assert window.maintenance.refresh() == []
    assert told.events == []
    window.slide(1)
    told.events.clear()
    ids = window.maintenance.refresh()
    assert ids and one(told, window, "refresh").ids == tuple(ids)
    assert window.maintenance.prepare_orbit(window.ids[:1]) == [window.ids[1]]
    assert one(told, window, "prepare_orbit").ids == (window.ids[1],)
    window.append(Chunk.text("l" * 30))
    window.ask("q")
    told.events.clear()
    assert window.maintenance.compress() > 0
    one(told, window, "compress")
    assert window.maintenance.compress() == 0
    assert told.events == []


def test_nothing_is_told_where_nothing_changes(window: Window, told: Told) -> None:
    window.extend([])
    window.slide(0)
    window.slide()
    window.look_back("names nothing")
    window.reorder(window.ids)
    window.toggle(window.ids[0], conditioned=True)
    assert told.events == []


def test_forks_tell_the_same_observers_who_they_come_from(window: Window, told: Told) -> None:
    branch = window.fork()
    event = one(told, window, "fork")
    assert (event.other, event.note, event.ids) == (branch.id, "", ())
    deeper = branch.fork(system_prompt="other")
    (event,) = told.of(branch)
    assert (event.op, event.other, event.note, event.parent) == ("fork", deeper.id, "other", window.id)
    told.events.clear()
    new = deeper.append(Chunk.text("dd"))
    (event,) = told.events
    assert (event.window, event.parent, event.op, event.ids) == (deeper.id, branch.id, "append", (new,))
    assert event.state == deeper.snapshot()
    told.events.clear()
    branch.evict(branch.ids[0])
    told.events.clear()
    window.adopt(branch)
    event = one(told, window, "adopt")
    assert event.other == branch.id
    assert [p.id for p in event.state.placed] == list(branch.ids)
    assert len({window.id, branch.id, deeper.id}) == 3


def test_old_versions_tell_their_forks_and_asks(window: Window, told: Told) -> None:
    version = window.version
    window.evict(window.ids[0])
    told.events.clear()
    old = window.at(version)
    answer = old.ask("q", max_tokens=3)
    (event,) = told.events
    assert (event.op, event.version, event.window, event.answer) == ("ask", version, window.id, answer)
    branch = old.fork()
    assert [(e.op, e.version, e.other) for e in told.events[1:]] == [("fork", version, branch.id)]
    told.events.clear()
    branch.append(Chunk.text("dd"))
    (event,) = told.events
    assert event.parent == window.id


def test_closing_an_old_version_does_not_end_the_window(window: Window, told: Told) -> None:
    with window.at(window.version) as old:
        old.ask("q", max_tokens=3)
    assert [e.op for e in told.events] == ["ask"]


@pytest.mark.parametrize("clean", [False, True])
def test_disposable_is_told_once_beside_the_branches_it_asks(window: Window, told: Told, clean: bool) -> None:
    a = window.ids[0]
    result = window.disposable(a, "q", max_tokens=3, clean=clean)
    mine = told.of(window)
    assert [e.op for e in mine] == ["fork", "fork", "disposable"]
    event = mine[-1]
    assert (event.ids, event.query, event.answer) == ((a,), "q", None)
    assert event.note == ("disposable" if result.disposable else "needed")
    assert event.state == window.snapshot()
    asks = [e for e in told.events if e.op == "ask"]
    assert [e.answer.text for e in asks if e.answer] == [result.answer_with, result.answer_without]
    assert {e.window for e in asks} == {e.other for e in mine[:2]}
    assert all(e.parent == window.id for e in asks)


def test_merging_tells_the_slots(engine: FakeEngine) -> None:
    told = Told()
    with Window(engine, "header", fidelity=Fidelity("patched", merge=0.5)) as window:
        placed = window.append(Chunk.text("abcdefgh"))
        window.observe(told)
        assert window.maintenance.merge(placed) == 4
        event = one(told, window, "merge")
        assert (event.ids, event.note) == ((placed,), "4")


def test_closing_is_told_once(window: Window, told: Told) -> None:
    window.close()
    window.close()
    assert [e.op for e in told.events] == ["close"]


def test_every_kind_of_event_is_covered_here() -> None:
    covered = {
        "append", "insert", "evict", "forget", "slide", "recall", "look_back", "reorder", "toggle", "pin", "touch", "merge",
        "fork", "adopt", "undo", "ask", "audit", "disposable", "prepare_orbit", "refresh", "compress", "close",
    }  # fmt: skip
    assert set(get_args(Op)) == covered, "a new kind of event needs a test above"


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda w: w.append(Chunk.text("x" * 200)), BudgetExceeded),
        (lambda w: w.extend([Chunk.text("x"), Chunk.text("x" * 200)]), BudgetExceeded),
        (lambda w: w.insert(9, Chunk.text("x")), ValueError),
        (lambda w: w.evict("nope"), UnknownChunk),
        (lambda w: w.evict("nope", forget=True), UnknownChunk),
        (lambda w: w.slide(9), ValueError),
        (lambda w: w.slide(reserve_tokens=200), BudgetExceeded),
        (lambda w: w.recall("nope"), UnknownChunk),
        (lambda w: w.reorder([]), ValueError),
        (lambda w: w.toggle("nope", conditioned=False), UnknownChunk),
        (lambda w: w.pin("nope"), UnknownChunk),
        (lambda w: w.maintenance.touch("nope"), UnknownChunk),
        (lambda w: w.adopt(w), ValueError),
        (lambda w: w.ask("q" * 200), BudgetExceeded),
        (lambda w: w.remember("", "x"), ValueError),
        (lambda w: w.maintenance.prepare_orbit([]), ValueError),
    ],
)
def test_failed_operations_tell_nothing(
    window: Window, told: Told, act: Callable[[Window], object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        act(window)
    assert told.events == []


def test_a_look_back_that_fails_tells_nothing(window: Window, told: Told) -> None:
    (a,) = window.slide(1)
    told.events.clear()
    with pytest.raises(BudgetExceeded):
        window.look_back(a, reserve_tokens=97)
    assert told.events == []


def test_a_failing_engine_tells_nothing_and_the_next_event_is_its_own(
    engine: FakeEngine, window: Window, told: Told
) -> None:
    window.slide(1)
    told.events.clear()
    engine.fail = EngineFailed("out of memory")
    for failing in (
        lambda: window.ask("q"),
        lambda: window.maintenance.refresh(),
        lambda: window.ask("q", remember=True),
    ):
        with pytest.raises(EngineFailed):
            failing()
    with pytest.raises(EngineFailed):
        window.disposable(window.ids[0], "q")
    assert {e.op for e in told.of(window)} == {"fork"}, "the branch was made, nothing was answered"
    told.events.clear()
    engine.fail = None
    window.ask("q")
    one(told, window, "ask")


def test_an_observer_that_raises_changes_nothing(window: Window, caplog: pytest.LogCaptureFixture) -> None:
    before, after = Told(), Told()

    def broken(event: Event) -> None:
        raise RuntimeError("observer")

    window.observe(before)
    window.observe(broken)
    window.observe(after)
    with caplog.at_level(logging.ERROR, logger="ctxwin"):
        new = window.append(Chunk.text("dd"))
    assert window.ids[-1] == new
    assert [e.ids for e in before.events] == [e.ids for e in after.events] == [(new,)]
    assert f"an observer failed on append of window {window.id}" in caplog.text
    assert window.ask("q").text
    window.check()


def test_observers_run_after_the_writer_is_done(window: Window) -> None:
    """They may edit and ask the window they are told about, in the thread of the operation."""
    seen: list[tuple[Op, int, str]] = []

    def asking(event: Event) -> None:
        seen.append((event.op, threading.get_ident(), window.ids[-1]))
        if event.op == "append":
            window.ask("q", max_tokens=1)

    window.observe(asking)
    new = window.append(Chunk.text("dd"))
    assert seen == [(op, threading.get_ident(), new) for op in ("append", "ask")]


def test_unsubscribing(window: Window, told: Told) -> None:
    other = Told()
    stop = window.observe(other)
    branch = window.fork()
    window.append(Chunk.text("dd"))
    stop()
    stop()
    window.append(Chunk.text("ee"))
    assert [e.op for e in other.events] == ["fork", "append"]
    assert [e.op for e in told.events] == ["fork", "append", "append"], "others stay"
    other.events.clear()
    window.fork().append(Chunk.text("ff"))
    assert other.events == [], "later forks do not tell it"
    branch.append(Chunk.text("gg"))
    assert [e.op for e in other.events] == ["append"], "earlier ones do"


def test_a_method_observes_once_however_often_it_is_taken(window: Window) -> None:
    seen: list[Event] = []
    window.observe(seen.append)
    window.observe(seen.append)()
    window.append(Chunk.text("dd"))
    assert not seen


def test_an_observer_is_there_from_the_moment_it_subscribes(engine: FakeEngine) -> None:
    window = Window(engine, "h", retrieval=ByToolCall())
    branch = window.fork()
    told = Told()
    window.observe(told)
    branch.append(Chunk.text("a"))
    assert told.events == []


def test_a_refused_second_writer_tells_nothing(engine: FakeEngine, window: Window, told: Told) -> None:
    engine.delay = 0.2
    asking = threading.Thread(target=window.ask, args=("q",), kwargs={"max_tokens": 1})
    asking.start()
    refused = 0
    while asking.is_alive() and not refused:
        with suppress(WindowBusy):
            window.slide(0)  # changes nothing should it come first
            continue
        refused += 1
    asking.join()
    assert refused
    assert [e.op for e in told.events] == ["ask"]


def test_the_history_can_be_followed_from_the_events_alone(engine: FakeEngine) -> None:
    """What a recorder relies on: each event's state is the version after it, so nothing else need be asked."""

    def run() -> list[tuple[Any, ...]]:
        told = Told()
        with Window(engine, "h", budget=20, fidelity=Fidelity("patched")) as window:
            window.observe(told)
            for i in range(6):
                window.append(Chunk.text(str(i) * 4))
                window.slide(reserve_tokens=6)
                window.ask("q", max_tokens=1)
            window.look_back(window.evicted[0], reserve_tokens=6)
        return [(e.op, len(e.ids), len(e.state.placed), len(e.state.evicted)) for e in told.events]

    first = run()
    assert run() == first
    round_without_slide = [("append", 1), ("ask", 0)]
    round_with_slide = [("append", 1), ("slide", 1), ("ask", 0)]
    expected = round_without_slide * 3 + round_with_slide * 3 + [("look_back", 1), ("close", 0)]
    assert [event[:2] for event in first] == expected
    assert first[-2] == ("look_back", 1, 3, 3), "one came back, one made room"
