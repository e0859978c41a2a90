"""Thinned-out caches: the tensor maths against loops, the arms against their definitions on random models."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin.chunk import Chunk
from ctxwin.evals.arms import parse_arm
from ctxwin.evals.arms.compress import ElasticCache, HeavyHitters, MostRecent, attention_of
from ctxwin.evals.decoder import Decoder, Memory
from ctxwin.evals.elastic.merging import Attended, bucket_of, budget_slots, merged, most_important
from ctxwin.evals.elastic.policies import H2O, METHODS, RECENT, Elastic, Local, Window
from ctxwin.evals.generation import Held, Reading, continue_, forced_logits
from ctxwin.evals.group import Group
from ctxwin.evals.items import Item
from ctxwin.evals.patching import Patcher
from ctxwin.evals.tasks.tiny import TASKS, as_item

if TYPE_CHECKING:
    from ctxwin.engines.hf import HFEngine

HEADER = "You watch a camera."


def group_of(decoder: Decoder, count: int = 2) -> Group:
    items = [as_item(TASKS["multi_hop"].case(0, i, (3,)), "tiny/multi_hop") for i in range(count)]
    return Group(decoder, items, Patcher(decoder.spec), HEADER)


def text_group(decoder: Decoder) -> Group:
    texts = ["a red circle", "the number of the square is now blue", "what shape"]
    item = Item(
        task="text", index=0, load=lambda: [Chunk.text(t) for t in texts], count=3, placed=(0, 1, 2),
        query="what color?", target="", doc_id="0", cluster="0", digest="text", max_tokens=8,
    )  # fmt: skip
    return Group(decoder, [item], Patcher(decoder.spec), HEADER)


@pytest.fixture(scope="module")
def decoder(engine: HFEngine) -> Decoder:
    return Decoder(engine)


@pytest.fixture(scope="module")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    from ctxwin.engines.hf import HFEngine
    from engines.models import write_mla_model

    opened = HFEngine(write_mla_model(tmp_path_factory.mktemp("mla") / "model"), dtype="float32")
    yield Decoder(opened)
    opened.close()


@pytest.fixture(scope="module")
def deepstack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    from ctxwin.engines.hf import HFEngine
    from engines.models import write_vision_model

    opened = HFEngine(write_vision_model(tmp_path_factory.mktemp("deep") / "model", "qwen3_vl"), dtype="float32")
    yield Decoder(opened)
    opened.close()


# The maths


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
    keeper = policy.start()
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
    policy = METHODS[kind](0.2, torch.zeros(1, 1, head + kept), Window(head, 20))
    keeper, memory = policy.start(), torch.arange(slots, dtype=torch.float32)[None, None, None, :, None]
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


# The arms


def test_arms_parse() -> None:
    assert parse_arm("elastic:0.5") == ElasticCache("", 0.5) != HeavyHitters("", 0.5)
    assert parse_arm("h2o:0.2@prompt") == HeavyHitters("", 0.2, "prompt") != HeavyHitters("", 0.2)
    assert parse_arm("local:1") == MostRecent("", 1.0)
    for text in ("elastic", "elastic:1.1", "elastic:0.5@", "elastic:0.5@window2", "h2o:-1", "local:x", "local:@prompt"):
        with pytest.raises(ValueError, match="an arm must be one of"):
            parse_arm(text)


def test_attention_is_transformers_own(decoder: Decoder) -> None:
    group = group_of(decoder, 1)
    text = decoder.engine.text_model
    header = decoder.tokens([group.header])
    embeds = torch.cat([header.embeds, group.context.embeds], 1)
    positions = torch.cat([header.positions, group.context.positions], 2)
    before = text.config._attn_implementation
    text.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            out = text(inputs_embeds=embeds, position_ids=positions, output_attentions=True, use_cache=False)
    finally:
        text.config._attn_implementation = before
    want = torch.stack([a[0].mean(0).sum(0) for a in out.attentions])
    torch.testing.assert_close(attention_of(group)[:, 0], want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(want.sum(1), torch.full((decoder.layers,), float(embeds.shape[1])))


def test_attention_in_blocks_is_the_same(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxwin.evals.arms import compress

    whole = attention_of(group_of(decoder))
    monkeypatch.setattr(compress, "WEIGHTS_AT_ONCE", 20_000)
    torch.testing.assert_close(attention_of(group_of(decoder)), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["decoder", "mla", "deepstack"])
def test_the_whole_budget_is_the_whole_cache_and_none_is_the_header(
    family: str, request: pytest.FixtureRequest
) -> None:
    decoder: Decoder = request.getfixturevalue(family)
    group = text_group(decoder) if family == "mla" else group_of(decoder)
    exact = group.memory(group.exact)
    for arm in ("elastic:1", "h2o:1", "local:1", "elastic:0@prompt", "local:0.3@prompt"):
        served = parse_arm(arm).serve(group)
        memory = group.memory([s.spans for s in served if s])
        assert torch.equal(memory.k, exact.k) and torch.equal(memory.v, exact.v)
    queries = [item.query for item in group.items]
    alone = decoder.read(group.behind_header(len(group)), queries, group.begin)
    for arm in ("h2o:0", "local:0"):
        served = parse_arm(arm).serve(group)
        have = decoder.read(group.memory([s.spans for s in served if s]), queries, group.begin)
        torch.testing.assert_close(have, alone)
    assert not torch.allclose(alone, decoder.read(exact, queries, group.begin))


@pytest.mark.parametrize("family", ["decoder", "mla"])
def test_chunks_are_merged_layer_by_layer(family: str, request: pytest.FixtureRequest) -> None:
    decoder: Decoder = request.getfixturevalue(family)
    group = text_group(decoder) if family == "mla" else group_of(decoder)
    lead, tokens = group.header_span.tokens, group.context_tokens
    served = parse_arm("elastic:0.3").serve(group)
    assert len({tuple(row) for row in chosen_anchors(group, lead, tokens, 0.3)}) > 1  # layers differ
    for b, one in enumerate(served):
        assert one is not None and len(one.spans) == 1
        k = torch.cat([s.k for s in group.exact[b]], 1)
        v = torch.cat([s.v for s in group.exact[b]], 1)
        for layer, anchors in enumerate(chosen_anchors(group, lead, tokens, 0.3, b)):
            assert {0, tokens - 1} <= set(anchors)
            for i, bucket in enumerate(buckets_by_hand(tokens, anchors)):
                torch.testing.assert_close(one.spans[0].k[layer, i], k[layer, bucket].mean(0))
                torch.testing.assert_close(one.spans[0].v[layer, i], v[layer, bucket].mean(0))
        assert one.spans[0].tokens == ceil(0.3 * tokens)
        assert one.extra["kv_share"] == one.spans[0].tokens / tokens


def chosen_anchors(group: Group, lead: int, tokens: int, share: float, b: int = 0) -> list[list[int]]:
    rows = []
    for sums in attention_of(group)[:, b, lead:].tolist():
        middle = sorted(range(1, tokens - 1), key=lambda t: -sums[t])[: ceil(share * tokens) - 2]
        rows.append([0, *sorted(middle), tokens - 1])
    return rows


def test_evictions_keep_exact_kv(decoder: Decoder) -> None:
    group = group_of(decoder)
    lead, tokens = group.header_span.tokens, group.context_tokens
    count = ceil(0.4 * tokens)
    for b, (h2o, local) in enumerate(zip(*(parse_arm(f"{m}:0.4").serve(group) for m in ("h2o", "local")), strict=True)):
        assert h2o is not None and local is not None
        k = torch.cat([s.k for s in group.exact[b]], 1)
        assert torch.equal(local.spans[0].k, k[:, -count:])
        for layer, sums in enumerate(attention_of(group)[:, b, lead:].tolist()):
            top = sorted(range(tokens - 1), key=lambda t: -sums[t])[: count - 1]
            assert torch.equal(h2o.spans[0].k[layer], k[layer, [*sorted(top), tokens - 1]])


@pytest.mark.parametrize("family", ["decoder", "mla", "deepstack"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_answers_under_a_budget(family: str, method: str, request: pytest.FixtureRequest) -> None:
    """Behind the prompt: the first token is re-prefill's, the cache keeps to its budget, new tokens stand where they would."""
    decoder: Decoder = request.getfixturevalue(family)
    group = text_group(decoder) if family == "mla" else group_of(decoder, 1)
    memory, query = group.memory(group.exact), decoder.query(group.items[0].query)
    answer = [5 + i % 20 for i in range(12)]
    plain = Reading(decoder, memory)
    plain.ask([query], group.begin)
    served = parse_arm(f"{method}:0.3@prompt").serve(group)[0]
    assert served is not None and served.policy is not None
    thin = Reading(decoder, memory, served.policy)
    thin.ask([query], group.begin)
    torch.testing.assert_close(thin.logits(), plain.logits(), atol=1e-5, rtol=1e-5)
    prompt = plain.held.slots
    for i, token in enumerate(answer):
        assert thin.held.slots == ceil(0.3 * (prompt + i) - 1e-9)
        plain.feed([token])
        thin.feed([token])
        assert thin.at == plain.at
        # In the first layer a key depends on its token and its place only.
        torch.testing.assert_close(thin.held.memory.k[0, :, :, -1], plain.held.memory.k[0, :, :, -1])
    assert not torch.allclose(thin.logits(), plain.logits())
    whole = parse_arm(f"{method}:1@prompt").serve(group)[0]
    assert whole is not None
    want = forced_logits(decoder, memory, query, group.begin, answer)
    have = forced_logits(decoder, memory, query, group.begin, answer, whole.policy)
    torch.testing.assert_close(have, want, atol=1e-4, rtol=1e-4)
    assert torch.allclose(  # a policy has no state of its own: a second answer is as the first
        have, forced_logits(decoder, memory, query, group.begin, answer, whole.policy)
    )


def test_a_batch_is_served_as_its_items_are(decoder: Decoder) -> None:
    group = group_of(decoder)
    for kind in (Elastic, H2O, Local):
        policy = kind(0.4, attention_of(group))
        memory, queries = group.memory(group.exact), [decoder.query("color of 17?")] * 2
        together = Reading(decoder, memory, policy)
        together.ask(queries, group.begin)
        for token in (7, 9, 11):
            together.feed([token, token + 1])
        for b in range(2):
            part = Memory(memory.k[:, [b]], memory.v[:, [b]])
            alone = continue_(
                decoder, part, queries[0], group.begin, forced=[7 + b, 9 + b, 11 + b, 0], policy=policy.of([b])
            )
            torch.testing.assert_close(together.logits()[b], alone.logits[-1], atol=1e-4, rtol=1e-4)


def test_attention_follows_the_slots_that_are_kept() -> None:
    seen = Attended(torch.tensor([[[3.0, 1.0, 2.0]]]))
    seen.keep(torch.tensor([[[0, 2]]]))
    seen.watch(0, torch.tensor([[[[0.5, 0.25, 0.25]], [[0.1, 0.4, 0.5]]]]))
    torch.testing.assert_close(seen.sums, torch.tensor([[[3.3, 2.325, 0.375]]]))


def test_served_spans_are_the_stored_ones(decoder: Decoder) -> None:
    """What is thinned out before the question is not computed again when it comes."""
    group = group_of(decoder, 1)
    first = parse_arm("elastic:0.5").serve(group)
    group.rewind()
    runs: list[Any] = []
    decoder_run = decoder.run
    try:
        decoder.run = lambda *a, **k: runs.append(a) or decoder_run(*a, **k)  # type: ignore[method-assign, func-returns-value]
        assert parse_arm(" elastic:0.5").serve(group) is first
    finally:
        del decoder.run  # type: ignore[method-assign]
    assert not runs
