from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_oracle import make_spec, placed, plain_rope, random_positions, random_span, specs, worst

from ctxwin.kv.relocate import canonicalise, relocate, relocation_error


@settings(max_examples=50, deadline=None)
@given(specs(), st.integers(1, 10), st.integers(0, 9000), st.integers(0, 9000), st.integers(0, 2**31))
def test_moved_equals_computed_there(spec, tokens, p1, p2, seed):
    raw = random_span(spec, tokens, seed, positions=random_positions(tokens, seed))
    here, there = placed(spec, raw, p1), placed(spec, raw, p2)
    moved = relocate(here, spec, p2)
    assert moved.start == p2
    assert worst(moved.k, there.k) < 1e-13
    assert moved.v.data_ptr() == here.v.data_ptr() and moved.v is here.v
    assert relocation_error(here, there, spec) < 1e-13


@settings(max_examples=25, deadline=None)
@given(specs(), st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 2**31))
def test_stops_on_the_way_change_nothing(spec, p1, p2, seed):
    span = placed(spec, random_span(spec, 5, seed), p1)
    direct = relocate(span, spec, p2)
    assert worst(relocate(canonicalise(span, spec), spec, p2).k, direct.k) < 1e-13
    assert worst(relocate(direct, spec, p1).k, span.k) < 1e-13


def test_standing_still_is_the_same_span():
    spec = make_spec()
    span = random_span(spec, 4, 0, start=17)
    assert relocate(span, spec, 17) is span
    origin = random_span(spec, 4, 0)
    assert canonicalise(origin, spec) is origin


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_eight_thousand_positions_in_float32(theta):
    spec = make_spec(layers=2, heads=2, k_dim=64, v_dim=8, rope=plain_rope(64, theta))
    raw = random_span(spec, 256, 1, dtype=torch.float32)
    here, there = placed(spec, raw, 3), placed(spec, raw, 8195)
    assert worst(relocate(here, spec, 8195).k, there.k) < 2e-6


def test_a_single_delta_angle_would_miss():
    # The reason for the difference of rounded angles: one float32 angle for the whole shift is off by far more.
    spec = make_spec(layers=1, heads=1, k_dim=64, v_dim=8, rope=plain_rope(64))
    raw = random_span(spec, 256, 1)
    here, there = placed(spec, raw, 3), placed(spec, raw, 8195)
    naive = (torch.tensor(8192.0) * torch.tensor(spec.rope.inv_freq)).double().expand(256, -1)
    from ctxwin.kv.rope import turn

    assert worst(turn(spec.rope, here.k, naive), there.k) > 2e-5
    assert worst(relocate(here, spec, 8195).k, there.k) < 1e-13


def test_magnitude_cancels():
    rope = plain_rope(16, magnitude=1.37)
    spec = make_spec(k_dim=16, rope=rope)
    raw = random_span(spec, 6, 4)
    here, there = placed(spec, raw, 11), placed(spec, raw, 900)
    here, there = replace(here, k=here.k * 1.37), replace(there, k=there.k * 1.37)
    assert worst(relocate(here, spec, 900).k, there.k) < 1e-13


def test_bfloat16_moves_round_once_from_the_canonical_frame():
    spec = make_spec(k_dim=32, rope=plain_rope(32))
    raw = random_span(spec, 64, 5, dtype=torch.bfloat16)
    canonical = placed(spec, raw, 0)
    there = relocate(canonical, spec, 5000)
    assert there.k.dtype == torch.bfloat16
    want = relocate(replace(canonical, k=canonical.k.double()), spec, 5000).k
    assert float(((there.k.double() - want).abs() - want.abs() * 2.0**-8).max()) <= 1e-6


def test_relocation_error_sees_a_wrong_pairing():
    rope = plain_rope(16, pairing="interleaved")
    spec = make_spec(k_dim=16, rope=rope)
    raw = random_span(spec, 6, 4)
    here, there = placed(spec, raw, 0), placed(spec, raw, 40)
    wrong = replace(spec, rope=replace(rope, pairing="half"))
    assert relocation_error(here, there, spec) < 1e-13
    assert relocation_error(here, there, wrong) > 0.1


def test_refuses_what_does_not_fit():
    spec = make_spec()
    span = random_span(spec, 4, 0)
    with pytest.raises(ValueError, match="start must be >= 0"):
        relocate(span, spec, -1)
    with pytest.raises(ValueError, match="k must be"):
        relocate(replace(span, k=span.k[:2]), spec, 3)
    with pytest.raises(ValueError, match="same tokens"):
        relocation_error(span, span.slice(0, 2), spec)
