from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_oracle import make_spec, pair, placed, plain_rope, specs, worst

from ctxwin.kv.deficit import deficit
from ctxwin.kv.lowrank import Weight, truncated_svd
from ctxwin.kv.patch import Patch, apply_patch, compress, form_patch, select_layers
from ctxwin.kv.relocate import canonicalise, relocate
from ctxwin.kv.rope import turn

F64 = torch.float64


def stacked(lost, layers):
    return torch.cat([lost.matrix(layer) for layer in layers], dim=1)


@settings(max_examples=30, deadline=None)
@given(specs(), st.integers(1, 9), st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 2**31), st.data())
def test_formed_at_one_place_serves_at_another(spec, tokens, p1, p2, seed, data):
    layout = data.draw(st.sampled_from(["joint", "per_layer"]))
    base, conditioned, raw = pair(spec, tokens, seed, p1)
    patch = form_patch(conditioned, base, spec, layout=layout, dtype=F64)
    want = placed(spec, raw, p2)
    served = apply_patch(base, patch, spec, p2)
    assert served.start == p2
    assert worst(served.k, want.k) < 1e-12
    assert worst(served.v, want.v) < 1e-12
    # Also from a base that stands elsewhere, and at the place it stands at.
    elsewhere = relocate(base, spec, p1)
    assert worst(apply_patch(elsewhere, patch, spec, p2).k, want.k) < 1e-12
    assert worst(apply_patch(elsewhere, patch, spec, p1).k, conditioned.k) < 1e-12


@pytest.mark.parametrize("rank", [1, 3, 6])
@pytest.mark.parametrize("p2", [40, 3000])
def test_truncated_patch_moves_exactly(rank, p2):
    """The error of a rank-m patch is the same everywhere: relocation is an isometry of it."""
    spec = make_spec(layers=4, heads=2, k_dim=16, v_dim=16)
    base, conditioned, raw = pair(spec, 12, 3, 40)
    patch = form_patch(conditioned, base, spec, rank=rank, dtype=F64)
    assert not patch.dense
    served, want = apply_patch(base, patch, spec, p2), placed(spec, raw, p2)
    error = (served.k - want.k).pow(2).sum() + (served.v - want.v).pow(2).sum()
    tail = torch.linalg.svdvals(stacked(deficit(conditioned, base, spec), range(4)))[rank:].pow(2).sum()
    assert float(error) == pytest.approx(float(tail), rel=1e-9)


def test_adding_after_rotation_would_fail():
    """The paper's listing: a deficit taken in the rotated frame is right only where it was formed."""
    spec = make_spec(layers=1, heads=1, k_dim=16, v_dim=4)
    base, conditioned, raw = pair(spec, 6, 8, 100)
    rotated_deficit = conditioned.k - relocate(base, spec, 100).k
    listing = relocate(base, spec, 700).k + rotated_deficit
    want = placed(spec, raw, 700).k
    assert worst(listing, want) > 0.1
    assert worst(apply_patch(base, form_patch(conditioned, base, spec, dtype=F64), spec, 700).k, want) < 1e-12


def test_every_key_is_rotated_once(monkeypatch):
    import ctxwin.kv.rope as module

    seen = []
    monkeypatch.setattr(module, "turn", lambda rope, k, d: seen.append(k.shape) or turn(rope, k, d))
    spec = make_spec(layers=3)
    base, conditioned, _ = pair(spec, 5, 1, 9, skip=(0,))
    patch = form_patch(conditioned, base, spec, rank=1)
    seen.clear()
    apply_patch(base, patch, spec, 77)
    assert len(seen) == spec.layers


def test_per_layer_error_is_the_tail_of_each_layer():
    spec = make_spec(layers=3, heads=2, k_dim=8, v_dim=8)
    base, conditioned, _ = pair(spec, 20, 4, 7)
    lost = deficit(conditioned, base, spec)
    patch = form_patch(conditioned, base, spec, rank=5, layout="per_layer", dtype=F64)
    for layer in range(3):
        k, v = patch.delta(layer, F64)
        error = (lost.k[layer] - k).pow(2).sum() + (lost.v[layer] - v).pow(2).sum()
        tail = torch.linalg.svdvals(lost.matrix(layer))[5:].pow(2).sum()
        assert float(error) == pytest.approx(float(tail), rel=1e-9)
    assert patch.meta["captured"] == pytest.approx(
        1 - sum(float(torch.linalg.svdvals(lost.matrix(i))[5:].pow(2).sum()) for i in range(3)) / patch.meta["energy"]
    )


def test_layers_without_deficit_are_dropped():
    spec = make_spec(layers=4)
    base, conditioned, _ = pair(spec, 6, 2, 50, skip=(0, 2))
    patch = form_patch(conditioned, base, spec, rank=2)
    assert patch.layers == (1, 3)
    assert patch.meta["dropped"] == [0, 2]
    assert patch.delta(0) is None and patch.factors(2) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_deficit(dtype):
    spec = make_spec(layers=2, heads=2, k_dim=64, v_dim=64)
    base, conditioned, _ = pair(spec, 40, 2, 4000, skip=(0,))
    cast = [replace(span, k=span.k.to(dtype), v=span.v.to(dtype)) for span in (conditioned, base)]
    assert form_patch(*cast, spec, rank=2).layers == (1,)


def test_nothing_lost_is_an_empty_patch():
    spec = make_spec()
    base, _, _ = pair(spec, 6, 2, 50)
    patch = form_patch(relocate(base, spec, 20), base, spec, rank=4)
    assert (patch.layers, patch.rank, patch.nbytes, patch.meta["captured"]) == ((), 0, 0, 1.0)
    served = apply_patch(base, patch, spec, 33)
    assert torch.equal(served.k, relocate(base, spec, 33).k) and torch.equal(served.v, base.v)


def test_deep_and_named_layers():
    spec = make_spec(layers=5)
    base, conditioned, _ = pair(spec, 6, 2, 50)
    assert form_patch(conditioned, base, spec, rank=1, layers="deep").layers == (2, 3, 4)
    patch = form_patch(conditioned, base, spec, rank=1, layers=(3, 1))
    assert patch.layers == (1, 3)
    served = apply_patch(base, patch, spec, 50)
    assert torch.equal(served.k[0], relocate(base, spec, 50).k[0]) and torch.equal(served.v[0], base.v[0])
    with pytest.raises(ValueError, match="layers must be"):
        form_patch(conditioned, base, spec, layers=(9,))
    with pytest.raises(ValueError, match="layers must be"):
        form_patch(conditioned, base, spec, layers="shallow")


@pytest.mark.parametrize(
    ("shares", "layers"),
    [
        ((0.5, 1.0), (2, 3, 4)), ((0.25, 1.0), (1, 2, 3, 4)), ((0.25, 0.75), (1, 2, 3)), ((0.75, 1.0), (3, 4)),
        ((0.0, 1.0), (0, 1, 2, 3, 4)), ((0.4, 0.6), (2,)), ((0.8, 1.0), (4,)),
    ],
)  # fmt: skip
def test_shares_of_the_depth(shares: tuple[float, float], layers: tuple[int, ...]) -> None:
    spec = make_spec(layers=5)
    base, conditioned, _ = pair(spec, 6, 2, 50)
    assert select_layers(shares, 5) == layers
    by_share, by_number = (form_patch(conditioned, base, spec, rank=2, layers=chosen) for chosen in (shares, layers))
    assert torch.equal(apply_patch(base, by_share, spec, 50).k, apply_patch(base, by_number, spec, 50).k)
    assert set(by_share.layers) <= set(layers)


@pytest.mark.parametrize("count", range(1, 40))
def test_the_deeper_half_is_a_share_and_every_share_has_a_layer(count: int) -> None:
    assert select_layers((0.5, 1.0), count) == select_layers("deep", count)
    cuts = [i / 10 for i in range(11)]
    parts = [select_layers(ends, count) for ends in pairwise(cuts)]
    assert all(parts) and set().union(*parts) == set(range(count))


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.75, 0.25), (0.5, 1.5), (-0.5, 1.0)])
def test_shares_out_of_range_are_refused(shares: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="layers must be shares"):
        select_layers(shares, 4)


@pytest.mark.parametrize("layout", ["joint", "per_layer"])
@pytest.mark.parametrize("tokens", [3, 64])
def test_rank_is_capped_and_heavy_factors_stay_dense(layout, tokens):
    spec = make_spec(layers=3, heads=2, k_dim=8, v_dim=8)
    base, conditioned, raw = pair(spec, tokens, 6, 9)
    patch = form_patch(conditioned, base, spec, rank=1000, layout=layout, dtype=F64)
    assert patch.rank <= min(tokens, spec.width)
    assert patch.dense and patch.right is None
    assert patch.nbytes == tokens * spec.width * 8
    assert worst(apply_patch(base, patch, spec, 80).k, placed(spec, raw, 80).k) < 1e-12
    thin = form_patch(conditioned, base, spec, rank=1, layout=layout)
    assert not thin.dense and thin.nbytes < tokens * spec.width * 2


@settings(max_examples=20, deadline=None)
@given(
    st.integers(2, 40), st.floats(0.01, 1.5), st.sampled_from(["joint", "per_layer"]),
    st.sampled_from([torch.bfloat16, torch.float32]),
)  # fmt: skip
def test_bytes_share_takes_the_largest_rank_that_fits(tokens, share, layout, dtype):
    spec = make_spec(layers=3, heads=1, k_dim=8, v_dim=4)
    base, conditioned, _ = pair(spec, tokens, 1, 5)
    budget = share * spec.span_bytes(tokens)
    patch = form_patch(conditioned, base, spec, bytes_share=share, layout=layout, dtype=dtype)
    assert patch.nbytes <= budget
    assert patch.nbytes <= share * spec.span_bytes(patch.tokens) * (1 + 1e-12)
    if not patch.dense:
        one_more = form_patch(conditioned, base, spec, rank=patch.rank + 1, layout=layout, dtype=dtype)
        assert one_more.nbytes > budget or one_more.rank == patch.rank


def test_removal_patch_repairs_a_survivor():
    """The survivor stands behind A1 A2; A1 leaves; the wanted KV is the re-prefill behind A2 alone, further left."""
    spec = make_spec(layers=3)
    survivor, behind_a2, raw = pair(spec, 8, 21, 30)
    survivor = relocate(survivor, spec, 90)
    patch = form_patch(behind_a2, survivor, spec, dtype=F64)
    assert worst(apply_patch(survivor, patch, spec, 30).k, behind_a2.k) < 1e-12
    repaired = apply_patch(canonicalise(survivor, spec), patch, spec, 12)
    assert worst(repaired.k, placed(spec, raw, 12).k) < 1e-12


def test_bfloat16_served_span_rounds_like_the_target():
    spec = make_spec(layers=2, heads=2, k_dim=32, v_dim=32)
    base, conditioned, raw = pair(spec, 16, 5, 64)
    base16 = replace(base, k=base.k.bfloat16(), v=base.v.bfloat16())
    patch = form_patch(conditioned, base16, spec, dtype=torch.float32)
    served, want = apply_patch(base16, patch, spec, 640), placed(spec, raw, 640)
    assert served.k.dtype == served.v.dtype == torch.bfloat16
    assert float(((served.k.double() - want.k).abs() - want.k.abs() * 2.0**-8).max()) < 1e-5
    assert float(((served.v.double() - want.v).abs() - want.v.abs() * 2.0**-8).max()) < 1e-5


def test_truncation_is_the_best_there_is():
    matrix = torch.randn(40, 60, generator=torch.Generator().manual_seed(0), dtype=F64)
    values = torch.linalg.svdvals(matrix)
    for rank in (0, 4, 40):
        left, right = truncated_svd(matrix, rank)
        assert left.shape == (40, rank) and right.shape == (rank, 60)
        assert float(torch.linalg.norm(matrix - left @ right)) == pytest.approx(float(values[rank:].norm()), abs=1e-9)
    with pytest.raises(ValueError, match="rank must be in"):
        truncated_svd(matrix, 41)


@pytest.mark.parametrize("kind", ["scales", "matrices", "balanced"])
def test_weighted_truncation_is_best_in_its_own_norm(kind):
    spec = make_spec(layers=2, heads=2, k_dim=6, v_dim=4)
    base, conditioned, _ = pair(spec, 30, 3, 9)
    base = replace(base, v=base.v * 50)
    g = torch.Generator().manual_seed(1)
    if kind == "balanced":
        weight = Weight.balanced(base)
    elif kind == "scales":
        weight = Weight(
            k=torch.rand(2, 2, 6, generator=g, dtype=F64) * 20 + 0.1,
            v=torch.rand(2, 2, 4, generator=g, dtype=F64) + 0.1,
        )
    else:
        weight = Weight(
            k=torch.randn(2, 2, 6, 6, generator=g, dtype=F64) * 5 + 9 * torch.eye(6, dtype=F64),
            v=torch.randn(2, 2, 4, 4, generator=g, dtype=F64) + 2 * torch.eye(4, dtype=F64),
        )
    lost = deficit(conditioned, base, spec)

    def error(patch):
        total = 0.0
        for layer in range(2):
            left, right = patch.factors(layer)
            rest = lost.matrix(layer) - left @ right
            total += float(weight.apply(rest, layer, 2, 6).pow(2).sum())
        return total

    weighted, plain = (compress(lost, spec, rank=5, dtype=F64, weight=w) for w in (weight, None))
    best = torch.cat([weight.apply(lost.matrix(layer), layer, 2, 6) for layer in range(2)], dim=1)
    assert error(weighted) == pytest.approx(float(torch.linalg.svdvals(best)[5:].pow(2).sum()), rel=1e-6)
    assert error(weighted) < error(plain)
    assert weighted.meta["weighted"] and not plain.meta["weighted"]


@pytest.mark.parametrize("form", [{"rank": 3}, {"rank": 3, "layout": "per_layer"}, {}, {"rank": 0}])
def test_tensors_and_meta_round_trip(form):
    spec = make_spec()
    base, conditioned, _ = pair(spec, 9, 2, 50)
    patch = form_patch(conditioned, base, spec, **form)
    meta = json.loads(json.dumps(patch.describe()))
    same = Patch.from_tensors(patch.tensors(), meta)
    assert same == replace(patch, left=same.left, right=same.right)
    assert torch.equal(same.left, patch.left)
    assert torch.equal(apply_patch(base, same, spec, 70).k, apply_patch(base, patch, spec, 70).k)
    if patch.right is not None and patch.rank:
        with pytest.raises(ValueError, match="right must be"):
            Patch.from_tensors({"left": patch.left}, meta)
        with pytest.raises(ValueError, match="left must be"):
            Patch.from_tensors({**patch.tensors(), "left": patch.left[..., :-1]}, meta)
        with pytest.raises(ValueError, match="must hold 'left'"):
            Patch.from_tensors({}, meta)


def test_refuses_what_does_not_fit():
    spec = make_spec()
    base, conditioned, _ = pair(spec, 6, 2, 50)
    with pytest.raises(ValueError, match="got both"):
        form_patch(conditioned, base, spec, rank=1, bytes_share=0.1)
    with pytest.raises(ValueError, match="bytes_share must be > 0"):
        form_patch(conditioned, base, spec, bytes_share=0.0)
    with pytest.raises(ValueError, match="rank must be >= 0"):
        form_patch(conditioned, base, spec, rank=-1)
    with pytest.raises(ValueError, match="layout must be"):
        form_patch(conditioned, base, spec, rank=1, layout="shared")
    with pytest.raises(ValueError, match="same tokens"):
        form_patch(conditioned.slice(0, 3), base, spec)
    with pytest.raises(ValueError, match="same positions"):
        form_patch(replace(conditioned, positions=base.positions + 1), base, spec)
    with pytest.raises(ValueError, match=r"weight\.k must be"):
        form_patch(conditioned, base, spec, rank=1, weight=Weight(k=torch.ones(1)))
    patch = form_patch(conditioned, base, spec, rank=1)
    with pytest.raises(ValueError, match="formed on model"):
        apply_patch(base, patch, replace(spec, identity="other"), 0)
    with pytest.raises(ValueError, match="tokens"):
        apply_patch(base.slice(0, 3), patch, spec, 0)
    with pytest.raises(ValueError, match="start must be"):
        apply_patch(base, patch, spec, -3)


def test_partial_rotary_and_mla_widths():
    spec = make_spec(layers=2, heads=1, k_dim=8, v_dim=20, rope=plain_rope(8, pairing="interleaved"), family="mla")
    base, conditioned, raw = pair(spec, 40, 3, 500)
    patch = form_patch(conditioned, base, spec, rank=28, layout="per_layer", dtype=F64)
    served = apply_patch(base, patch, spec, 2)
    assert worst(served.k, placed(spec, raw, 2).k) < 1e-12 and worst(served.v, raw.v) < 1e-12
