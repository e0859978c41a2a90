"""The study of removal patches formed ahead of slides, on the bundled model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ctxwin_evals.console import open_model
from evals.studies import command, released_texts, removals
from evals.studies.removals import Reader, open_window, run, streams_of, summarise

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

PROSE = "color of 07? red. shape of 31? square. number of blue circle? 4. left of 12? green. " * 80


def test_patches_of_full_rank_serve_what_a_re_prefill_gives_and_survivors_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(released_texts, "documentation", lambda short=False: iter([PROSE]))
    engine: HFEngine
    with open_model("tiny", "float32", "cpu", 1) as engine:
        steps: list[int] = []
        stream = streams_of(engine, "text-3x40", 1, 0)[0]
        rows = run(Reader(engine), [replace(stream, chunks=stream.chunks[:6])], ["keep", "removal:40"], steps.append)
        assert not list(engine.store.list("span/")), "a way finds no KV of another"
        with pytest.raises(ValueError, match="a way must be"):
            open_window(engine, "watch", "removal:full", 100)
    keep, removal = summarise(rows)
    assert keep["n"] == removal["n"] == keep["answers"] == 3 and steps == [1, 1]
    assert keep["kl"] > 1e-4 and removal["kl"] < 0.05 * keep["kl"]
    assert keep["path"] == removal["path"] == 40 and removal["idle"] >= removal["used"] > 0 == keep["idle"]


def test_answers_about_frames_are_a_re_prefills_with_removal_patches_and_survivors_remember(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(removals, "FRAMES", 9)
    engine: HFEngine
    with open_model("tiny", "float32", "cpu", 1) as engine:
        streams = streams_of(engine, "frames-3", 2, 3)
        rows = run(Reader(engine, command.SYSTEM_PROMPT), streams, ["keep", "removal"], lambda done: None)
    keep, removal = summarise(rows)
    assert keep["n"] == removal["n"] == 12 and keep["answers"] == removal["answers"] > 24
    assert keep["exact_right"] == removal["exact_right"] == removal["right"] == 1 and removal["changed"] == 0
    assert keep["right"] == 1 - keep["changed"] < 0.9
