from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_oracle import make_spec, placed, random_span, specs, worst

from ctxwin.kv.deficit import Deficit, deficit
from ctxwin.kv.orbit import OrbitMean, update_mean
from ctxwin.kv.patch import apply_patch, captured_energy, compress, form_patch
from ctxwin.kv.relocate import canonicalise, relocate

F64 = torch.float64


def orders(spec, count, tokens=7, seed=0):
    base = placed(spec, random_span(spec, tokens, seed), 0)
    return base, [placed(spec, random_span(spec, tokens, seed + 1 + i), 10 + 13 * i) for i in range(count)]


@settings(max_examples=25, deadline=None)
@given(specs(), st.integers(1, 5), st.integers(0, 3000), st.integers(0, 1000))
def test_full_rank_orbit_is_the_mean_of_exact_patches(spec, count, start, seed):
    base, seen = orders(spec, count, seed=seed)
    orbit = OrbitMean(spec)
    for span in seen:
        orbit.add(span, base)
    patch = compress(orbit.mean, spec, dtype=F64)
    served = apply_patch(base, patch, spec, start)
    exact = [apply_patch(base, form_patch(c, base, spec, dtype=F64), spec, start) for c in seen]
    assert worst(served.k, torch.stack([s.k for s in exact]).mean(0)) < 1e-11
    assert worst(served.v, torch.stack([s.v for s in exact]).mean(0)) < 1e-11


def test_running_mean_equals_batch():
    spec = make_spec()
    base, seen = orders(spec, 6)
    running = OrbitMean(spec)
    for i, span in enumerate(seen, start=1):
        running.add(span, base)
        assert running.count == i
    lost = [deficit(c, base, spec) for c in seen]
    mean_k, mean_v = (torch.stack([getattr(d, name) for d in lost]).mean(0) for name in "kv")
    assert worst(running.mean.k, mean_k) < 1e-12 and worst(running.mean.v, mean_v) < 1e-12


@pytest.mark.parametrize("layout", ["joint", "quantized"])
def test_a_mean_stored_as_a_patch_after_each_order_is_as_near_as_one_formed_from_all(layout):
    spec, tokens = make_spec(layers=4, heads=2, k_dim=16, v_dim=16), 60
    noise = torch.Generator().manual_seed(2)
    decay = torch.arange(1, 33).view(2, 16) ** -1.0
    common = torch.randn(2, 4, tokens, 2, 16, generator=noise) * decay
    lost = []
    for _ in range(12):
        k, v = common + 0.3 * torch.randn(2, 4, tokens, 2, 16, generator=noise) * decay
        lost.append(Deficit(k, v, torch.full((4,), 1e3, dtype=torch.float64), 1e-6))
    mean = None
    for count, order in enumerate(lost):
        mean = compress(update_mean(mean, count, order), spec, bytes_share=0.12, layout=layout)
    whole = replace(lost[0], k=sum(d.k for d in lost) / 12, v=sum(d.v for d in lost) / 12)
    stored, once = (
        captured_energy(whole, p)["captured"] for p in (mean, compress(whole, spec, bytes_share=0.12, layout=layout))
    )
    assert 1 - stored < 1.3 * (1 - once)


def test_orders_that_agree_are_one():
    spec = make_spec()
    base, (one,) = orders(spec, 1)
    running = OrbitMean(spec)
    for start in (3, 40, 700):
        running.add(relocate(one, spec, start), base)
    assert (
        worst(apply_patch(base, compress(running.mean, spec, dtype=F64), spec, 0).k, canonicalise(one, spec).k) < 1e-12
    )


def test_refuses_what_does_not_fit():
    spec = make_spec()
    base, seen = orders(spec, 2)
    with pytest.raises(ValueError, match="at least one order"):
        _ = OrbitMean(spec).mean
    running = OrbitMean(spec)
    running.add(seen[0], base)
    with pytest.raises(ValueError, match="must have the shape"):
        running.add(seen[1].slice(0, 3), base.slice(0, 3))
