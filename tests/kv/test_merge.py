"""Merging: equations 2 and 3 of Elastic Cache on a span, and what moves with it."""

from __future__ import annotations

from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin.kv.layout import SpanKV
from ctxwin.kv.merge import RECENT, FixedPoint, attention_sums, merge, merged_slots
from ctxwin.kv.relocate import relocate
from kv.operator_oracle import make_spec, plain_rope

SPEC = make_spec(layers=2, heads=2, k_dim=8, v_dim=4, rope=plain_rope(8))


def span_of(tokens: int, start: int = 0, seed: int = 0) -> SpanKV:
    noise = torch.Generator().manual_seed(seed)
    k = torch.randn(2, tokens, 2, 8, generator=noise, dtype=torch.float64)
    v = torch.randn(2, tokens, 2, 4, generator=noise, dtype=torch.float64)
    return SpanKV(k, v, torch.arange(tokens).expand(3, -1).contiguous(), start)


@settings(deadline=None)
@given(tokens=st.integers(2, 24), share=st.floats(0.05, 1), seed=st.integers(0, 99))
def test_each_slot_is_the_mean_of_what_is_nearest(tokens: int, share: float, seed: int) -> None:
    span, count = span_of(tokens, seed=seed), merged_slots(share, tokens)
    sums = torch.rand(2, tokens, generator=torch.Generator().manual_seed(seed))
    made = merge(span, sums, count)
    assert made.tokens == count and made.start == span.start
    for layer in range(2):
        ranked = sorted(range(1, tokens - 1), key=lambda t: -sums[layer, t])
        anchors = sorted([0, tokens - 1, *ranked[: count - 2]])
        nearest = [min(anchors, key=lambda a: (abs(a - t), a)) for t in range(tokens)]
        for slot, anchor in enumerate(anchors):
            members = [t for t in range(tokens) if nearest[t] == anchor]
            for name in "kv":
                want = getattr(span, name)[layer, members].mean(0)
                torch.testing.assert_close(getattr(made, name)[layer, slot], want, rtol=1e-12, atol=1e-12)


def test_a_merged_span_moves_as_its_tokens_do() -> None:
    """The mean of turned keys is the turned mean: all tokens of a chunk move by the same distance."""
    span = span_of(12)
    sums = torch.rand(2, 12, generator=torch.Generator().manual_seed(1))
    there = merge(relocate(span, SPEC, 500), sums, 5)
    moved = relocate(merge(span, sums, 5), SPEC, 500)
    torch.testing.assert_close(moved.k, there.k, rtol=0, atol=1e-5)  # the engine's own angles are rounded to float32
    assert torch.equal(moved.v, there.v)


@pytest.mark.parametrize("budget", [1, 1 << 24])
def test_attention_is_summed_over_queries(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxwin.kv.merge.WEIGHTS_AT_ONCE", budget)
    noise = torch.Generator().manual_seed(3)
    queries, keys = torch.randn(4, 6, 8, generator=noise), torch.randn(7, 3, 8, generator=noise)
    got = attention_sums(queries, keys, 0.3)
    want = torch.zeros(7)
    for i in range(4):
        for head in range(6):
            weights = (0.3 * keys[: 4 + i, head // 2] @ queries[i, head]).softmax(0)
            want[: 4 + i] += weights / 6
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="attended must be"):
        merge(span_of(4), torch.zeros(2, 5), 3)
    with pytest.raises(ValueError, match=r"count must be 2\.\.4"):
        merge(span_of(4), torch.zeros(2, 4), 1)


@given(
    share=st.floats(0.05, 1),
    tokens=st.integers(1, 80),
    slots=st.integers(1, 80),
    head=st.integers(0, 80),
    every=st.sampled_from([1, 2, 5, 16]),
    count=st.integers(0, 90),
)
def test_the_fixed_point_is_the_same_however_many_go_at_once(
    share: float, tokens: int, slots: int, head: int, every: int, count: int
) -> None:
    """Algorithm 1 on a list, one token at a time; what really goes lags by less than ``every``."""
    slots, head = min(slots, tokens), min(head, slots, tokens)
    naive, held = list(range(slots)), list(range(slots))
    schedule = FixedPoint(share, tokens, slots, head, every)
    for i in range(1, count + 1):
        naive.append(slots + i)
        held.append(slots + i)
        if len(naive) > max(slots, ceil(share * (tokens + i) - 1e-9)):
            naive.pop(min(max(len(naive) - 1 - RECENT, head, 1), len(naive) - 1))
        kept = schedule.append(1)
        if kept is not None:
            held = [held[slot] for slot in kept]
        assert set(naive) <= set(held) <= set(naive) | set(range(slots + count + 1))
        if i % every == 0:
            assert held == naive
    at_once = FixedPoint(share, tokens, slots, head, every)
    pieces = list(range(slots))
    for begin in range(0, count, every):
        some = range(begin + 1, min(begin + every, count) + 1)
        pieces += [slots + i for i in some]
        kept = at_once.append(len(some))
        pieces = pieces if kept is None else [pieces[slot] for slot in kept]
    assert pieces == held
