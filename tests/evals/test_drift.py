"""Drift along a stream, on a random model: what the short cuts of the measurement leave as it is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from ctxwin.chunk import Chunk
from ctxwin.engines.segments import Segment
from ctxwin.tiny.world import render
from evals.studies.drift import Asked, DriftSettings, _Stream, _summary, main, measure

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

SETTINGS = DriftSettings(streams=1, window=3, points=(1, 3, 5), questions=3)


def assert_same(some: list[Asked], others: list[Asked]) -> None:
    assert [replace(a, kl_window=0, kl_stream=0) for a in some] == [
        replace(a, kl_window=0, kl_stream=0) for a in others
    ]
    for one, other in zip(some, others, strict=True):
        assert one.kl_window == pytest.approx(other.kl_window, abs=1e-6)
        assert one.kl_stream == pytest.approx(other.kl_stream, abs=1e-6)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_what_stood_before_the_last_refresh_changes_nothing(engine: HFEngine, every: int) -> None:
    stream = _Stream(engine, replace(SETTINGS, refresh_every=every), 0)
    before, after = stream.ask_refreshed()
    whole_before, whole_after = stream.run(0, SETTINGS.points, every)
    assert len(before) == 9 and len(after) == 3 * sum(p % every == 0 for p in SETTINGS.points)
    assert_same(before, whole_before)
    assert_same(after, whole_after)
    assert all(a.kl_window < 1e-6 for a in after)  # just refreshed is re-prefilled


def test_a_window_that_is_never_refreshed_drifts(engine: HFEngine) -> None:
    stream = _Stream(engine, SETTINGS, 0)
    kept, refreshed = stream.ask_survivors(), stream.ask_refreshed()[0]
    assert max(a.kl_window for a in kept if a.slides == 5) > 1e-6
    first = [a for a in kept if a.slides == 1]
    assert_same(first, [a for a in refreshed if a.slides == 1])  # no refresh yet


def test_the_stream_reference_reads_what_was_seen_and_not_what_is_placed(engine: HFEngine) -> None:
    """As far back as the model was trained to read: with a reference of the window alone the study would measure nothing."""
    stream = _Stream(engine, SETTINGS, 0)
    seen = {slides: list(stream._read(slides)) for slides in (0, 1, 3, 5)}
    assert seen == {0: stream.frames[:3], 1: stream.frames[:4], 3: stream.frames[:6], 5: stream.frames[2:8]}
    _, of_window, of_stream = stream._reference(5)
    assert abs(of_window - of_stream).max() > 1e-3
    first, whole = stream._reference(0)[1:]
    assert abs(first - whole).max() < 1e-5  # nothing has left yet


def test_references_are_the_engine_s(engine: HFEngine) -> None:
    stream = _Stream(engine, SETTINGS, 0)
    questions, of_window, of_stream = stream._reference(5)
    assert len(questions) == 3
    system_prompt = engine.encode_system_prompt(SETTINGS.system_prompt)
    for frames, rows in ((stream.frames[5:8], of_window), (stream.frames[2:8], of_stream)):
        layout, start = [Segment(system_prompt, 0)], system_prompt.advance
        for frame in frames:
            encoded = engine.encode(Chunk.image(render(frame), keep_source=False))
            layout.append(Segment(encoded, start))
            start += encoded.advance
        for question, row in zip(questions, rows, strict=True):
            assert row == pytest.approx(engine.logits(layout, engine.encode_query(question.text)).numpy(), abs=1e-4)


def test_every_run_of_a_point_asks_the_same(engine: HFEngine) -> None:
    result = measure(engine, replace(SETTINGS, streams=2, points=(2,), refresh_every=2))["drift"]
    assert {name: list(points) for name, points in result.items()} == {
        "kept": ["2"], "refreshed": ["2"], "rested": ["2"],
    }  # fmt: skip
    assert {points["2"]["n"] for points in result.values()} == {6}
    assert len({points["2"]["window"]["reference_accuracy"] for points in result.values()}) == 1


def test_questions_about_one_stream_are_not_independent() -> None:
    asked = [Asked(s, 1, float(s), 0.0, s < 2, True, True, True) for s in range(4) for _ in range(25)]
    made = _summary(asked)
    assert made["accuracy"] == 0.5
    low, high = made["ci95"]
    assert low < 0.2 and high > 0.8  # four streams, not a hundred questions: Wilson's would be 0.40 to 0.60
    assert made["window"]["kl_ci95"][0] < 1.0 and made["window"]["kl_ci95"][1] > 2.0
    assert _summary(asked[:25])["window"]["kl_ci95"] is None


def test_drift_runs_on_the_window(engine: HFEngine) -> None:
    result = measure(engine, DriftSettings(streams=1, window=2, points=(1, 2, 3), questions=2, refresh_every=2))
    kept, refreshed, rested = (result["drift"][name] for name in ("kept", "refreshed", "rested"))
    assert set(kept) == set(refreshed) == {"1", "2", "3"}
    assert set(rested) == {"2"}
    assert kept["1"]["n"] == 2
    assert kept["2"] == refreshed["2"]  # nothing was refreshed yet
    assert 0 < kept["3"]["window"]["kl"] != refreshed["3"]["window"]["kl"] > 0
    assert rested["2"]["window"]["kl"] < 1e-9 < kept["2"]["window"]["kl"]  # everything is exact again
    assert rested["2"]["window"]["reference_accuracy"] == kept["2"]["window"]["reference_accuracy"]
    assert "last 6 frames" in result["note"]
    json.dumps(result)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--window", "6"], "window must be 2..5"),
        (["--slides", "0"], "slides must be"),
        (["--refresh-every", "0"], "refresh_every must be"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args: list[str], message: str) -> None:
    app = typer.Typer()
    app.command()(main)
    made = CliRunner().invoke(app, args)
    assert made.exit_code == 2
    assert message in made.stderr and "Traceback" not in made.stderr
