"""Fidelity, profiles, and KL."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ctxwin import Fidelity
from ctxwin.asking import kl


def test_auto_follows_the_models_profile_and_is_exact_without_one(tmp_path: Path) -> None:
    assert Fidelity().resolve(str(tmp_path)).mode == "exact"
    assert Fidelity().resolve("Some/Hub-Name").mode == "exact"
    (tmp_path / "ctxwin-profile.json").write_text(json.dumps({"fidelity": {"mode": "patched", "rank": 8}}))
    assert Fidelity().resolve(str(tmp_path)) == Fidelity("patched", rank=8)
    assert Fidelity(rank=4).resolve(str(tmp_path)).rank == 4, "what was set by hand wins"
    assert Fidelity("blind").resolve(str(tmp_path)).mode == "blind"


def test_allowed_lanes() -> None:
    exact = Fidelity("exact")
    assert [lane for lane in ("resident", "survivor", "patched", "orbit", "computed") if exact.allows(lane)] == [  # type: ignore[arg-type]
        "resident",
        "computed",
    ]
    assert not Fidelity("patched").allows("orbit")
    assert Fidelity("patched", orbit=True).allows("orbit")
    assert not Fidelity("patched", forbid=("survivor",)).allows("survivor")


@pytest.mark.parametrize(
    "bad",
    [{"mode": "fast"}, {"rank": 0}, {"bytes_share": 1.5}, {"survivors": "drop"}, {"ranks": 3}, {"forbid": ("formed",)}],
)
def test_bad_fidelity(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Fidelity(**bad)  # type: ignore[arg-type]


def test_kl_by_hand() -> None:
    p = {0: math.log(0.5), 1: math.log(0.5), 2: -math.inf}
    q = {0: math.log(0.25), 1: math.log(0.5), 2: math.log(0.25)}
    assert kl(p, q) == pytest.approx(0.5 * math.log(2))
    assert kl(q, q) == 0
    with pytest.raises(ValueError, match="whole vocabulary"):
        kl(p, {0: 0.0})
