"""What is drawn: the live table, the bars of lanes, the timeline."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from ctxwin.demo.agent import Step
from ctxwin.demo.figures import ENCODES, NAMES, final_tables, is_right, lane_bar, step_line, timeline
from ctxwin.demo.run import summarise
from ctxwin.fidelity import LANES as ALL_LANES
from ctxwin.progress import _Lines, stages
from ctxwin.view.palette import LANES

STEP: Step = dict(
    seed=0, index=0, op="slide", time=7.0, kind="multi_hop", query="color of <17>?", answer="red", truth="red",
    answer_reprefill="red", answer_blind="grey", kl=0.001, kl_blind=9.0, tokens_by_lane={"resident": 20, "survivor": 72},
    prompt_tokens=100, computed_tokens=80, background_tokens=0, computed_tokens_naive=440, computed_tokens_trim=150,
    computed_tokens_append=150, vision_encodes=1, vision_encodes_prefix_cache=1, vision_encodes_trim=1,
    vision_encodes_naive=1, vision_encodes_append=1, bytes_loaded=1, note="", ttft_s=0.02, ttft_reprefill_s=0.05,
    placed=[{"frame": i, "lane": lane, "tokens": 72} for i, lane in enumerate(["survivor", "patched", "computed"])],
)  # fmt: skip
SUMMARY = {**summarise([STEP]), "engine": "hf"}


def replace(step: Step, **changes: Any) -> Step:
    return {**step, **changes}


def test_every_lane_and_policy_has_a_colour_and_a_name() -> None:
    assert set(LANES) == set(ALL_LANES)
    assert len({colour for colour, _ in LANES.values()}) == len(LANES)
    assert {*NAMES, *ENCODES.values()} <= SUMMARY.keys()


def test_a_bar_shows_the_lanes_in_prompt_order() -> None:
    bar = lane_bar(STEP, width=24)
    assert len(bar) == 24
    assert [str(span.style) for span in bar.spans] == [LANES[p["lane"]][0] for p in STEP["placed"]]
    assert [span.end - span.start for span in bar.spans] == [8, 8, 8]


@pytest.mark.parametrize(("truth", "expected"), [("red", True), ("blue", False), (None, None)])
def test_right_needs_a_truth(truth: str | None, expected: bool | None) -> None:
    assert is_right(replace(STEP, truth=truth)) is expected


@pytest.mark.parametrize(("terminal", "width"), [(True, 160), (True, 80), (False, 80)])
def test_every_step_is_a_line(
    terminal: bool, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Lines, "EVERY", 0.0)
    monkeypatch.setattr(_Lines, "KEPT", 0.0)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, height=40, color_system=None)
    with stages(console) as tell:
        for i, step in enumerate([STEP, replace(STEP, truth=None, answer="[bold]", query="[/]")]):
            console.print(step_line(step, console), soft_wrap=True)
            tell("frames of [a file]", i + 1, 4)
    console.print(final_tables(SUMMARY))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for words in ("color of <17>?", "[bold]", "18.2 %", "computed    80 (naive 440, trim 150)"):
        assert words in text
    assert ("▊" in text) == (terminal and width == 160)
    assert ("2/4" in text) == ("frames of [a file]" in text) == terminal
    told = capsys.readouterr().err
    assert ("frames of [a file]: 2 of 4, about 0 s left" in told) == (not terminal)


def test_the_timeline_is_drawn_for_light_and_dark(tmp_path: Path) -> None:
    for name, dark in (("light.png", False), ("dark.png", True)):
        timeline(tmp_path / name, [STEP, replace(STEP, index=1)], dark=dark)
        pixels = np.asarray(Image.open(tmp_path / name).convert("L"))
        assert (pixels[0, 0] < 40) == dark
        assert pixels.min() < 40 and pixels.max() > 215  # letters stand out from what is behind them
