"""Planner and grounder on one engine: what sharing saves, and what a trace of them holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxwin.baselines.ledger import NAMES
from ctxwin.tiny import world
from ctxwin.tiny.clip import write_clip
from ctxwin.view.trace import read_trace
from examples.agent_runs import check_figures, figures_of, run_example
from twins import guard


@guard
def test_they_answer_like_a_re_prefill_and_share_every_encode(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    figures = figures_of("two_agents", "--trace", str(trace))
    check_figures(figures)
    assert figures["frames_placed"] == 60
    assert figures["vision_encodes"] == 30  # each frame once for both, look-backs included
    assert figures["encodes_saved_by_sharing"] == 30
    asks = [event for event in read_trace(trace).events if event["op"] == "ask"]
    assert len(asks) == figures["asks"] == 76  # two a second, and two for each of eight look-backs
    assert len({ask["window"] for ask in asks}) == 18  # the agents, and a branch of each for a look-back
    assert all(ask["truth"] for ask in asks)
    for policy in ("naive", "trim", "append"):
        assert sum(ask["costs"][NAMES[policy]] for ask in asks) == figures[f"computed_tokens_{policy}"]


@pytest.mark.slow
def test_a_video_is_talked_about_freely(tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    write_clip(clip, world.make_stream(3, 4))
    printed = run_example("two_agents", str(clip))
    heard = [line.partition("worth a closer look. ")[2].partition(" (")[0] for line in printed.splitlines()]
    heard = [answer for answer in heard if answer]
    assert len(heard) == 4
    for answer in heard:  # what the planner says is what the grounder is asked for
        assert f"is this: {answer}" in printed
    assert "scripted" not in printed
