"""The token axis: what arms must be by definition, on random models."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import pytest
import torch

from ctxwin import Fidelity, Window
from ctxwin.kv.merge import most_important
from ctxwin.kv.relocate import relocate
from ctxwin.window import lanes
from ctxwin_evals.arms import parse_arm
from ctxwin_evals.arms.layers import falling
from ctxwin_evals.arms.tokens import Mpic, attended, changes, quota, recompute

from .conftest import HEADER

if TYPE_CHECKING:
    from ctxwin_evals.group import Group

    from .conftest import Bench

ALL = ("first_k:all", "epic:all", "mpic:all", "cacheblend:1", "cacheblend-oracle:1", "quest:1")
NONE = ("first_k:0", "epic:0", "cacheblend:0", "cacheblend-oracle:0", "quest:0")


def test_all_tokens_are_exact_and_none_are_blind_on_every_family(family: Bench) -> None:
    for group in family.any():
        assert family.apart(group, "blind") > 1e-6  # there is something to restore
        for arm in ALL:
            family.same(group, arm, "reprefill")
            assert family.serve(group, arm)[0].computed <= group.context_tokens
        for arm in NONE:
            family.same(group, arm, "blind", atol=0.0)
            one = family.serve(group, arm)[0]
            assert (one.computed, one.forwards, one.extra["recomputed"]) == (0, 0, 0.0)


TOKEN_ARMS = ["mpic:2", "epic:2", "cacheblend:0.4", "cacheblend-oracle:0.4", "quest:0.4", "full-reuse"]
LAYER_ARMS = ["layers:0.34", "lowrank-k:2"]


@pytest.mark.parametrize("arm", TOKEN_ARMS + LAYER_ARMS)
def test_a_part_is_neither_and_a_batch_is_its_items(bench: Bench, arm: str) -> None:
    group = bench.tiny(count=3)
    whole = bench.serve(group, arm)
    assert bench.apart(group, arm) > 1e-7
    assert bench.apart(group, arm, "blind") > (1e-9 if arm in TOKEN_ARMS else 1e-12)
    for b, item in enumerate(group.items):
        alone = bench.serve(bench.of([item]), arm)[0]
        for cost in ("computed", "forwards", "extra", "stored", "over"):
            assert getattr(alone, cost) == getattr(whole[b], cost)
        for x, y in zip(alone.spans, whole[b].spans, strict=True):
            torch.testing.assert_close(x.k, y.k, atol=1e-4, rtol=0)
            torch.testing.assert_close(x.v, y.v, atol=1e-4, rtol=0)


def test_mpic_computes_text_and_the_head_of_each_picture(bench: Bench) -> None:
    group = bench.mixed()
    chosen = Mpic("", 2).chosen(group)[0]
    want = torch.ones(group.context_tokens, dtype=torch.bool)
    pictures = 0
    for place, encoded in zip(group.places, group.chunks[0], strict=True):
        for media in encoded.media:
            want[place.slot + media.offset + 2 : place.slot + media.offset + media.tokens] = False
            pictures += 1
    assert pictures == 2
    assert torch.equal(chosen, want)
    one = bench.serve(group, "mpic:2")[0]
    assert one.computed == int(want.sum())
    assert one.extra["recomputed"] == pytest.approx(float(want.float().mean()))
    assert int(group.pictured(2).sum()) == 4
    assert torch.equal(group.pictured(1000), group.pictured())


def test_a_window_links_as_mpic_does(family: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Fidelity.recompute` on the transformers engine against this arm, token by token."""
    if not family.sees:
        pytest.skip("a model without pictures computes all text")
    monkeypatch.setattr(lanes, "SAVES_MS", math.inf)  # pictures this small are computed rather
    engine, group = family.decoder.engine, family.mixed()
    (item,) = group.items
    chunks = [item.load()[i] for i in item.placed]
    for chunk in chunks:  # forms the canonicals
        clean = Window(engine, HEADER, fidelity=Fidelity("blind"))
        clean.append(chunk)
        clean.ask("q", max_tokens=1)
    linked = Fidelity("patched", recompute=2, advanced={"forbid": ("resident", "survivor", "patched")})
    window = Window(engine, HEADER, fidelity=linked)
    window.extend(chunks)
    assert [e.lane for e in window.plan().entries] == ["computed", "partial", "partial", "computed"]
    usage = window.ask("q", max_tokens=1).usage
    one = family.serve(group, "mpic:2")[0]
    assert usage.computed_tokens == one.computed + engine.encode_query("q").tokens
    for placed, want in zip(window.snapshot().placed, one.spans, strict=True):
        assert placed.kv is not None
        found = engine.repo.get_span(placed.kv.span)
        assert found is not None
        got = relocate(found[0], engine.spec.kv, want.start)
        torch.testing.assert_close(got.k, want.k, atol=1e-4, rtol=0)
        torch.testing.assert_close(got.v, want.v, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dummy", [1e3, math.nan])
def test_what_stands_where_text_is_does_not_matter(bench: Bench, monkeypatch: pytest.MonkeyPatch, dummy: float) -> None:
    group = bench.mixed()
    before = bench.serve(group, "mpic:1")[0]
    monkeypatch.setattr(Mpic, "dummy", dummy)
    base = Mpic("", 1).base(group)
    text = ~group.pictured()[0, group.places[1].slot : group.places[1].end]
    assert base[0][1].v[:, text].isnan().all() if math.isnan(dummy) else (base[0][1].v[:, text] == dummy).all()
    for x, y in zip(before.spans, bench.serve(group, "mpic:1")[0].spans, strict=True):
        assert torch.equal(x.k, y.k)
        assert torch.equal(x.v, y.v)


def test_chunks_without_pictures_are_wholly_computed(family: Bench) -> None:
    """Where there is no picture at all, MPIC is re-prefill, and full reuse too: text sees all text."""
    group = family.texts()
    for arm in ("mpic:0", "full-reuse"):
        family.same(group, arm, "reprefill")
        assert family.serve(group, arm)[0].computed == group.context_tokens


def test_full_reuse_computes_text_as_if_there_were_no_pictures(bench: Bench) -> None:
    group = bench.mixed()
    one = bench.serve(group, "full-reuse")[0]
    text = ~group.pictured()[0]
    assert (one.computed, one.forwards) == (int(text.sum()), 2)
    at = text.nonzero()[:, 0][None]
    memory, _ = bench.decoder.append(group.context.pick(at), group.behind_system_prompt(1))
    lead = group.system_prompt_span.tokens
    have = torch.cat([span.v for span in one.spans], 1)
    torch.testing.assert_close(have[:, text], memory.v[:, 0, :, lead:].transpose(1, 2), atol=1e-5, rtol=0)
    blind = torch.cat([span.v for span in group.blind[0]], 1)
    assert torch.equal(have[:, ~text], blind[:, ~text])


def test_epic_is_first_k_under_its_own_name(bench: Bench) -> None:
    group = bench.mixed()
    bench.same(group, "epic:3", "first_k:3", atol=0.0)
    assert parse_arm("epic:3") != parse_arm("first_k:3")


def test_the_oracle_takes_what_lacks_most(bench: Bench) -> None:
    group = bench.tiny(frames=3)
    scores = changes(group)
    assert float(scores[:, : group.places[0].end].max()) < 1e-6 * float(scores.max())  # the first chunk lacks nothing
    for b in range(len(group)):
        lost = sum(float(group.deficit(b, i).energy.sum()) for i in range(len(group.places)))
        assert float(scores[b].sum()) == pytest.approx(lost, rel=1e-4)
    chosen = parse_arm("cacheblend-oracle:0.25").chosen(group)  # type: ignore[attr-defined]
    for row, score in zip(chosen, scores, strict=True):
        assert int(row.sum()) == quota(0.25, group.context_tokens)
        assert float(score[row].min()) >= float(score[~row].max())


def test_quest_takes_what_the_question_looks_at(bench: Bench) -> None:
    """Where values of all other slots cannot reach the question, what it looks at is what was put there."""
    group = bench.tiny(count=2)
    scores = attended(group)
    queries = [bench.decoder.query(item.query).tokens for item in group.items]
    heads, layers = 4, bench.decoder.layers
    assert all(0 < float(s.sum()) < heads * layers * q for s, q in zip(scores, queries, strict=True))
    # Keys of one placed token turned to what the question asks for: all of them look there.
    wanted = [5, group.places[2].slot + 3]
    for b, t in enumerate(wanted):
        _attract(bench, group, b, t)
    after = attended(group)
    assert [int(row.argmax()) for row in after] == wanted
    chosen = parse_arm(f"quest:{1 / group.context_tokens}").chosen(group)  # type: ignore[attr-defined]
    assert [row.nonzero()[:, 0].tolist() for row in chosen] == [[t] for t in wanted]


def _attract(bench: Bench, group: Group, b: int, t: int) -> None:
    """Makes an item's question look at placed token ``t``: its keys are those that the question's own queries meet best."""
    memory, query = group.memory([group.exact[b]]), bench.decoder.query(group.items[b].query)
    found: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: found.append(output))
        for layer in bench.decoder.engine.text_model.layers
    ]
    bench.decoder.append(bench.decoder.tokens([query], group.begin), memory)
    for hook in hooks:
        hook.remove()
    from ctxwin.kv.layout import SpanKV
    from ctxwin.kv.rope import angles, turn

    place = next(i for i, p in enumerate(group.places) if p.slot <= t < p.end)
    span, at = group.exact[b][place], t - group.places[place].slot
    k = span.k.clone()
    rope = bench.decoder.spec.rope
    spots = torch.from_numpy(query.positions) + group.begin
    for layer, q in enumerate(found):
        heads = q[0].view(q.shape[1], bench.decoder.spec.heads, -1, bench.decoder.spec.k_dim)
        turned = turn(rope, heads.flatten(1, 2), angles(rope, spots)).view_as(heads)
        k[layer, at] = 50 * turned.mean(dim=(0, 2))
    group.exact[b][place] = SpanKV(k, span.v, span.positions, span.start)


def test_a_choice_may_differ_by_item(bench: Bench) -> None:
    """Items with other numbers of chosen tokens are computed as each would be alone."""
    group = bench.tiny(count=3)
    chosen = torch.zeros(3, group.context_tokens, dtype=torch.bool)
    chosen[0, 10:20] = True
    chosen[2, [3, 30, 31]] = True
    rows = recompute(group, group.blind, chosen)
    assert all(torch.equal(x.k, y.k) for x, y in zip(rows[1], group.blind[1], strict=True))
    for b in (0, 2):
        single = bench.of([group.items[b]])
        for x, y in zip(recompute(single, single.blind, chosen[[b]])[0], rows[b], strict=True):
            torch.testing.assert_close(x.k, y.k, atol=1e-5, rtol=0)
            torch.testing.assert_close(x.v, y.v, atol=1e-5, rtol=0)


def test_indices_ascend_and_earlier_ones_win_ties() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    assert most_important(scores, 2).tolist() == [[1, 3], [0, 1]]
    assert most_important(scores, 0).shape == (2, 0)
    assert [quota(0.15, 66), quota(0.5, 3), quota(1.0, 7), quota(0.0, 7)] == [10, 2, 7, 0]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.15, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 27])
def test_the_filter_narrows_around_its_share(share: float, steps: int) -> None:
    shares = falling(share, steps)
    assert len(shares) == steps
    assert sum(shares) / steps == pytest.approx(share)
    assert all(0 <= b <= a <= 1 for a, b in itertools.pairwise(shares))
