"""Toggles and the disposability tests: what holds by definition, on a random model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from ctxwin.chunk import Chunk
from ctxwin.evals.studies.toggles import (
    TESTS,
    TRUTHS,
    ToggleSettings,
    confusion,
    draw,
    main,
    measure,
    round_trip,
    toggles_tables,
)
from ctxwin.fidelity import Fidelity
from ctxwin.tiny.world import answer, render
from ctxwin.window.window import Window

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine


def test_a_chunk_in_front_of_the_answer_is_judged_and_as_often_as_not_it_decides() -> None:
    drawn = [draw(ToggleSettings(), i) for i in range(60)]
    decides = 0
    for item, asked, judge in drawn:
        question = item.questions[0]
        assert judge < asked == question.frame
        decides += judge in question.antecedents[-1:]
        without = answer([f for i, f in enumerate(item.frames) if i != judge], question.text)
        if judge not in question.antecedents:
            assert without == question.answer
    assert 12 < decides < 36  # of 40 that need context half, and where nothing else stands in front
    assert draw(ToggleSettings(), 7)[0] == draw(ToggleSettings(), 7)[0]


def test_a_toggle_comes_back_bit_for_bit_in_both_lanes(engine: HFEngine) -> None:
    before = {*engine.store.list("span/"), *engine.store.list("patch/")}
    result = measure(engine, ToggleSettings(n=3))
    assert {*engine.store.list("span/"), *engine.store.list("patch/")} == before  # contexts leave nothing behind
    assert set(result["toggles"]) == {"patched", "resident"}
    for trips in result["toggles"].values():
        assert {trips[name] for name in ("n", "clean_lane", "same_lane", "same_bytes", "identical")} == {3}
    assert set(result["disposability"]) == set(TESTS) == {"evict", "toggle", "clean"}
    for test in ("evict", "toggle", "clean"):
        assert {c["n"] for c in result["disposability"][test].values()} == {3}
        assert set(result["disposability"][test]) == set(TRUTHS)
    # What depended on the chunk is formed again: that is a re-prefill, and its verdict.
    assert result["disposability"]["clean"]["reprefill"]["right"]["share"] == 1.0
    cost = result["cost"]
    assert (
        cost["evict"]["tokens"] < cost["toggle"]["tokens"] and cost["evict"]["forwards"] == cost["evict"]["asks"] == 2
    )
    assert cost["clean"]["tokens"] <= cost["reprefill"]["tokens"]
    assert len(toggles_tables(json.loads(json.dumps(result)))) == 2


def test_a_round_trip_notices_a_chunk_that_comes_back_otherwise(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, asked, _ = draw(ToggleSettings(), 0)
    toggle = Window.toggle
    monkeypatch.setattr(Window, "toggle", lambda w, i, *, conditioned: toggle(w, i, conditioned=False))
    with Window(engine, "You watch a camera.", fidelity=Fidelity("patched")) as window:
        window.extend([Chunk.image(render(frame), keep_source=False) for frame in item.frames])
        window.ask(item.questions[0].text, 1)
        made = round_trip(engine, window, window.ids[asked], item.questions[0].text)
    assert made.clean_lane and not made.same_lane and not made.identical


def test_a_confusion_counts_verdicts_and_truths() -> None:
    made = confusion([(True, True)] * 4 + [(True, False)] * 3 + [(False, True)] * 2 + [(False, False)])
    assert made["dropped"] == {"disposable": 4, "needed": 3} and made["kept"] == {"disposable": 2, "needed": 1}
    assert made["right"]["share"] == 0.5
    assert made["wrongly_dropped"]["share"] == 0.75 and made["wrongly_kept"]["share"] == pytest.approx(1 / 3)
    low, high = made["wrongly_dropped"]["ci95"]
    assert 0 < low < 0.75 < high < 1
    assert confusion([(True, True)])["wrongly_dropped"] == {"share": None, "ci95": None}


@pytest.mark.parametrize(
    ("options", "told"), [({"n": 0}, "n must be >= 1"), ({"frames": (2,)}, "frames must be numbers from 3 to 6")]
)
def test_other_settings_are_refused(options: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ToggleSettings(**options)  # type: ignore[arg-type]


def test_the_command_refuses_in_one_line() -> None:
    app = typer.Typer()
    app.command()(main)
    made = CliRunner().invoke(app, ["--frames", "1,2"])
    assert made.exit_code == 2 and "frames must be numbers from 3 to 6" in made.output
