from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_oracle import oracle_axes, oracle_rotate, plain_rope, random_positions, ropes, worst

from ctxwin.kv.rope import angles, axes, shift_angles, turn


@settings(max_examples=50, deadline=None)
@given(ropes(), st.integers(1, 12), st.integers(0, 9000), st.integers(0, 5), st.integers(0, 2**31))
def test_turn_from_origin_is_the_oracles_rotation(rope, tokens, start, passing, seed):
    positions = random_positions(tokens, seed) + start
    k = torch.randn(2, tokens, 3, rope.rotary_dim + passing, dtype=torch.float64)
    got = turn(rope, k, angles(rope, positions))
    want = oracle_rotate(rope, k.numpy(), positions.numpy())
    assert worst(got, torch.from_numpy(want)) < 1e-13
    assert torch.equal(got[..., rope.rotary_dim :], k[..., rope.rotary_dim :])


@settings(max_examples=30, deadline=None)
@given(ropes(), st.integers(1, 9), st.lists(st.integers(0, 8000), min_size=3, max_size=3), st.integers(0, 2**31))
def test_turns_compose_and_invert(rope, tokens, stops, seed):
    positions = random_positions(tokens, seed)
    k = torch.randn(tokens, 1, rope.rotary_dim, dtype=torch.float64)
    there = k
    for old, new in zip([0, *stops], [*stops, 0], strict=True):
        there = turn(rope, there, shift_angles(rope, positions, old, new))
    assert worst(there, k) < 1e-13


@settings(max_examples=30, deadline=None)
@given(ropes())
def test_axes_cover_the_sections(rope):
    assert axes(rope).tolist() == oracle_axes(rope)
    if rope.sections is not None:
        assert torch.bincount(axes(rope), minlength=3).tolist() == list(rope.sections)


def test_angles_are_float32_products():
    rope = plain_rope(64, theta=1e6, sections=(8, 12, 12))
    positions = random_positions(50, 3) + 7919
    got = angles(rope, positions)
    assert got.dtype == torch.float64
    freq = np.asarray(rope.inv_freq, dtype=np.float32)
    want = positions.numpy().astype(np.float32)[oracle_axes(rope)].T * freq
    assert want.dtype == np.float32
    assert np.array_equal(got.numpy(), want.astype(np.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_rounds_once(dtype):
    rope = plain_rope(32)
    k = torch.randn(5, 2, 32).to(dtype)
    delta = shift_angles(rope, torch.arange(5).expand(3, -1), 0, 4001)
    got = turn(rope, k, delta)
    want = turn(rope, k.double(), delta)
    assert got.dtype == dtype
    # One rounding to dtype plus the float32 multiply-add; a second rounding to dtype would exceed half an ulp.
    half_ulp = torch.finfo(dtype).eps / 2
    spare = 8 * torch.finfo(torch.float32).eps
    assert bool(((got.double() - want).abs() <= half_ulp * want.abs() + spare * k.abs().max()).all())


def test_turn_leaves_its_input_alone():
    rope = plain_rope(8)
    k = torch.randn(3, 1, 8)
    kept = k.clone()
    turn(rope, k, torch.ones(3, 4, dtype=torch.float64))
    assert torch.equal(k, kept)


def test_refuses_what_does_not_fit():
    rope = plain_rope(8)
    with pytest.raises(ValueError, match=r"\[3, T\]"):
        angles(rope, torch.arange(4))
    with pytest.raises(TypeError, match="integers"):
        angles(rope, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="delta_angles"):
        turn(rope, torch.zeros(4, 1, 8), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="D >= 8"):
        turn(rope, torch.zeros(4, 1, 6), torch.zeros(4, 4))
    with pytest.raises(ValueError, match="sections"):
        angles(plain_rope(8, sections=(1, 1, 1)), torch.zeros(3, 4, dtype=torch.int64))
