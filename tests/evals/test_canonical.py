"""Where canonicals are formed: what holds by definition, and the way through on the bundled model."""

from __future__ import annotations

import pytest

from ctxwin import open_engine
from ctxwin.evals.studies.canonical import PROMPTS, CanonicalSettings, canonical_table, measure
from ctxwin.evals.studies.command import points


def test_patches_bring_every_canonical_near_and_moved_kv_is_near_already() -> None:
    done: list[int] = []
    with open_engine("tiny:hf", dtype="float32") as engine:
        result = measure(engine, CanonicalSettings(2, ranks=(0, 200)), done.append)  # type: ignore[arg-type]
    assert sum(done) == 2 and canonical_table(result).row_count == len(result["rows"]) == len(PROMPTS) * 8
    assert result["prompts"]["neutral"] < min(result["prompts"][name] for name in PROMPTS)
    kl = {(row["prompt"], row["kind"], row["rank"]): row["kl"] for row in result["rows"]}
    for prompt in PROMPTS:
        for kind in ("own", "neutral", "other"):
            assert kl[prompt, kind, 0] > 1 and kl[prompt, kind, 200] < 0.05
        assert kl[prompt, "moved from other", None] < 0.5


def test_settings_and_points_are_checked() -> None:
    with pytest.raises(ValueError, match="n must be >= 1"):
        CanonicalSettings(0)
    assert points("8,1,8") == (1, 8)
    with pytest.raises(ValueError, match="comma-separated"):
        points("1,x")
