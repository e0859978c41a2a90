from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_oracle import make_spec, placed, random_span, specs, worst

from ctxwin.kv.deficit import deficit
from ctxwin.kv.orbit import OrbitMean
from ctxwin.kv.patch import apply_patch, compress, form_patch
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


def test_running_mean_equals_batch_and_knows_its_spread():
    spec = make_spec()
    base, seen = orders(spec, 6)
    running = OrbitMean(spec)
    for i, span in enumerate(seen, start=1):
        running.add(span, base)
        assert running.count == i
    lost = [deficit(c, base, spec) for c in seen]
    mean_k, mean_v = (torch.stack([getattr(d, name) for d in lost]).mean(0) for name in "kv")
    assert worst(running.mean.k, mean_k) < 1e-12 and worst(running.mean.v, mean_v) < 1e-12
    energy = float(mean_k.pow(2).sum() + mean_v.pow(2).sum())
    away = sum(float((d.k - mean_k).pow(2).sum() + (d.v - mean_v).pow(2).sum()) for d in lost) / 6
    assert running.spread == pytest.approx((away / energy) ** 0.5, rel=1e-9)


def test_orders_that_agree_have_no_spread():
    spec = make_spec()
    base, (one,) = orders(spec, 1)
    running = OrbitMean(spec)
    for start in (3, 40, 700):
        running.add(relocate(one, spec, start), base)
    assert running.spread < 1e-7
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
