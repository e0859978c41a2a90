"""The arms that hold fewer KV against their definitions, on random models."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ctxwin.chunk import Chunk
from ctxwin.engines.sampling import Sampling
from ctxwin_evals.arms import parse_arm
from ctxwin_evals.arms.compress import ElasticCache, HeavyHitters, MostRecent, attention_of
from ctxwin_evals.decoder import Decoder, Memory, concatenated
from ctxwin_evals.elastic import H2O, Elastic, Local
from ctxwin_evals.generation import Reading, forced_logits, generate
from ctxwin_evals.group import Group
from ctxwin_evals.items import Item
from ctxwin_evals.patching import Patcher
from ctxwin_evals.tasks.tiny import TASKS

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

HEADER = "You watch a camera."


def group_of(decoder: Decoder, count: int = 2) -> Group:
    items = [TASKS["multi_hop"].case(0, i, (3,)) for i in range(count)]
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
    from ctxwin.engines.hf.engine import HFEngine
    from engines.models import write_mla_model

    opened = HFEngine(write_mla_model(tmp_path_factory.mktemp("mla") / "model"), dtype="float32")
    yield Decoder(opened)
    opened.close()


@pytest.fixture(scope="module")
def deepstack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    from ctxwin.engines.hf.engine import HFEngine
    from engines.models import write_vision_model

    opened = HFEngine(write_vision_model(tmp_path_factory.mktemp("deep") / "model", "qwen3_vl"), dtype="float32")
    yield Decoder(opened)
    opened.close()


def test_arms_parse() -> None:
    assert parse_arm("elastic:0.5") == ElasticCache("", 0.5) != HeavyHitters("", 0.5)
    assert parse_arm("h2o:0.2@prompt") == HeavyHitters("", 0.2, "prompt") != HeavyHitters("", 0.2)
    assert parse_arm("local:1") == MostRecent("", 1.0)
    assert parse_arm("elastic:0.5+max") == ElasticCache("", 0.5, "window", "max") != ElasticCache("", 0.5)
    wrong = (
        "elastic",
        "elastic:1.1",
        "elastic:0.5@",
        "elastic:0.5@window2",
        "elastic:0.5+min",
        "h2o:-1",
        "local:x",
        "h2o:0+max",
    )
    for text in (*wrong, "local:@prompt"):
        with pytest.raises(ValueError, match="an arm must be one of"):
            parse_arm(text)


def test_attention_is_transformers_own(decoder: Decoder) -> None:
    group = group_of(decoder, 1)
    text = decoder.engine.text_model
    system_prompt = decoder.tokens([group.system_prompt])
    embeds = torch.cat([system_prompt.embeds, group.context.embeds], 1)
    positions = torch.cat([system_prompt.positions, group.context.positions], 2)
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
    from ctxwin_evals.arms import compress

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
    alone = decoder.read(group.behind_system_prompt(len(group)), queries, group.begin)
    for arm in ("h2o:0", "local:0"):
        served = parse_arm(arm).serve(group)
        have = decoder.read(group.memory([s.spans for s in served if s]), queries, group.begin)
        torch.testing.assert_close(have, alone)
    assert not torch.allclose(alone, decoder.read(exact, queries, group.begin))


@pytest.mark.parametrize("family", ["decoder", "mla"])
def test_chunks_are_merged_layer_by_layer(family: str, request: pytest.FixtureRequest) -> None:
    decoder: Decoder = request.getfixturevalue(family)
    group = text_group(decoder) if family == "mla" else group_of(decoder)
    lead, tokens = group.system_prompt_span.tokens, group.context_tokens
    served = parse_arm("elastic:0.3").serve(group)
    assert len({tuple(row) for row in chosen_anchors(group, lead, tokens, 0.3)}) > 1  # layers differ
    for b, one in enumerate(served):
        assert one is not None and len(one.spans) == 1
        k = torch.cat([s.k for s in group.exact[b]], 1)
        v = torch.cat([s.v for s in group.exact[b]], 1)
        for layer, anchors in enumerate(chosen_anchors(group, lead, tokens, 0.3, b)):
            assert {0, tokens - 1} <= set(anchors)
            nearest = [min(anchors, key=lambda a, t=t: (abs(a - t), a)) for t in range(tokens)]
            for i, anchor in enumerate(anchors):
                bucket = [t for t in range(tokens) if nearest[t] == anchor]
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
    lead, tokens = group.system_prompt_span.tokens, group.context_tokens
    count = ceil(0.4 * tokens)
    for b, (h2o, local) in enumerate(zip(*(parse_arm(f"{m}:0.4").serve(group) for m in ("h2o", "local")), strict=True)):
        assert h2o is not None and local is not None
        k = torch.cat([s.k for s in group.exact[b]], 1)
        assert torch.equal(local.spans[0].k, k[:, -count:])
        for layer, sums in enumerate(attention_of(group)[:, b, lead:].tolist()):
            top = sorted(range(tokens - 1), key=lambda t: -sums[t])[: count - 1]
            assert torch.equal(h2o.spans[0].k[layer], k[layer, [*sorted(top), tokens - 1]])


@pytest.mark.parametrize("family", ["decoder", "mla", "deepstack"])
@pytest.mark.parametrize("method", ["elastic", "h2o", "local"])
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
    if method == "elastic":  # as the engine itself does
        layout, sampling = group.segments(0, group.items[0].placed, None), Sampling(hold=0.3, merge_prompt=True)
        (rows,) = decoder.engine.forced_logprobs(layout, [(query, answer)], best=-1, sampling=sampling)
        want = forced_logits(decoder, memory, [query], group.begin, [answer], served.policy)[0].log_softmax(-1)
        have = torch.tensor([[row[token] for token in range(want.shape[1])] for row in rows[:-1]])
        torch.testing.assert_close(have, want, atol=1e-4, rtol=1e-4)
    whole = parse_arm(f"{method}:1@prompt").serve(group)[0]
    assert whole is not None
    want = forced_logits(decoder, memory, [query], group.begin, [answer])[0]
    have = forced_logits(decoder, memory, [query], group.begin, [answer], whole.policy)[0]
    torch.testing.assert_close(have, want, atol=1e-4, rtol=1e-4)
    assert torch.allclose(  # a policy has no state of its own: a second answer is as the first
        have, forced_logits(decoder, memory, [query], group.begin, [answer], whole.policy)[0]
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
            alone = generate(
                decoder, part, [queries[0]], group.begin, forced=[[7 + b, 9 + b, 11 + b, 0]], policy=policy.of([b])
            )[0]
            torch.testing.assert_close(together.logits()[b], alone.logits[-1], atol=1e-4, rtol=1e-4)


def test_served_spans_are_the_stored_ones(decoder: Decoder) -> None:
    """What is thinned out before the question is not computed again when it comes."""
    group = group_of(decoder, 1)
    first = parse_arm("elastic:0.5").serve(group)
    del group.exact
    runs: list[Any] = []
    decoder_run = decoder.run
    try:
        decoder.run = lambda *a, **k: runs.append(a) or decoder_run(*a, **k)  # type: ignore[method-assign, func-returns-value]
        assert parse_arm(" elastic:0.5").serve(group) is first
    finally:
        del decoder.run  # type: ignore[method-assign]
    assert not runs


@pytest.mark.parametrize("moment", ["", "@prompt"])
def test_variants_choose_other_anchors(decoder: Decoder, moment: str) -> None:
    """By head each head is merged like a model of that head alone; shared, all layers take one choice; max is no sum."""
    group, kept = group_of(decoder), 0.3
    lead, tokens = group.system_prompt_span.tokens, group.context_tokens
    weights = {layer: torch.zeros(0) for layer in range(decoder.layers)}
    memory = group.behind_system_prompt(len(group))
    whole = concatenated([decoder.tokens([group.system_prompt] * len(group)), group.context])
    empty = Memory(memory.k[:, :, :, :0], memory.v[:, :, :, :0]).grown(whole.count)
    decoder.run(whole, empty, torch.arange(whole.count), watch=lambda layer, w: weights.update({layer: w.float()}))
    all_weights = torch.stack([weights[layer] for layer in range(decoder.layers)])  # [L, B, heads, T, S]
    heads = empty.k.shape[2]
    by_head = all_weights.sum(3).unflatten(2, (heads, -1)).mean(3)[..., lead:]
    served = {by: parse_arm(f"elastic:{kept}{moment}+{by}").serve(group) for by in ("max", "heads", "shared")}
    if moment:
        seen = {by: s[0].policy.seen for by, s in served.items() if s[0] is not None and s[0].policy is not None}
        torch.testing.assert_close(seen["heads"][:, 0, :, lead:], by_head[:, 0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(seen["max"][:, 0], all_weights.amax(3).mean(2)[:, 0], atol=1e-5, rtol=1e-4)
        query, answer = decoder.query(group.items[0].query), [5 + i for i in range(6)]
        logits = {}
        for by, entries in served.items():
            assert entries[0] is not None
            one = Memory(group.memory(group.exact).k[:, :1], group.memory(group.exact).v[:, :1])
            logits[by] = forced_logits(decoder, one, [query], group.begin, [answer], entries[0].policy)[0]
        assert not torch.allclose(logits["max"], logits["heads"]) and not torch.allclose(
            logits["heads"], logits["shared"]
        )
        return
    count = ceil(kept * tokens - 1e-9)
    exact = group.memory(group.exact)
    sums = {
        "max": all_weights.amax(3).mean(2)[:, :, None, lead:].expand_as(by_head),
        "heads": by_head,
        "shared": by_head.mean((0, 2), keepdim=True).expand_as(by_head),
    }
    for by, rows in served.items():
        for layer in range(decoder.layers):
            for head in range(heads):
                ranked = sorted(range(1, tokens - 1), key=lambda t: -sums[by][layer, 0, head, t])
                anchors = sorted([0, tokens - 1, *ranked[: count - 2]])
                near = [min(range(count), key=lambda i: (abs(anchors[i] - t), i)) for t in range(tokens)]
                want = torch.stack(
                    [exact.k[layer, 0, head, lead:][[n == i for n in near]].mean(0) for i in range(count)]
                )
                assert rows[0] is not None
                torch.testing.assert_close(rows[0].spans[0].k[layer, :, head], want)
