"""Fidelity, profiles, and KL."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ctxwin import Fidelity
from ctxwin.profiles import Profile, model_digest, resolve, write_profile
from ctxwin.window.ask import kl


def test_auto_follows_the_models_profile_and_is_exact_without_one(tmp_path: Path) -> None:
    assert resolve(Fidelity(), str(tmp_path)).mode == "exact"
    assert resolve(Fidelity(), "Some/Hub-Name").mode == "exact"
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    profile = Profile(
        weights=model_digest(tmp_path), model="m", verdict="", finding="binds", n=1, date="", ctxwin="0",
        fidelity=Fidelity("patched", bytes_share=0.2),
    )  # fmt: skip
    write_profile(profile, tmp_path)
    assert resolve(Fidelity(), str(tmp_path)) == Fidelity("patched", bytes_share=0.2)
    by_hand = resolve(Fidelity(rank=4), str(tmp_path))
    assert (by_hand.rank, by_hand.bytes_share) == (4, None), "what was set by hand wins"
    assert resolve(Fidelity("blind"), str(tmp_path)).mode == "blind"


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
