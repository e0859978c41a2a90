"""The study of removal patches formed ahead of slides, on the bundled model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ctxwin_evals.console import open_model
from evals.studies import released_texts
from evals.studies.released_texts import Texts
from evals.studies.removals import Reader, open_window, run, summarise

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
        context = Texts(engine, 0).contexts("text-3x40", 1)[0]
        contexts = [replace(context, chunks=context.chunks[:7])]
        rows = run(Reader(engine), contexts, ["keep", "removal:40"], steps.append)
        assert not list(engine.store.list("span/")), "a way finds no KV of another"
        with pytest.raises(ValueError, match="a way must be"):
            open_window(engine, "removal:full", 100)
    keep, removal = summarise(rows)
    assert keep["n"] == removal["n"] == len(contexts[0].chunks) - 4 and steps == [1, 1]
    assert keep["kl"] > 1e-4 and removal["kl"] < 0.05 * keep["kl"]
    assert keep["path"] == removal["path"] == 40 and removal["idle"] >= removal["used"] > 0 == keep["idle"]
