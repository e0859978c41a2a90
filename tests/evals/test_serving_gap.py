"""What a patch costs beside what engines differ by: what holds by definition."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ctxwin.evals.studies.serving_gap import ENGINES, GapSettings, _ranks, draw_gap, engines_table, measure, quantiles

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine


def test_an_engine_against_itself(engine: HFEngine) -> None:
    before = {*engine.store.list("span/"), *engine.store.list("patch/")}
    result = measure(engine, engine, GapSettings(n=3, ranks=(4, 10_000)))
    after = {*engine.store.list("span/"), *engine.store.list("patch/")}
    assert after <= before  # nothing is left; what others left may have had to make room
    some, whole, engines = result["kl"]["rank 4"], result["kl"]["rank 10000"], result["kl"][ENGINES]
    assert engines["max"] < 1e-9 and engines["changed"] == 0 and "share" not in engines
    assert some["max"] > 1e-9 and some["lanes"]["patched"] > 0 and 0 < some["share"] < whole["share"]
    assert whole["max"] < 1e-6  # all of the deficit: nothing is lost, whatever the form
    read = json.loads(json.dumps(result))
    assert engines_table(read).row_count == 3
    # One rank is measured as it is beside others.
    alone = measure(engine, engine, GapSettings(n=3, ranks=(4,)))
    assert alone["kl"]["rank 4"] == some
    axis = draw_gap(read).axes[0]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
    assert drawn["patches, p95"][0] == some["p95"] and len(drawn["patches, max"]) == 2
    assert drawn["the engines' re-prefills, p95"][0] == max(engines["p95"], 1e-12)


def test_quantiles() -> None:
    values = [float(i) for i in range(101)]
    found = quantiles(values)
    assert (found["median"], found["p95"], found["max"], found["n"]) == (50.0, 95.0, 100.0, 101)
    low, high = found["p95_interval"]
    assert 80 < low < 95 < high <= 100 and found["mean"] == pytest.approx(np.mean(values))


def test_settings_are_checked() -> None:
    for ranks in ((), (0,), (8, 8)):
        with pytest.raises(ValueError, match="ranks must be different numbers >= 1"):
            GapSettings(ranks=ranks)
    assert _ranks("4,8, 16") == (4, 8, 16)
    with pytest.raises(ValueError, match="several with commas between, got '8;16'"):
        _ranks("8;16")
    with pytest.raises(ValueError, match="layers must be all or deep"):
        GapSettings(layers="some")
