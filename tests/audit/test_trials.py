"""Trials on the bundled model: what they promote, reject and cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audit.cameras import LONG, SYSTEM, filled, question, stream
from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.audit import Options, auditor_of, records
from ctxwin.audit import auditor as auditing
from ctxwin.audit.evidence import BEHIND
from ctxwin.audit.record import Evidence
from ctxwin.engines.base import Engine
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.tiny.world import questions_for, render
from engines.models import write_text_model


def test_a_way_is_promoted_on_its_evidence_and_the_next_window_is_served_so(model: Path, engine: HFEngine) -> None:
    """With a wide budget, so that it takes a few windows: blind reuse of single frames, where it loses nothing."""
    auditor = auditor_of(engine, Options(budget=0.4, share=1.0, rate=1.0))
    windows = 0
    window = Window(engine, SYSTEM)
    while window.fidelity.mode == "exact" and windows < 60:
        frames = stream(1, windows)
        window = filled(engine, Fidelity(), frames)
        assert window.plan().exact
        for branch in (
            window,
            window.fork(),
            Window.restore(engine, window.fork().snapshot()),
        ):  # all of them are one unit
            branch.ask(question(frames, windows), 4)
            assert auditor.drain(LONG)
        windows += 1
    assert 20 <= windows < 40
    assert window.fidelity.mode == "blind"
    (record,) = records(str(model))
    assert record.strategies["blind"].promoted
    assert record.decisions[-1].trials == record.strategies["blind"].trials
    assert record.decisions[-1].units + BEHIND == windows
    assert Window(engine, SYSTEM).fidelity.mode == "blind"
    assert Window(engine, SYSTEM, fidelity=Fidelity("exact")).fidelity.mode == "exact"
    assert Window(engine, SYSTEM, fidelity=Fidelity(advanced={"forbid": ("canonical",)})).fidelity.mode == "exact"
    with open_engine(str(model), engine="hf", dtype="float32") as later:  # after a restart
        assert Window(later, SYSTEM).fidelity.mode == "blind"
    with open_engine(str(model), engine="hf", dtype="bfloat16") as other:  # another precision
        assert Window(other, SYSTEM).fidelity.mode == "exact"


def test_a_way_that_does_harm_is_not_promoted(engine: HFEngine) -> None:
    """Blind reuse of frames that bind; exact answers meanwhile."""
    auditor = auditor_of(engine, Options(share=1.0))
    for seed in range(12):
        frames = stream(4, seed)
        window = filled(engine, Fidelity(), frames)
        for q in questions_for(frames, 2, np.random.default_rng(seed), ("multi_hop",)):
            assert window.ask(q.text, 4).usage.exact
            assert auditor.drain(LONG)
    blind = [d for d in auditor.decisions(engine) if d.strategy == "blind"]
    assert blind
    assert {d.verdict for d in blind} == {"rejected"}
    assert window.fidelity.mode == "exact"


@pytest.mark.parametrize(("budget", "what"), [(0.2, "promoted"), (1e-7, "rejected")])
def test_a_clock_that_goes_on_is_a_trial_of_edits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float, what: str
) -> None:
    """Of text by a model of random weights; all windows are exact until the bound is met."""
    monkeypatch.setenv("CTXWIN_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setenv(auditing.VARIABLE, "1")
    write_text_model(tmp_path / "text")
    edits = Fidelity(advanced={"forbid": ("survivor", "orbit", "patched", "partial", "canonical")})

    def asked(engine: Engine, minute: int) -> Window:
        with Window(engine, f"the number is {minute} now", fidelity=edits) as window:
            window.extend([Chunk.text(f"the number {minute} is blue"), Chunk.text("the number 4 is red")])
            window.ask("what is the color of all these numbers?", 8)
            branch = window.fork(system_prompt=f"the number is {minute + 1} now")
        branch.ask("what is the color of all these numbers?", 8)
        return branch

    with open_engine(str(tmp_path / "text"), engine="hf", dtype="float32") as engine:
        auditor = auditor_of(engine, Options(excess_budget=budget, share=1.0, rate=1.0))
        decisions: list[str] = []
        for minute in range(60):
            with asked(engine, minute) as branch:
                assert branch.plan().exact
            assert auditor.drain(LONG)
            decisions = [d.verdict for d in auditor.decisions(engine) if d.strategy == "edited"]
            if decisions:
                break
        assert decisions == [what]
        with asked(engine, 70) as branch:
            assert branch.core.audits.in_force()[0] == ("edited" if what == "promoted" else None)
            served = branch.fork(system_prompt="the number is 72 now")
            assert {entry.lane for entry in served.chunks} == ({"edited"} if what == "promoted" else {"computed"})


@pytest.mark.parametrize(
    ("fidelity", "strategy", "lane"),
    [
        (Fidelity(), "blind", "canonical"),
        (Fidelity(advanced={"forbid": ("canonical",)}), "survivor", "survivor"),
        (Fidelity(survivors="refresh"), "blind", "canonical"),
        (Fidelity(survivors="removal", advanced={"forbid": ("canonical",)}), "patched", "formed"),
        (Fidelity(survivors="refresh", advanced={"forbid": ("canonical", "patched")}), None, "computed"),
    ],
)
def test_a_promoted_strategy_serves_no_lane_that_a_window_rules_out(
    engine: HFEngine, fidelity: Fidelity, strategy: str | None, lane: str
) -> None:
    """The cheapest of the others serves, so that a window is neither left exact nor remembers what left."""
    evidence = auditor_of(engine).evidence_of(engine)
    computed = {"blind": 10, "survivor": 50, "patched": 70}
    strategies = {name: Evidence(promoted=True, computed=count, exact_computed=100) for name, count in computed.items()}
    evidence._record = evidence.record.model_copy(update={"strategies": strategies})
    frames = stream(5)
    with Window(engine, SYSTEM, fidelity=fidelity) as window:
        for frame in frames:
            window.append(Chunk.image(render(frame)))
            window.ask(question(frames), 2)
        window.slide(1)
        assert window.core.audits.in_force()[0] == strategy
        assert {entry.lane for entry in window.plan().entries[1:]} == {lane}
        with window.fork() as branch:
            assert branch.core.audits.in_force() == window.core.audits.in_force()


def test_trials_compute_a_share_of_what_reuse_would_have_saved(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a window is followed from its first answer on, or not at all."""
    share = 0.5
    auditor = auditor_of(engine, Options(share=share, quiet_s=0.0))
    monkeypatch.setattr(auditor, "_allowed_s", lambda spent: 1.0)  # of time
    repeated, spent, by_window = 0, 0, list[list[bool]]()
    for seed in range(5):
        frames = stream(8, seed)
        window = Window(engine, SYSTEM)
        by_window.append([])
        for at, frame in enumerate(frames):
            window.append(Chunk.image(render(frame)))
            if at >= 3:
                window.slide(1)
            window.ask(question(frames[at - 1 : at + 1] if at else frames[:1]), 4)
            again = window.ids[:-1] if at >= 3 else ()  # each moved, so an exact window computes it again
            repeated += sum(window.snapshot().find(e).tokens for e in again)
            assert auditor.drain(LONG)
            by_window[-1].append(auditor.counts.tokens > spent)
            assert not by_window[-1][-1] or spent < share * repeated
            spent = auditor.counts.tokens
    assert not any(by_window[0]), "nothing had been saved yet"
    assert any(map(any, by_window[1:]))
    for followed in by_window:
        assert followed == sorted(followed, reverse=True), "a window that was given up was followed again"


def test_windows_that_compute_nothing_again_have_no_trials(engine: HFEngine) -> None:
    auditor = auditor_of(engine, Options(quiet_s=0.0))
    for seed in range(3):
        frames = stream(3, seed)
        window = Window(engine, SYSTEM)
        for frame in frames:
            window.append(Chunk.image(render(frame)))
            window.ask(question(frames, seed), 4)
            assert auditor.drain(LONG)
    assert auditor.counts.tokens == auditor.counts.trials == 0
