"""Questions that turn against a promoted way: it is given up soon, and meanwhile served answers are counted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ctxwin import open_engine
from ctxwin.audit import Options
from ctxwin.audit.auditor import VARIABLE
from ctxwin.profiles import BASIS_NAME, PROFILE_NAME
from ctxwin.tiny import checkpoint_dir
from evals.studies.trust import turn


@pytest.mark.slow
def test_order_behind_multi_hop_demotes_orbit_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a wide budget, so that it takes fewer asks; `evals/studies/trust.py` does it with one percent."""
    monkeypatch.setenv("CTXWIN_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setenv(VARIABLE, "1")
    model = tmp_path / "model"
    shutil.copytree(checkpoint_dir(), model, ignore=shutil.ignore_patterns(PROFILE_NAME, BASIS_NAME))
    options = Options(budget=0.15, share=1.0, quiet_s=0.0, rate=1.0, questions=1)
    with open_engine(str(model), engine="hf", dtype="float32") as engine:
        found = turn(engine, options, "multi_hop", "order", 240, reordered=True)
    first, then = found["multi_hop"], found["order"]
    assert first["decisions"][-1].startswith("orbit promoted: 0 of")
    assert then["decisions"][-1].startswith("orbit demoted")
    assert 0 < then["lost"] <= then["audited"] <= 50
    assert f"{then['asks']} answers were served so meanwhile" in then["decisions"][-1]
