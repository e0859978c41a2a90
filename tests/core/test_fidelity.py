"""Fidelity, profiles, and KL."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ctxwin import Fidelity
from ctxwin.fidelity import AdvancedFidelity
from ctxwin.profiles import Profile, model_digest, resolve, with_overrides, write_profile
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


def test_bytes_decide_unless_a_rank_is_given() -> None:
    """Also behind a snapshot or a profile, in which every field is set."""
    for given, (share, rank) in {
        "{}": (0.12, None),
        '{"rank": 8}': (None, 8),
        '{"rank": 8, "bytes_share": 0.3}': (0.3, 8),
        '{"rank": null, "bytes_share": null}': (None, None),
    }.items():
        fidelity = Fidelity("patched", **json.loads(given))
        assert (fidelity.bytes_share, fidelity.rank) == (share, rank)
        assert fidelity.patch_rank == (rank if share is None else None)
        assert Fidelity.model_validate_json(fidelity.model_dump_json()) == fidelity
    assert Fidelity().advanced.layout == "quantized"
    shared = with_overrides(Fidelity("patched", bytes_share=0.2), Fidelity(rank=4, advanced={"layout": "joint"}))
    assert (shared.patch_rank, shared.advanced.layout) == (4, "joint")


def test_allowed_lanes() -> None:
    exact = Fidelity("exact")
    assert [lane for lane in ("resident", "survivor", "patched", "orbit", "computed") if exact.allows(lane)] == [  # type: ignore[arg-type]
        "resident",
        "computed",
    ]
    assert not Fidelity("patched").allows("orbit")
    assert Fidelity("patched", orbit=True).allows("orbit")
    assert not Fidelity("patched", advanced={"forbid": ("survivor",)}).allows("survivor")


@pytest.mark.parametrize(
    "bad",
    [
        {"mode": "fast"}, {"rank": 0}, {"bytes_share": 1.5}, {"survivors": "drop"}, {"ranks": 3},
        {"advanced": {"rank": 3}}, {"advanced": {"forbid": ("formed",)}}, {"advanced": {}, "forbid": ()},
        {"layers": "shallow"}, {"layers": (0.5, 0.5)}, {"layers": (0.5, 1.5)}, {"layers": (0.1, 0.2, 0.3)},
    ],
)  # fmt: skip
def test_bad_fidelity(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError) as refused:
        Fidelity(**bad)  # type: ignore[arg-type]
    assert "must " in str(refused.value) and "pydantic" not in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"mode": "pached"}, "mode must be 'auto', 'exact', 'patched' or 'blind', got 'pached'"),
        ({"rank": 0, "audit": 2}, "rank must be >= 1, got 0; audit must be <= 1, got 2"),
        ({"rank": "x"}, "rank must be a valid integer, got 'x'"),
        ({"layers": 3}, "layers must be 'all' or 'deep' or a valid tuple, got 3"),
        ({"ranks": 3}, "ranks must be left out: there is no such field"),
        ({"advanced": {"eliminate": -1}}, "advanced: eliminate must be >= 0, got -1"),
        (
            {"advanced": {"forbid": ("formed",)}},
            "advanced: forbid must leave computed and formed allowed, got ('formed',)",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(bad: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        Fidelity(**bad)  # type: ignore[arg-type]
    assert str(refused.value) == said


def test_advanced_fields_by_themselves() -> None:
    with pytest.raises(ValueError, match=r"^eliminate must be >= 0, got -1$"):
        AdvancedFidelity(eliminate=-1)
    fidelity = Fidelity("patched", rank=4, advanced=AdvancedFidelity(layout="joint"))
    assert copy.deepcopy(fidelity) == fidelity == Fidelity.model_validate_json(fidelity.model_dump_json())


def test_layers_are_words_or_shares_of_the_depth() -> None:
    quarter = Fidelity("patched", layers=(0.25, 1))
    read = Fidelity.model_validate_json(quarter.model_dump_json().replace("1.0", "1"))
    assert read == quarter and read.patch_name == quarter.patch_name and isinstance(read.layers[1], float)
    names = {Fidelity("patched", layers=layers).patch_name for layers in ("all", "deep", (0.25, 1), (0.5, 1))}  # type: ignore[arg-type]
    assert len(names) == 4 and "share=0.12,layers=deep,layout=quantized,basis=None" in names


MOVED = {"layout": "shared", "basis": "b", "eliminate": True, "reference": "nearer", "forbid": ("survivor",)}


@pytest.mark.parametrize("name", MOVED)
def test_fields_for_research_stand_apart(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be given in advanced; write Fidelity\(advanced="):
        Fidelity(**{name: MOVED[name]})  # type: ignore[arg-type]
    now = Fidelity("patched", rank=4, advanced={name: MOVED[name]})
    assert Fidelity.model_validate(now.model_dump(mode="json")) == now
    assert Fidelity.model_validate_json(now.model_dump_json()) == now
    assert Fidelity("patched", rank=4).with_advanced(**{name: MOVED[name]}) == now


def test_what_is_set_by_hand_wins_field_by_field() -> None:
    base = Fidelity("patched", rank=4, advanced={"forbid": ("orbit",), "reference": "stream"})
    merged = with_overrides(base, Fidelity(kl_budget=0.1, advanced={"reference": "nearer"}))
    assert merged == base.with_advanced(reference="nearer").model_copy(update={"kl_budget": 0.1})


def test_kl_by_hand() -> None:
    p = {0: math.log(0.5), 1: math.log(0.5), 2: -math.inf}
    q = {0: math.log(0.25), 1: math.log(0.5), 2: math.log(0.25)}
    assert kl(p, q) == pytest.approx(0.5 * math.log(2))
    assert kl(q, q) == 0
    with pytest.raises(ValueError, match="whole vocabulary"):
        kl(p, {0: 0.0})
