"""What a patch costs beside what engines differ by: what holds by definition."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ctxwin.evals.serving_gap import GAPS, GapSettings, measure, quantiles
from ctxwin.evals.serving_gap_cli import engines_table

if TYPE_CHECKING:
    from ctxwin.engines.hf import HFEngine


def test_an_engine_against_itself(engine: HFEngine) -> None:
    before = {*engine.store.list("span/"), *engine.store.list("patch/")}
    result = measure(engine, engine, GapSettings(n=3, rank=4))
    assert {*engine.store.list("span/"), *engine.store.list("patch/")} == before
    assert set(result["kl"]) == set(GAPS) == {"patch", "engines"}
    assert result["kl"]["engines"]["max"] < 1e-9 and result["kl"]["engines"]["changed"] == 0
    assert result["kl"]["patch"]["max"] > 1e-9 and result["lanes"]["patched"] > 0
    assert 0 < result["share"] < 1 and engines_table(json.loads(json.dumps(result))).row_count == 2
    # All of the deficit: nothing is lost, whatever the form.
    whole = measure(engine, engine, GapSettings(n=3, rank=10_000))
    assert whole["kl"]["patch"]["max"] < 1e-6


def test_quantiles() -> None:
    values = [float(i) for i in range(101)]
    found = quantiles(values)
    assert (found["median"], found["p95"], found["max"], found["n"]) == (50.0, 95.0, 100.0, 101)
    low, high = found["p95_interval"]
    assert 80 < low < 95 < high <= 100 and found["mean"] == pytest.approx(np.mean(values))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="rank must be >= 1"):
        GapSettings(rank=0)
    with pytest.raises(ValueError, match="layers must be all or deep"):
        GapSettings(layers="some")
