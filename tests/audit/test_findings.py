"""Audits on the bundled model: what they find is what an oracle finds, and what follows from it happens."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from audit.cameras import LONG, SYSTEM, filled, question, stream
from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.audit import Options, attach_audits, auditor_of, records
from ctxwin.audit.replay import Divergence, Replay, diverge, judge
from ctxwin.audit.sampling import Sampler
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.segments import Segment
from ctxwin.fidelity import Reference
from ctxwin.tiny.world import questions_for, render
from ctxwin.window.events import Event
from ctxwin.window.layout import Work
from engines.oracle import teacher_forced
from engines.tool_models import write_tool_model
from window.fake import FakeEngine


def test_an_audit_finds_what_an_oracle_finds(engine: HFEngine) -> None:
    """Against float64 KL over the whole vocabulary, along the answer that was given."""
    frames = stream(5, seed=3)
    window = filled(engine, Fidelity("blind", audit=1.0, advanced={"reference": "window"}), frames)
    query = questions_for(frames, 1, np.random.default_rng(0), ("multi_hop",))[0].text
    answer = window.ask(query, 4)
    assert answer.audit is None
    assert auditor_of(engine).drain(LONG)
    laid = window.core.assembly.build_layout(window.core.state, window.fidelity, Work())
    bare = [Segment(s.encoded, s.start) for s in laid.segments]
    asked = engine.encode_query(query)
    rows = [teacher_forced(engine, layout, asked, answer.token_ids).double() for layout in (bare, laid.segments)]
    # The end of the answer is a part of it, too.
    ends = [
        engine.forced_logprobs(layout, [(asked, answer.token_ids)], best=10_000)[0][-1]
        for layout in (bare, laid.segments)
    ]
    last = [torch.tensor([row[i] for i in sorted(row)], dtype=torch.float64) for row in ends]
    p, q = (torch.cat([a, b[None]]) for a, b in zip(rows, last, strict=True))
    want = float((p.exp() * (p - q)).sum(1).mean())
    assert answer.audit is not None
    assert want > 0.01
    assert answer.audit <= want + 1e-6
    assert answer.audit == pytest.approx(want, rel=0.05)
    window.close()


def test_an_exact_answer_is_a_re_prefill(engine: HFEngine) -> None:
    frames = stream(3)
    window = filled(engine, Fidelity("exact", audit=1.0), frames)
    answer = window.ask(question(frames), 4)
    auditor_of(engine).drain(LONG)
    assert answer.audit is not None
    assert answer.audit < 1e-6


def test_above_the_budget_the_chunks_concerned_fall_back_and_the_window_says_so(engine: HFEngine) -> None:
    frames = stream(5)
    window = filled(engine, Fidelity("blind", audit=1.0, kl_budget=1e-9), frames)
    told: list[Event] = []
    window.observe(told.append)
    query = question(frames)
    window.ask(query, 4)
    auditor_of(engine).drain(LONG)
    (audit,) = [event for event in told if event.op == "audit"]
    assert audit.ids == window.ids[1:]  # the first has nothing but the system prompt in front, and is exact
    assert audit.audit is not None
    assert audit.audit["window"] > 1e-9
    plan = window.plan()
    assert [e.exact_only for e in plan.entries] == [False, True, True, True, True]
    assert plan.exact
    assert "fell back to exact after an audit" in str(plan)
    again = window.ask(query, 4)
    assert again.usage.exact
    with filled(engine, Fidelity("exact"), frames) as exact:
        assert again.token_ids == exact.ask(query, 4).token_ids
    auditor_of(engine).drain(LONG)
    assert again.audit == pytest.approx(0, abs=1e-6)
    assert window.fork().plan().exact
    restored = Window.restore(engine, window.snapshot())
    assert [e.exact_only for e in restored.chunks][1:] == [True] * 4
    shortened = window.fork()
    shortened.evict(shortened.ids[-1])
    restored = Window.restore(engine, shortened.snapshot())
    restored.recall(restored.evicted[-1])
    assert restored.chunks[-1].exact_only
    adopted = filled(engine, Fidelity("blind", audit=1.0, kl_budget=1e-9), frames)
    with auditor_of(engine).hold():
        adopted.ask(query, 4)
        branch = adopted.fork()
        branch.ask("what is the color of all shapes?", 4)
        adopted.adopt(branch)
    auditor_of(engine).drain(LONG)
    for current in (adopted, adopted.at(adopted.version), Window.restore(engine, adopted.snapshot())):
        assert [e.exact_only for e in current.chunks][1:] == [True] * 4
    branch = window.fork()
    window.adopt(branch)
    branch.adopt(window, force=True)
    branch.append(Chunk.text("red"))
    assert not branch.plan().exact
    window.core.audits._fall_back({branch.ids[-1]})  # what is found on the one's answers counts for the other
    assert branch.plan().exact
    window.append(Chunk.image(render(frames[0])))
    assert not window.plan().entries[-1].exact  # what was not concerned is served as asked for


def test_what_is_found_on_answers_with_tools_counts_for_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks that fell back stay exact behind other tools, also those that the branch of the tools placed by itself."""
    monkeypatch.setenv("CTXWIN_PROFILES", str(tmp_path / "profiles"))
    tools = [{"name": name, "description": "d", "parameters": {"type": "object", "properties": {}}} for name in "fg"]
    with open_engine(f"hf:{write_tool_model(tmp_path / 'model')}", dtype="float32") as engine:
        window = Window(engine, "red", fidelity=Fidelity("blind", audit=1.0, kl_budget=1e-9))
        told: list[Event] = []
        window.observe(told.append)
        window.extend(
            [Chunk.text(f"frame {i} shows a red circle and a blue square, number {i * 7} ") for i in range(3)]
        )
        for count in (3, 4):
            answer = window.ask("what color", 4, tools=tools[:1])
            assert window.core.audits.due is answer
            assert auditor_of(engine).drain(LONG)
            assert answer.audit is not None
            assert not answer.usage.exact
            assert [e.exact_only for e in window.plan().entries] == [False, *[True] * (count - 1)]
            window.append(Chunk.text(f"frame {count} shows a green circle "))
        window.evict(window.ids[-1])
        assert [e.ids for e in told if e.op == "audit"] == [window.ids[1:3], window.ids[3:]]
        assert f"window {window.id}: an answer was" in caplog.text
        for given in (tools[1:], tools[:1], []):
            assert window.ask("what color", 4, tools=given).usage.exact


def test_the_first_of_several_answers_is_audited_too(engine: HFEngine) -> None:
    frames = stream(3)
    window = filled(engine, Fidelity("blind", audit=1.0), frames)
    answer = window.ask(question(frames), 2, n=2, temperature=1.0, seed=1)
    assert window.core.audits.due is answer
    assert auditor_of(engine).drain(LONG)
    assert answer.audit is not None
    assert answer.others[0].audit is not None


@pytest.mark.parametrize("place", [0, 1])
def test_rows_of_nan_are_no_agreement(place: int) -> None:
    rows = [[{1: -0.1, 2: -2.4}], [{1: -0.1, 2: -2.4}]]
    assert diverge(rows[0], rows[1], ended=True).kl == 0
    rows[place] = [{1: math.nan, 2: math.nan}]
    assert diverge(rows[0], rows[1], ended=True).nats >= 10


def test_without_a_budget_an_audit_reports_only(engine: HFEngine) -> None:
    frames = stream(3)
    window = filled(engine, Fidelity("blind", audit=1.0), frames)
    answer = window.ask(question(frames), 4)
    auditor_of(engine).drain(LONG)
    assert answer.audit is not None
    assert not window.plan().exact


def test_the_share_of_asks_that_is_asked_for_is_audited(engine: HFEngine) -> None:
    """Drawn at random, so that no rhythm of the asks escapes, from a generator that may be given a seed."""
    auditor = auditor_of(engine, Options(share=1.0, seed=5))
    frames = stream(2)
    window = filled(engine, Fidelity("exact", audit=0.25), frames)
    audited = []
    for _ in range(16):
        answer = window.ask(question(frames), 2)
        auditor.drain(LONG)
        audited.append(answer.audit is not None)
    same = Sampler(5)
    assert audited == [same.draw(0.25) for _ in range(16)]
    assert 2 <= sum(audited) <= 6


def test_a_survivor_is_held_against_both_references(engine: HFEngine) -> None:
    frames = stream(6)
    window = filled(engine, Fidelity("patched", audit=1.0), frames[:4])
    told: list[Event] = []
    window.observe(told.append)
    query = question(frames[2:4])
    window.ask(query, 4)
    window.slide(2)
    answer = window.ask(query, 4)
    assert "survivor" in {e.lane for e in window.chunks}
    auditor_of(engine).drain(LONG)
    found = [event.audit for event in told if event.op == "audit"][-1]
    assert found is not None
    assert answer.audit == max(found["window"], found["stream"])


def test_the_order_of_arrival_is_no_reference_for_chunks_in_another_order(engine: HFEngine) -> None:
    frames = stream(5)
    with filled(engine, Fidelity("exact"), frames) as window:
        assert (
            Replay(engine, lambda: False).reprefill_stream(window.core.state) is None
        )  # what is placed is all that was seen
        window.slide(2)
        assert Replay(engine, lambda: False).reprefill_stream(window.core.state) is not None
        window.reorder([*reversed(window.ids)])
        assert Replay(engine, lambda: False).reprefill_stream(window.core.state) is None


def test_a_replay_takes_nothing_over_that_another_strategy_does_not_see() -> None:
    fake = FakeEngine()
    with Window(fake, "h", fidelity=Fidelity("exact")) as window:
        window.extend([Chunk.text(text) for text in "abc"])
        window.ask("q", 1)
        replay, state = Replay(fake, lambda: False), window.snapshot()
        lanes = [
            [choice.compute for choice in replay.build_layout(state, window.fidelity, visible=visible).choices]
            for visible in (None, lambda key: False, None)
        ]
    assert lanes == [[False] * 3, [True] * 3, [False] * 3]


@pytest.mark.parametrize(
    ("reference", "placed", "seen", "kl"),
    [
        ("stricter", 0.0, 2.0, 2.0),
        ("stricter", 3.0, 2.0, 3.0),
        ("window", 0.0, 2.0, 0.0),
        ("stream", 0.0, 2.0, 2.0),
        ("nearer", 2.0, 0.0, 0.0),
        ("nearer", 3.0, 2.0, 2.0),
    ],
)
def test_which_reference_an_answer_is_measured_by(reference: Reference, placed: float, seen: float, kl: float) -> None:
    window, stream = (Divergence(far, far > 0) for far in (placed, seen))
    assert judge(window, stream, reference) == Divergence(kl, kl > 0)
    assert judge(window, None, reference) == window


def test_harm_is_a_lost_value(engine: HFEngine) -> None:
    """What the audit calls lost is another answer than exact serving gives, asked for itself."""
    outcomes = []
    for seed in range(12):
        frames = stream(4, seed)
        query = question(frames, seed)
        with filled(engine, Fidelity("exact"), frames) as exact:
            right = exact.ask(query, 4).text
        window = filled(engine, Fidelity("blind", audit=1.0), frames)
        told: list[Event] = []
        window.observe(told.append)
        answer = window.ask(query, 4)
        assert auditor_of(engine, Options(share=1.0)).drain(LONG)
        (found,) = [event.audit for event in told if event.op == "audit"]
        assert found is not None
        outcomes.append(answer.text != right)
        assert found["harm"] == outcomes[-1]
    assert True in outcomes and False in outcomes
    assert auditor_of(engine).counts.lost == sum(outcomes)
    assert auditor_of(engine).counts.texts == 0


def test_the_floor_of_the_engine_at_hand_is_measured_and_told(engine: HFEngine, model: Path) -> None:
    """In float32 two cuts of one prefill hardly differ; what is placed and what was seen do."""
    auditor = auditor_of(engine, Options(share=1.0, quiet_s=0.0))
    for seed in range(3):
        frames = stream(6, seed)
        with Window(engine, SYSTEM) as window:
            for at, frame in enumerate(frames):
                window.append(Chunk.image(render(frame)))
                if at >= 3:
                    window.slide(1)
                window.ask(question(frames[at - 1 : at + 1] if at else frames[:1]), 4)
                assert auditor.drain(LONG)
    (record,) = records(str(model))
    assert len(record.floor.cut.units) == 3 and record.floor.cut.mean < 1e-5
    assert record.floor.cut.disagreed == 0
    assert record.floor.references.units and record.floor.references.mean > 1e-3
    assert "by the cut of the prefill" in str(record.floor)


def test_what_asks_whether_a_chunk_matters_is_no_answer_to_anybody(engine: HFEngine) -> None:
    auditor = auditor_of(engine, Options(share=1.0))
    frames = stream(3)
    window = filled(engine, Fidelity("blind", audit=1.0), frames)
    window.disposable(window.ids[0], question(frames), 2)
    assert auditor.drain(LONG)
    assert auditor.counts.audits == 0


def test_audits_are_handed_to_an_engine(engine: HFEngine) -> None:
    frames, fidelity = stream(2), Fidelity("blind", audit=1.0)
    engine.auditing = None
    with filled(engine, Fidelity("auto"), frames) as window:
        assert window.fidelity.mode == "exact" and window.core.audits.in_force()[0] is None
        before = window.ask(question(frames), 2)
        with pytest.raises(ValueError, match=r"audit must be 0 on an engine without audits, got 1\.0; open it with"):
            Window(engine, SYSTEM, fidelity=fidelity)
        attach_audits(engine)
        with filled(engine, fidelity, frames) as audited, audited.fork() as branch:
            answers = [w.ask(question(frames), 2) for w in (audited, branch, window)]
        assert auditor_of(engine).drain(LONG)
    assert [a.audit is not None for a in (before, *answers)] == [False, True, True, False]


def test_options_say_what_they_must_be() -> None:
    with pytest.raises(ValueError, match="budget must be between 0 and 1, got 0"):
        Options(budget=0)
    with pytest.raises(ValueError, match=r"excess_budget must be between 0 and 0.25 nats, got 0.3"):
        Options(excess_budget=0.3)
    with pytest.raises(ValueError, match="questions must be an int >= 1, got 0"):
        Options(questions=0)
    with pytest.raises(ValueError, match="share must be from 0 to 1, got 2"):
        Options(share=2)
