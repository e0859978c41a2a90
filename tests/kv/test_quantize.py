"""Factors in few bits: their numbers are those of plain arithmetic, within the bytes asked for, and better than joint ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_oracle import make_spec, pair, worst

from ctxwin.kv.deficit import deficit
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.patch import Patch, apply_patch, compress, form_patch
from ctxwin.kv.quantize import GROUP, LEAST_BITS, MOST_BITS, QuantizedFactors, quantize
from ctxwin.store.codec import decode_tensors, encode_tensors


def decaying(tokens: int, width: int, layers: int, seed: int, decay: float = 1.5) -> list[torch.Tensor]:
    """Matrices whose spectra fall as powers, each layer of another size."""
    noise = torch.Generator().manual_seed(seed)
    columns = torch.arange(1, width + 1) ** -decay
    return [torch.randn(tokens, width, generator=noise) * columns * (1 + i / 2) for i in range(layers)]


def size(factors: QuantizedFactors) -> int:
    return sum(tensor.nbytes for tensor in factors.tensors().values())


def plain_numbers(factors: QuantizedFactors, lengths: tuple[int, int]) -> list[list[list[float]]]:
    """The oracle: the numbers of each direction that has bits, left ones and right ones by number of bits, bit by bit."""
    text = "".join(f"{byte:08b}" for byte in factors.codes.tolist())
    scales, at, out = factors.scales.float().tolist(), 0, []
    for bits in range(LEAST_BITS, MOST_BITS + 1):
        count = int((factors.bits == bits).sum())
        for length in lengths:
            rows = []
            for _ in range(count):
                steps = [scales.pop(0) for _ in range(-(-length // GROUP))]
                codes = [int(text[at + i * bits : at + (i + 1) * bits], 2) for i in range(length)]
                at += length * bits
                rows.append([(code - 2 ** (bits - 1) + 0.5) * steps[i // GROUP] for i, code in enumerate(codes)])
            at += -at % 8
            out.append(rows)
    assert at == len(text) and not scales
    return out


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 150), st.integers(2, 150), st.integers(1, 4), st.floats(0.02, 0.6), st.integers(0, 999))
def test_numbers_are_those_of_plain_arithmetic_within_the_budget(
    tokens: int, width: int, layers: int, share: float, seed: int
) -> None:
    budget = int(share * tokens * width * layers * 2)
    factors = quantize(decaying(tokens, width, layers, seed), budget)
    assert size(factors) <= max(budget, 0) or not factors.bits.numel()
    left, right = factors.factors(tokens, width, torch.float32)
    assert left.shape == (layers, tokens, factors.bits.shape[1]) and right.shape == (
        layers,
        factors.bits.shape[1],
        width,
    )
    plain = plain_numbers(factors, (tokens, width))
    for i, bits in enumerate(range(LEAST_BITS, MOST_BITS + 1)):
        for rows, side in ((plain[2 * i], left.mT), (plain[2 * i + 1], right)):
            numbers = [number for row in rows for number in row]
            np.testing.assert_allclose(side[factors.bits == bits].flatten().numpy(), numbers, rtol=1e-6)
    assert not left.mT[factors.bits == 0].any() and not right[factors.bits == 0].any()


@pytest.mark.parametrize("share", [0.06, 0.12, 0.25])
@pytest.mark.parametrize("tokens", [48, 256])
def test_at_the_same_bytes_they_lose_less_than_joint_ones_in_bfloat16(tokens: int, share: float) -> None:
    """Each layer has a space of its own, as in a model: joint factors must spend a direction on one layer's."""
    spec = make_spec(layers=8, heads=2, k_dim=32, v_dim=32)
    base, conditioned = spans(spec, tokens)
    lost = deficit(conditioned, base, spec)
    captured = {
        layout: compress(lost, spec, bytes_share=share, layout=layout).meta["captured"]
        for layout in ("joint", "per_layer", "quantized")
    }
    assert captured["quantized"] > max(captured["joint"], captured["per_layer"])
    assert 1 - captured["quantized"] < 0.8 * (1 - captured["joint"])


def test_tokens_that_are_exceptions_in_one_layer_are_not_moved_with_the_others() -> None:
    """All keys of a layer are shifted alike but a few, as that of a picture's thing that a question looks up.

    A joint coefficient serves all layers, so that these are shifted as well: further off than with no patch at all.
    """
    spec, noise = make_spec(layers=8, heads=2, k_dim=32, v_dim=32), torch.Generator().manual_seed(0)
    base, _, _ = pair(spec, 64, 3, 0)
    layers, tokens = torch.arange(8).repeat_interleave(5), torch.arange(40)
    shift = torch.randn(8, 1, 2, 32, generator=noise).repeat(1, 64, 1, 1)
    shift[layers, tokens] = 0
    added = [x + 0.2 * torch.randn(x.shape, generator=noise) for x in (shift, torch.zeros_like(shift))]
    conditioned = SpanKV(base.k + added[0], base.v + added[1], base.positions, 0)
    for layout, least, most in (("joint", 3, 6), ("quantized", 0, 1)):
        patch = form_patch(conditioned, base, spec, bytes_share=0.06, layout=layout)
        assert patch.meta["captured"] > 0.8
        left_over = apply_patch(base, patch, spec, 0).k - conditioned.k
        assert least < left_over[layers, tokens].norm() / added[0][layers, tokens].norm() < most


def spans(spec: KVSpec, tokens: int) -> tuple[SpanKV, SpanKV]:
    base, _, _ = pair(spec, tokens, 3, 0)
    added = [
        torch.stack(decaying(tokens, spec.heads * dim, spec.layers, dim + i, decay=1.0)).view(*x.shape)
        for i, (dim, x) in enumerate(((spec.k_dim, base.k), (spec.v_dim, base.v)))
    ]
    return base, SpanKV(base.k + added[0], base.v + added[1], base.positions, 0)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 90), st.floats(0.01, 1.2), st.sampled_from([torch.bfloat16, torch.float32]))
def test_a_patch_stays_within_its_share_and_comes_back_to_the_bit(
    tokens: int, share: float, dtype: torch.dtype
) -> None:
    spec = make_spec(layers=3, heads=1, k_dim=8, v_dim=4)
    base, conditioned, _ = pair(spec, tokens, 1, 5)
    patch = form_patch(conditioned, base, spec, bytes_share=share, layout="quantized", dtype=dtype)
    assert patch.nbytes <= share * spec.span_bytes(patch.tokens) * (1 + 1e-12)
    meta = json.loads(json.dumps(patch.describe()))
    tensors, _ = decode_tensors(encode_tensors(patch.tensors(), {}))
    same = Patch.from_tensors(tensors, meta)
    assert same.nbytes == patch.nbytes and same.dtype == patch.dtype
    for part in ("k", "v"):
        want = getattr(apply_patch(base, patch, spec, 70), part)
        assert torch.equal(getattr(apply_patch(base, same, spec, 70), part), want)


def test_a_rank_asks_for_the_bytes_of_joint_factors() -> None:
    spec = make_spec(layers=4, heads=2, k_dim=32, v_dim=32)
    base, conditioned, _ = pair(spec, 96, 3, 40)
    for rank in (0, 1, 4, 9):
        joint, quantized = (
            form_patch(conditioned, base, spec, rank=rank, layout=layout) for layout in ("joint", "quantized")
        )
        assert quantized.nbytes <= joint.nbytes <= quantized.nbytes * 1.1 + 20
    whole = form_patch(conditioned, base, spec, layout="quantized", dtype=torch.float64)
    assert whole.dense and worst(apply_patch(base, whole, spec, 40).k, conditioned.k) < 1e-12


def test_a_record_that_was_changed_is_refused() -> None:
    spec = make_spec(layers=3, heads=1, k_dim=8, v_dim=4)
    base, conditioned, _ = pair(spec, 40, 1, 5)
    patch = form_patch(conditioned, base, spec, bytes_share=0.4, layout="quantized")
    meta, tensors = patch.describe(), patch.tensors()
    for name, part in (("codes", tensors["codes"][:-1]), ("scales", tensors["scales"][:-1])):
        with pytest.raises(ValueError, match="got fewer; form the patch again"):
            Patch.from_tensors({**tensors, name: part}, meta)
    with pytest.raises(ValueError, match="got more; form the patch again"):
        Patch.from_tensors({**tensors, "codes": torch.cat([tensors["codes"], tensors["codes"][:1]])}, meta)
    with pytest.raises(ValueError, match="got none named codes, scales"):
        Patch.from_tensors({"bits": tensors["bits"]}, meta)
    with pytest.raises(ValueError, match="weight must be None"):
        from ctxwin.kv.lowrank import Weight

        compress(deficit(conditioned, base, spec), spec, rank=2, layout="quantized", weight=Weight.balanced(base))
