from __future__ import annotations

import json

import pytest
import torch
from operator_oracle import make_spec, placed, random_span, worst

from ctxwin.kv.basis import SharedBasis
from ctxwin.kv.deficit import Deficit, deficit
from ctxwin.kv.patch import Patch, apply_patch, compress
from ctxwin.kv.pooling import fit_basis, project

F64 = torch.float64


def family(spec, count, tokens, directions, noise=0.0, seed=0):
    """Deficits whose rows lie in a few directions that belong to the model, per layer and joint alike."""
    g = torch.Generator().manual_seed(seed)
    width = spec.heads * (spec.k_dim + spec.v_dim)
    model = torch.randn(directions, spec.layers, width, generator=torch.Generator().manual_seed(99), dtype=F64)
    made = []
    for _ in range(count):
        left = torch.randn(tokens, directions, generator=g, dtype=F64)
        both = torch.einsum("tm,mlw->ltw", left, model)
        both = both + noise * torch.randn(both.shape, generator=g, dtype=F64)
        k, v = both.split([spec.heads * spec.k_dim, spec.heads * spec.v_dim], dim=-1)
        shape = (spec.layers, tokens, spec.heads)
        made.append(Deficit(k.reshape(*shape, -1), v.reshape(*shape, -1), torch.ones(spec.layers, dtype=F64), 1e-12))
    return made


@pytest.mark.parametrize("layout", ["joint", "per_layer"])
def test_a_held_out_deficit_is_recovered(layout):
    spec = make_spec(layers=3, heads=2, k_dim=8, v_dim=8)
    *seen, held_out = family(spec, 9, tokens=20, directions=4)
    basis = fit_basis(iter(seen), spec, 4, layout=layout, dtype=F64)
    patch = project(held_out, basis, spec)
    assert patch.meta["captured"] > 1 - 1e-12
    assert patch.layout == "shared" and patch.right is None
    rows = 20 if layout == "joint" else 20 * 3
    assert patch.nbytes == rows * 4 * 8
    assert basis.nbytes == 3 * 4 * 32 * 8
    own = compress(held_out, spec, rank=4, layout=layout, dtype=F64)
    assert patch.nbytes < own.nbytes


def test_projection_is_the_best_on_rounded_directions():
    spec = make_spec(layers=2, heads=1, k_dim=8, v_dim=8)
    *seen, held_out = family(spec, 5, tokens=12, directions=6, noise=0.1)
    basis = fit_basis(seen, spec, 3, dtype=torch.bfloat16)
    patch = project(held_out, basis, spec, dtype=F64)
    right = torch.cat([basis.right[i].double() for i in range(2)], dim=1)
    rows = torch.cat([held_out.matrix(i) for i in range(2)], dim=1)
    rest = rows - patch.left @ right
    assert float((rest @ right.T).abs().max()) < 1e-9
    assert 0 < patch.meta["captured"] < 1


def test_folding_equals_stacking_while_it_fits():
    spec = make_spec(layers=2, heads=1, k_dim=6, v_dim=6)
    seen = family(spec, 6, tokens=10, directions=5)
    one_by_one = fit_basis(seen, spec, 5, dtype=F64)
    rows = torch.cat([torch.cat([d.matrix(i) for i in range(2)], dim=1) / d.energy.sum() ** 0.5 for d in seen])
    best = torch.linalg.svd(rows, full_matrices=False).Vh[:5]
    got = torch.cat([one_by_one.right[i] for i in range(2)], dim=1)
    assert worst(got.T @ got, best.T @ best) < 1e-10


def test_serves_through_apply_patch_and_round_trips():
    spec = make_spec(layers=2)
    raw_base, raw_cond = random_span(spec, 6, 1), random_span(spec, 6, 2)
    base, conditioned = placed(spec, raw_base, 0), placed(spec, raw_cond, 31)
    lost = deficit(conditioned, base, spec)
    basis = fit_basis([lost], spec, 6, dtype=F64)
    patch = project(lost, basis, spec)
    assert worst(apply_patch(base, patch, spec, 400).k, placed(spec, raw_cond, 400).k) < 1e-10
    same_basis = SharedBasis.from_tensors(basis.tensors(), json.loads(json.dumps(basis.describe())))
    assert same_basis.id == basis.id and len(basis.id) == 64
    meta = json.loads(json.dumps(patch.describe()))
    same = Patch.from_tensors(patch.tensors(), meta, same_basis)
    assert torch.equal(apply_patch(base, same, spec, 9).k, apply_patch(base, patch, spec, 9).k)
    with pytest.raises(ValueError, match="basis must be"):
        Patch.from_tensors(patch.tensors(), meta)
    other = fit_basis([lost], spec, 3, dtype=F64)
    with pytest.raises(ValueError, match="basis must be"):
        Patch.from_tensors(patch.tensors(), meta, other)
    with pytest.raises(ValueError, match="digest"):
        SharedBasis.from_tensors({"right": basis.right + 1}, basis.describe())


def test_refuses_what_does_not_fit():
    from dataclasses import replace

    spec = make_spec()
    seen = family(spec, 1, tokens=4, directions=2)
    with pytest.raises(ValueError, match="at least one"):
        fit_basis([], spec, 2)
    with pytest.raises(ValueError, match="rank must be >= 1"):
        fit_basis(seen, spec, 0)
    with pytest.raises(ValueError, match="fitted on model"):
        project(seen[0], fit_basis(seen, spec, 2), replace(spec, identity="other"))
