"""What the arms must be by definition, whatever the model; on a random one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch

from ctxwin.engines.segments import Segment
from ctxwin.kv.patch import compress
from ctxwin.kv.pooling import fit_basis
from ctxwin.kv.relocate import relocate
from ctxwin_evals import decoder as decoder_module
from ctxwin_evals.arms import BASES, Served, parse_arm, reuse
from ctxwin_evals.arms.tokens import recompute
from ctxwin_evals.decoder import Decoder
from ctxwin_evals.group import Group
from ctxwin_evals.metrics import kl_divergence
from ctxwin_evals.patching import Patcher, make_weight
from ctxwin_evals.tasks.tiny import TASKS

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

HEADER = "You watch a camera."


@pytest.fixture(scope="module")
def decoder(engine: HFEngine) -> Decoder:
    return Decoder(engine)


def group_of(decoder: Decoder, task: str, frames: int = 4, count: int = 3, turnover: float = 0.0) -> Group:
    items = [TASKS[task].case(0, i, (frames,), turnover) for i in range(count)]
    return Group(decoder, items, Patcher(decoder.spec, dtype=torch.float32), HEADER)


def logits(group: Group, served: Sequence[Served | None]) -> torch.Tensor:
    assert all(served)
    memory = group.memory([s.spans for s in served if s])
    return group.decoder.read(memory, [item.query for item in group.items], group.begin)


def worst_kl(group: Group, arm: str, reference: str | torch.Tensor = "reprefill") -> float:
    want = logits(group, parse_arm(reference).serve(group)) if isinstance(reference, str) else reference
    have = logits(group, parse_arm(arm).serve(group))
    return max(kl_divergence(p.numpy(), q.numpy()) for p, q in zip(want, have, strict=True))


def test_batches_equal_the_engine(engine: HFEngine, decoder: Decoder) -> None:
    group = group_of(decoder, "multi_hop")
    read = logits(group, parse_arm("reprefill").serve(group))
    blind = logits(group, parse_arm("blind").serve(group))
    system_prompt = engine.encode_system_prompt(HEADER)
    for b, item in enumerate(group.items):
        encoded = [engine.encode(chunk) for chunk in item.load()]
        layout, start = [Segment(system_prompt, 0)], system_prompt.advance
        for one in encoded:
            layout.append(Segment(one, start))
            start += one.advance
        query = engine.encode_query(item.query)
        torch.testing.assert_close(read[b], engine.logits(layout, query), atol=1e-5, rtol=1e-5)
        alone = [engine.prefill([Segment(system_prompt, 0)], one, system_prompt.advance) for one in encoded]
        moved = [layout[0], *(Segment(p.encoded, p.start, span=s) for p, s in zip(layout[1:], alone, strict=True))]
        torch.testing.assert_close(blind[b], engine.logits(moved, query), atol=1e-5, rtol=1e-5)
        last = engine.prefill(layout[:-1], encoded[-1], layout[-1].start)
        torch.testing.assert_close(group.exact[b][-1].k, last.k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(group.exact[b][-1].v, last.v, atol=1e-5, rtol=1e-5)


def test_a_batch_of_one_equals_the_batch(decoder: Decoder) -> None:
    whole = group_of(decoder, "multi_hop")
    for b, item in enumerate(whole.items):
        single = Group(decoder, [item], whole.patcher, HEADER)
        torch.testing.assert_close(single.exact[0][-1].k, whole.exact[b][-1].k, atol=1e-5, rtol=1e-5)


def test_full_rank_is_exact_and_no_rank_is_blind(decoder: Decoder) -> None:
    group = group_of(decoder, "multi_hop")
    assert worst_kl(group, "blind") > 1e-4  # there is something to restore
    assert worst_kl(group, "patched:full") < 1e-6
    assert worst_kl(group, "patched:0", "blind") < 1e-12
    assert worst_kl(group, "patched:2") < worst_kl(group, "patched:1") < worst_kl(group, "blind") * 1.5


def test_first_k_of_everything_is_exact_and_of_nothing_is_blind(decoder: Decoder) -> None:
    group = group_of(decoder, "multi_hop", frames=5)
    assert worst_kl(group, "first_k:all") < 1e-6
    assert worst_kl(group, "first_k:10000") < 1e-6
    assert worst_kl(group, "first_k:0", "blind") == 0.0
    assert worst_kl(group, "first_k:3") > 1e-6


def test_what_is_recomputed_stands_behind_what_is_served(engine: HFEngine, decoder: Decoder) -> None:
    """The one pass over scattered tokens equals computing head after head behind the cache as it then is."""
    group, k = group_of(decoder, "multi_hop", frames=3, count=1), 4
    served = parse_arm(f"first_k:{k}").serve(group)[0]
    assert served is not None
    past = [group.system_prompt_span, group.blind[0][0]]
    for i in (1, 2):
        place = group.places[i]
        memory, _ = decoder.append(
            group.context.pick(torch.arange(place.slot, place.slot + k)[None]), decoder.memory([past])
        )
        head = memory.span(0, memory.slots - k, memory.slots, group.position_rows(i)[:, :k], place.start)
        torch.testing.assert_close(served.spans[i].k[:, :k], head.k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(served.spans[i].v[:, :k], head.v, atol=1e-5, rtol=1e-5)
        past += [head, group.blind[0][i].slice(k, place.tokens)]


def test_layers_one_by_one_equal_all_at_once(decoder: Decoder) -> None:
    group = group_of(decoder, "multi_hop", frames=2)
    whole, hidden = decoder.append(group.context, group.behind_system_prompt(3))
    memory, at = group.behind_system_prompt(3).grown(group.context.count), torch.arange(group.context.count)
    at, x = at + group.system_prompt_span.tokens, None
    for layer in range(decoder.layers):
        x = decoder.run(group.context, memory, at, layers=range(layer, layer + 1), hidden=x)
    torch.testing.assert_close(x, hidden)
    torch.testing.assert_close(memory.k, whole.k)


def test_blocks_equal_the_whole(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(decoder, "multi_hop")
    whole, hidden = decoder.append(group.context, group.behind_system_prompt(3))
    chosen = torch.zeros(len(group), group.context_tokens, dtype=torch.bool)
    chosen[:, [2, 3, 9, 14, 30, 31]] = True
    rows = recompute(group, group.blind, chosen)
    monkeypatch.setattr(decoder_module, "AT_ONCE", 4)
    blocks, states = decoder.append(group.context, group.behind_system_prompt(3))
    torch.testing.assert_close(states, hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(blocks.v, whole.v, atol=1e-5, rtol=1e-5)
    for row, again in zip(rows, recompute(group, group.blind, chosen), strict=True):
        torch.testing.assert_close(row[-1].k, again[-1].k, atol=1e-5, rtol=1e-5)


def test_what_attention_looked_at_is_a_distribution_over_slots(decoder: Decoder) -> None:
    group = group_of(decoder, "multi_hop", frames=2)
    seen: list[torch.Tensor] = []
    watched, hidden = decoder.append(group.context, group.behind_system_prompt(3), lambda layer, w: seen.append(w))
    plain, unwatched = decoder.append(group.context, group.behind_system_prompt(3))
    torch.testing.assert_close(hidden, unwatched, atol=1e-5, rtol=1e-5)
    assert len(seen) == decoder.layers
    assert seen[0].shape == (3, 4, group.context.count, watched.slots)
    torch.testing.assert_close(seen[1].sum(-1), torch.ones(3, 4, group.context.count))
    assert not seen[0][..., 0, group.system_prompt_span.tokens + 1 :].any()  # nothing behind itself
    assert plain.slots == watched.slots


def test_a_mask_hides_what_it_should(decoder: Decoder) -> None:
    """Under a mask that hides chunk A from chunk B, B is what it is without A at its own place (Kamera, section 2)."""
    group = group_of(decoder, "multi_hop", frames=2)
    lead, (a, b) = group.system_prompt_span.tokens, group.places
    memory = group.behind_system_prompt(3).grown(group.context.count)
    slots = torch.arange(memory.slots)
    mask = slots <= (torch.arange(group.context.count) + lead)[:, None]
    mask[b.slot : b.end, lead + a.slot : lead + a.end] = False
    decoder.run(group.context, memory, torch.arange(lead, memory.slots), mask=mask)
    alone, _ = decoder.append(group.tokens(1).moved(b.start), group.behind_system_prompt(3))
    torch.testing.assert_close(memory.k[:, :, :, lead + b.slot :], alone.k[:, :, :, lead:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(memory.v[:, :, :, lead + b.slot :], alone.v[:, :, :, lead:], atol=1e-5, rtol=1e-5)


def test_an_orbit_over_its_own_order_alone_is_the_exact_patch(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(decoder, "order", frames=5)
    other = logits(group, parse_arm("orbit:full").serve(group))
    monkeypatch.setattr(reuse, "other_orders", lambda frames, count, *seed: [tuple(frames)])
    assert worst_kl(group, "orbit:full") < 1e-6
    assert max(kl_divergence(a.numpy(), b.numpy()) for a, b in zip(other, group_read(group), strict=True)) > 1e-6


def group_read(group: Group) -> torch.Tensor:
    return logits(group, parse_arm("reprefill").serve(group))


def test_an_orbit_needs_two_antecedents(decoder: Decoder) -> None:
    group = group_of(decoder, "multi_hop", frames=2)
    assert parse_arm("orbit:4").serve(group) == [None] * 3
    group = group_of(decoder, "order", frames=3)
    served = parse_arm("orbit:4").serve(group)
    assert all(s and s.extra["orders"] == 1 and s.extra["moved"] > 0 for s in served)


def test_removal_at_full_rank_is_the_reprefill_of_what_stayed(decoder: Decoder) -> None:
    group = group_of(decoder, "slide_needed")
    assert worst_kl(group, "survivor") > 1e-5
    assert worst_kl(group, "removal:full") < 1e-6
    assert worst_kl(group, "removal:0", "survivor") < 1e-12


def test_survivors_keep_values_bit_for_bit(decoder: Decoder) -> None:
    group = group_of(decoder, "slide_distractor")
    for kept, earlier in zip(group.survivors, group.earlier, strict=True):
        assert all(torch.equal(a.v, b.v) for a, b in zip(kept, earlier[1:], strict=True))


def test_stale_and_fresh_agree_without_turnover_and_part_with_it(decoder: Decoder) -> None:
    same, other = group_of(decoder, "recall"), group_of(decoder, "recall", turnover=1.0)
    reference = group_read(same)
    assert worst_kl(same, "stale:full", reference) < 1e-6
    assert worst_kl(same, "update:full", reference) < 1e-6
    reference = group_read(other)
    assert worst_kl(other, "update:full", reference) < 1e-6
    assert worst_kl(other, "stale:full", reference) > 1e-5
    base = BASES["recall"].serve(other)
    assert all(torch.equal(s.spans[-1].v, c[-1].v) for s, c in zip(base, other.canonical, strict=True) if s)


def test_bytes_are_those_of_the_patches(decoder: Decoder) -> None:
    group = group_of(decoder, "multi_hop")
    served = parse_arm("patched:3").serve(group)[0]
    assert served is not None
    layers = len(group.patch(0, 1, 3).layers)
    tokens, width = group.places[1].tokens, decoder.spec.width // decoder.spec.layers
    assert served.stored == 3 * 3 * (tokens + layers * width) * 4  # three chunks, rank 3, float32
    assert served.over == 3 * tokens * decoder.spec.width * 2


def test_a_sweep_cuts_what_direct_compression_gives(decoder: Decoder) -> None:
    group = group_of(decoder, "multi_hop", count=1)
    weight = make_weight("output", decoder.engine.text_model, decoder.spec, group.exact[0][1])
    for layout in ("joint", "per_layer"):
        patcher = Patcher(decoder.spec, layout, weight=weight)  # type: ignore[arg-type]
        held: dict[object, object] = {}
        lost = group.deficit(0, 2)
        patcher.floor = 5
        cut = patcher.patch(lambda lost=lost: lost, 2, held, "x")  # type: ignore[misc, arg-type]
        assert patcher.patch(lambda: pytest.fail("decomposed twice"), 5, held, "x").rank == 5  # type: ignore[arg-type]
        direct = compress(lost, decoder.spec, rank=2, layout=layout, weight=weight)  # type: ignore[arg-type]
        assert cut.nbytes == direct.nbytes
        for layer in cut.layers:
            for a, b in zip(cut.delta(layer) or (), direct.delta(layer) or (), strict=True):
                torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


def test_a_shared_basis_of_full_rank_restores_everything(decoder: Decoder) -> None:
    group = group_of(decoder, "multi_hop", count=1)
    basis = fit_basis([group.deficit(0, place) for place in (1, 2, 3)], decoder.spec, 10_000, dtype=torch.float32)
    group.patcher = Patcher(decoder.spec, "shared", dtype=torch.float32, basis=basis)
    assert worst_kl(group, "patched:full") < 1e-6
    assert worst_kl(group, "patched:0", "blind") < 1e-12
    assert group.patcher.basis_bytes(1) == basis.nbytes // basis.rank


def test_canonicals_do_not_depend_on_where_they_stand(decoder: Decoder) -> None:
    group = group_of(decoder, "multi_hop", count=1)
    for i, (moved, canonical) in enumerate(zip(group.blind[0], group.canonical[0], strict=True)):
        assert moved.start == group.places[i].start
        assert torch.equal(moved.v, canonical.v)
        back = relocate(moved, decoder.spec, 0)
        torch.testing.assert_close(back.k, canonical.k, atol=1e-5, rtol=1e-5)
