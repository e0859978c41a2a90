"""What is kept and merged, against loops over lists; no model."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin.kv.merge import bucket_of, budget_slots, most_important
from ctxwin_evals.decoder import Held, Memory
from ctxwin_evals.elastic import H2O, RECENT, Attended, Elastic, Keeper, Local, Policy, Window, merged

METHODS: dict[str, type[Policy]] = {"elastic": Elastic, "h2o": H2O, "local": Local}


def drawn_anchors(data: st.DataObject) -> tuple[int, list[int]]:
    slots = data.draw(st.integers(1, 60))
    anchors = data.draw(st.sets(st.integers(0, slots - 1), min_size=1))
    return slots, sorted(anchors)


def buckets_by_hand(slots: int, anchors: list[int]) -> list[list[int]]:
    """Equation 2 as it is printed, but for the last bucket's first slot."""
    n = len(anchors)
    ends = [(anchors[k] + anchors[k + 1]) // 2 for k in range(n - 1)]
    begins = [0, *(end + 1 for end in ends)]
    return [list(range(b, e + 1)) for b, e in zip(begins, [*ends, slots - 1], strict=True)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_slot_is_in_one_bucket_with_its_anchor(data: st.DataObject) -> None:
    slots, anchors = drawn_anchors(data)
    found = bucket_of(torch.tensor([anchors]), slots)[0].tolist()
    assert [[t for t in range(slots) if found[t] == k] for k in range(len(anchors))] == buckets_by_hand(slots, anchors)
    assert [found[a] for a in anchors] == list(range(len(anchors)))
    for t in range(slots):  # nearest anchor, the earlier of two equally near
        assert anchors[found[t]] == min(anchors, key=lambda a: (abs(a - t), a))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_merging_is_the_mean_of_each_bucket(data: st.DataObject) -> None:
    slots = data.draw(st.integers(2, 12))
    count = data.draw(st.integers(1, slots))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    layers, batch, heads = 2, 2, 3
    k, v = (torch.randn(layers, batch, heads, slots, width, generator=generator) for width in (4, 5))
    sums = torch.rand(layers, batch, slots, generator=generator)
    anchors = most_important(sums, count)
    made = merged(Memory(k, v), anchors)
    for layer in range(layers):
        for b in range(batch):
            ranked = sorted(range(slots), key=lambda t: -float(sums[layer, b, t]))
            assert anchors[layer, b].tolist() == sorted(ranked[:count])
            for i, bucket in enumerate(buckets_by_hand(slots, sorted(ranked[:count]))):
                for head in range(heads):
                    for have, held in ((made.k, k), (made.v, v)):
                        want = sum(held[layer, b, head, t] for t in bucket) / len(bucket)
                        torch.testing.assert_close(have[layer, b, head, i], want)


def test_merging_into_everything_changes_nothing() -> None:
    memory = Memory(torch.randn(2, 1, 2, 7, 4).bfloat16(), torch.randn(2, 1, 2, 7, 4))
    made = merged(memory, torch.arange(7).expand(2, 1, -1))
    assert torch.equal(made.k, memory.k) and torch.equal(made.v, memory.v)


def test_protected_slots_are_chosen_first_and_ties_go_to_the_front() -> None:
    sums = torch.tensor([[[1.0, 5.0, 5.0, 2.0, 0.0]]])
    assert most_important(sums, 3, (0, -1)).tolist() == [[[0, 1, 4]]]
    assert most_important(sums, 0).shape == (1, 1, 0)
    with pytest.raises(ValueError, match=r"2\.\.5, got 1"):
        most_important(sums, 1, (0, -1))
    with pytest.raises(ValueError, match="got 6"):
        most_important(sums, 6)


@pytest.mark.parametrize(
    ("share", "tokens", "slots"), [(0.2, 10, 2), (0.6, 5, 3), (0.7, 10, 7), (0.5, 3, 2), (0, 9, 0)]
)
def test_a_budget_is_rounded_up_and_not_by_a_rounding_error(share: float, tokens: int, slots: int) -> None:
    assert budget_slots(share, tokens) == slots


# Generating, without a model


def followed(kind: str, share: float, prompt: int, steps: int) -> list[list[int]]:
    """Which tokens are held after each step, by a loop over a list; attention is drawn."""
    rng = np.random.default_rng(prompt * 100 + steps)
    count = max(ceil(share * prompt - 1e-9), 2 if kind == "elastic" else 1)
    weights = rng.random(prompt)
    seen = dict(enumerate(weights))
    policy = METHODS[kind](share, torch.tensor(weights, dtype=torch.float32)[None, None])
    keeper = Keeper(policy)
    memory = Memory(*(torch.arange(prompt, dtype=torch.float32)[None, None, None, :, None] for _ in "kv"))
    held = Held(memory)
    keeper.prompted(held)
    if kind == "local":
        tokens = list(range(prompt))[-count:]
    else:
        must = {0, prompt - 1} if kind == "elastic" else {prompt - 1}
        rest = sorted((t for t in range(prompt) if t not in must), key=lambda t: -seen[t])
        tokens = sorted([*must, *rest[: count - len(must)]])
    rows = [tokens]
    if kind != "elastic":
        assert held.memory.v[0, 0, 0, :, 0].tolist() == tokens
    merged_front = held.memory.v[0, 0, 0, :, 0].tolist()
    names = dict(zip(tokens, merged_front, strict=True))
    for step in range(steps):
        new = prompt + step
        grown = held.grow(1)
        grown.k[..., -1, :] = grown.v[..., -1, :] = new
        tokens, names[new] = [*tokens, new], float(new)
        seen[new] = 0.0
        watch = keeper.watch
        if watch is not None:
            got = rng.random(held.slots).astype(np.float32)
            watch(0, torch.tensor(got)[None, None, None])
            for token, weight in zip(tokens, got, strict=True):
                seen[token] += float(weight)
        keeper.stepped(held)
        if len(tokens) > max(ceil(share * (new + 1) - 1e-9), count):
            if kind == "elastic":
                tokens.pop(max(len(tokens) - 1 - RECENT, 1))
            elif kind == "local":
                tokens.pop(0)
            else:
                tokens.remove(min(tokens[:-1], key=lambda t: seen[t]))
        assert held.memory.v[0, 0, 0, :, 0].tolist() == [names[t] for t in tokens]
        assert held.slots <= max(ceil(share * (new + 1) - 1e-9), count)
        rows.append(tokens)
    return rows


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(METHODS)), st.floats(0.05, 1), st.integers(3, 40), st.integers(0, 90))
def test_what_is_held_while_generating(kind: str, share: float, prompt: int, steps: int) -> None:
    rows = followed(kind, share, prompt, steps)
    if share == 1:
        assert rows[-1] == list(range(prompt + steps))


def test_the_fixed_point_is_in_front_of_the_newest_25() -> None:
    rows = followed("elastic", 0.5, 80, 4)
    gone = [next(iter(set(a) - set(b)), None) for a, b in pairwise(rows)]
    assert gone[0] is None and gone[1] is not None  # half of the new tokens find room
    assert len([t for t in rows[2] if t > gone[1]]) == RECENT


@pytest.mark.parametrize("kind", sorted(METHODS))
def test_the_header_is_left_alone_behind_chunks_that_were_thinned_out(kind: str) -> None:
    head, kept, asked = 3, 4, 2
    slots = head + kept + asked
    policy = METHODS[kind](0.2, torch.zeros(1, 1, head + kept), Window(head, 20, kept))
    keeper, memory = Keeper(policy), torch.arange(slots, dtype=torch.float32)[None, None, None, :, None]
    held = Held(Memory(memory, memory))
    keeper.prompted(held)
    assert held.slots == slots
    for step in range(40):
        grown = held.grow(1)
        grown.k[..., -1, :] = grown.v[..., -1, :] = 100 + step
        if keeper.watch is not None:
            keeper.watch(0, torch.rand(1, 1, 1, held.slots))
        keeper.stepped(held)
        left = held.memory.k[0, 0, 0, :, 0].tolist()
        assert left[:head] == [0, 1, 2] and left[-1] == 100 + step
        assert held.slots == slots + (step + 1) // 5 + ((step + 1) % 5 > 0)


def test_attention_follows_the_slots_that_are_kept() -> None:
    seen = Attended(torch.tensor([[[3.0, 1.0, 2.0]]]))
    seen.keep(torch.tensor([[[0, 2]]]))
    seen.watch(0, torch.tensor([[[[0.5, 0.25, 0.25]], [[0.1, 0.4, 0.5]]]]))
    torch.testing.assert_close(seen.sums, torch.tensor([[[3.3, 2.325, 0.375]]]))
