"""Planner and grounder on one engine: what sharing saves, and what a trace of them holds."""

from __future__ import annotations

from pathlib import Path

from ctxwin.tiny import world
from ctxwin.tiny.clip import write_clip
from ctxwin.trace import read_trace
from examples.agent_runs import check_figures, figures_of, run_example


def test_they_answer_like_a_re_prefill_and_share_every_encode() -> None:
    figures = figures_of("two_agents")
    check_figures(figures)
    assert figures["frames_placed"] == 60
    assert figures["vision_encodes"] == 30  # each frame once for both, look-backs included
    assert figures["encodes_saved_by_sharing"] == 30


def test_a_trace_shows_both_windows_and_what_others_would_have_computed(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    printed = run_example("two_agents", "--frames", "9", "--trace", str(trace))
    assert "scripted" in printed
    assert f"ctxwin view {trace}" in printed
    asks = [event for event in read_trace(trace).events if event["op"] == "ask"]
    assert len(asks) == 20  # two a second, and two for the look-back
    assert len({ask["window"] for ask in asks}) == 4  # the agents, and their branches
    assert all(set(ask["costs"]) == {"naive", "trim", "append"} and ask["truth"] for ask in asks)


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
