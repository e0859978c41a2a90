"""The auditor's thread: when it begins, gives way and ends, and what of its queue it replays."""

from __future__ import annotations

import threading
import time

import pytest

from audit.cameras import LONG, filled, question, stream
from ctxwin import Fidelity
from ctxwin.audit import Options, auditor_of
from ctxwin.engines.hf.engine import HFEngine


def test_an_audit_gives_way_and_comes_back(engine: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    auditor = auditor_of(engine, Options(share=1.0))
    frames = stream(3)
    window = filled(engine, Fidelity("blind", audit=1.0), frames)
    busy = threading.Event()
    begun = threading.Event()
    monkeypatch.setattr(HFEngine, "busy", property(lambda self: busy.is_set()))
    real = HFEngine.forced_logprobs

    def slow(self: HFEngine, *args: object, **options: object) -> object:
        if not begun.is_set():
            begun.set()
            busy.set()
        return real(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(HFEngine, "forced_logprobs", slow)
    answer = window.ask(question(frames), 4)
    assert begun.wait(LONG)
    until = time.monotonic() + LONG
    while not auditor.counts.stopped and time.monotonic() < until:
        time.sleep(0.01)
    assert auditor.counts.stopped == 1
    assert answer.audit is None
    busy.clear()
    assert auditor.drain(LONG)
    assert answer.audit is not None


def test_nothing_begins_between_requests_that_follow_each_other(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    auditor = auditor_of(engine, Options(share=1.0))
    frames = stream(2)
    window = filled(engine, Fidelity("blind", audit=1.0), frames)
    idle = [0.9 * auditor.options.quiet_s]
    monkeypatch.setattr(HFEngine, "idle_s", property(lambda self: idle[0]))
    answer = window.ask(question(frames), 2)
    assert not auditor.drain(0.1)
    assert auditor.counts.audits == auditor.counts.stopped == 0
    idle[0] = 1.1 * auditor.options.quiet_s
    assert auditor.drain(LONG)
    assert answer.audit is not None


def test_what_was_handed_over_before_something_was_forgotten_is_not_replayed(engine: HFEngine) -> None:
    auditor = auditor_of(engine, Options(share=1.0))
    frames = stream(3)
    window = filled(engine, Fidelity("blind", audit=1.0), frames)
    with auditor.hold():
        answer = window.ask(question(frames), 4)
        window.evict(window.ids[0], forget=True)
        before = set(engine.store.list(""))
    assert auditor.drain(LONG)
    assert answer.audit is None
    assert auditor.counts.gone == 1
    assert set(engine.store.list("")) <= before


def test_the_queue_is_bounded(engine: HFEngine) -> None:
    auditor = auditor_of(engine, Options(share=1.0, queue=2))
    frames = stream(2)
    window = filled(engine, Fidelity("blind", audit=1.0), frames)
    with auditor.hold():
        answers = [window.ask(question(frames), 2) for _ in range(5)]
    assert auditor.drain(LONG)
    assert [a.audit is not None for a in answers] == [False, False, False, True, True]
    assert auditor.counts.dropped == 3
