"""What the arms must be by definition, whatever the model; on a random one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
import torch

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Piece
from ctxwin.evals import arms as arms_module
from ctxwin.evals.arms import Served, parse_arm
from ctxwin.evals.group import Group
from ctxwin.evals.metrics import kl_divergence
from ctxwin.evals.patching import Patcher, make_weight
from ctxwin.evals.reader import Reader
from ctxwin.evals.run import _rendered
from ctxwin.evals.tasks import TASKS
from ctxwin.operator import compress, fit_basis, relocate

if TYPE_CHECKING:
    from ctxwin.engines.hf import HFEngine

HEADER = "You watch a camera."


@pytest.fixture(scope="module")
def reader(engine: HFEngine) -> Reader:
    return Reader(engine, HEADER, _rendered(TASKS["multi_hop"].case(0, 0, (2,)))[0])


def group_of(reader: Reader, task: str, frames: int = 4, count: int = 3, turnover: float = 0.0) -> Group:
    cases = [TASKS[task].case(0, i, (frames,), turnover) for i in range(count)]
    return Group(reader, cases, Patcher(reader.spec, dtype=torch.float32), _rendered)


def logits(group: Group, served: Sequence[Served | None]) -> torch.Tensor:
    assert all(served)
    return group.reader.read([s.spans for s in served if s], [c.question for c in group.cases])


def worst_kl(group: Group, arm: str, reference: str | torch.Tensor = "reprefill") -> float:
    want = logits(group, parse_arm(reference).serve(group)) if isinstance(reference, str) else reference
    have = logits(group, parse_arm(arm).serve(group))
    return max(kl_divergence(p.numpy(), q.numpy()) for p, q in zip(want, have, strict=True))


def test_batches_equal_the_engine(engine: HFEngine, reader: Reader) -> None:
    group = group_of(reader, "multi_hop")
    read = logits(group, parse_arm("reprefill").serve(group))
    blind = logits(group, parse_arm("blind").serve(group))
    header = engine.encode_header(HEADER)
    for b, case in enumerate(group.cases):
        encoded = [engine.encode(Chunk.image(p)) for p in _rendered(case)]
        layout, start = [Piece(header, 0)], header.advance
        for one in encoded:
            layout.append(Piece(one, start))
            start += one.advance
        query = engine.encode_query(case.question)
        torch.testing.assert_close(read[b], engine.logits(layout, query), atol=1e-5, rtol=1e-5)
        alone = [engine.prefill([Piece(header, 0)], one, header.advance) for one in encoded]
        moved = [layout[0], *(Piece(p.encoded, p.start, span=s) for p, s in zip(layout[1:], alone, strict=True))]
        torch.testing.assert_close(blind[b], engine.logits(moved, query), atol=1e-5, rtol=1e-5)
        last = engine.prefill(layout[:-1], encoded[-1], layout[-1].start)
        torch.testing.assert_close(group.exact[b][-1].k, last.k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(group.exact[b][-1].v, last.v, atol=1e-5, rtol=1e-5)


def test_a_batch_of_one_equals_the_batch(reader: Reader) -> None:
    whole = group_of(reader, "multi_hop")
    for b, case in enumerate(whole.cases):
        single = Group(reader, [case], whole.patcher, _rendered)
        torch.testing.assert_close(single.exact[0][-1].k, whole.exact[b][-1].k, atol=1e-5, rtol=1e-5)


def test_full_rank_is_exact_and_no_rank_is_blind(reader: Reader) -> None:
    group = group_of(reader, "multi_hop")
    assert worst_kl(group, "blind") > 1e-4  # there is something to restore
    assert worst_kl(group, "patched:full") < 1e-6
    assert worst_kl(group, "patched:0", "blind") < 1e-12
    assert worst_kl(group, "patched:2") < worst_kl(group, "patched:1") < worst_kl(group, "blind") * 1.5


def test_first_k_of_everything_is_exact_and_of_nothing_is_blind(reader: Reader) -> None:
    group = group_of(reader, "multi_hop", frames=5)
    assert worst_kl(group, "first_k:all") < 1e-6
    assert worst_kl(group, "first_k:10000") < 1e-6
    assert worst_kl(group, "first_k:0", "blind") == 0.0
    assert worst_kl(group, "first_k:3") > 1e-6


def test_first_k_computes_heads_behind_what_is_served(engine: HFEngine, reader: Reader) -> None:
    """The one masked forward equals computing head after head behind the cache as it then is."""
    group, k = group_of(reader, "multi_hop", frames=3, count=1), 4
    served = parse_arm(f"first_k:{k}").serve(group)[0]
    assert served is not None
    past = [reader.header, group.blind[0][0]]
    for i in (1, 2):
        embeds = group.embeds[:, i, :k]
        block = arms_module.stack([past])
        made, _ = reader.forward(embeds, reader.positions[:, :k] + reader.start(i), block)
        head = made.cut(0, 0, k, reader.positions[:, :k], reader.start(i))
        torch.testing.assert_close(served.spans[i].k[:, :k], head.k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(served.spans[i].v[:, :k], head.v, atol=1e-5, rtol=1e-5)
        past += [head, group.blind[0][i].slice(k, reader.frame.tokens)]


def test_an_orbit_over_its_own_order_alone_is_the_exact_patch(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(reader, "order", frames=5)
    other = logits(group, parse_arm("orbit:full").serve(group))
    monkeypatch.setattr(arms_module, "other_orders", lambda frames, count, seed: [tuple(frames)])
    assert worst_kl(group, "orbit:full") < 1e-6
    assert max(kl_divergence(a.numpy(), b.numpy()) for a, b in zip(other, group_read(group), strict=True)) > 1e-6


def group_read(group: Group) -> torch.Tensor:
    return logits(group, parse_arm("reprefill").serve(group))


def test_an_orbit_needs_two_antecedents(reader: Reader) -> None:
    group = group_of(reader, "multi_hop", frames=2)
    assert parse_arm("orbit:4").serve(group) == [None] * 3
    group = group_of(reader, "order", frames=3)
    served = parse_arm("orbit:4").serve(group)
    assert all(s and s.extra["orders"] == 1 and s.extra["moved"] > 0 for s in served)


def test_removal_at_full_rank_is_the_reprefill_of_what_stayed(reader: Reader) -> None:
    group = group_of(reader, "slide_needed")
    assert worst_kl(group, "survivor") > 1e-5
    assert worst_kl(group, "removal:full") < 1e-6
    assert worst_kl(group, "removal:0", "survivor") < 1e-12


def test_survivors_keep_values_bit_for_bit(reader: Reader) -> None:
    group = group_of(reader, "slide_distractor")
    for kept, earlier in zip(group.kept, group.earlier, strict=True):
        assert all(torch.equal(a.v, b.v) for a, b in zip(kept, earlier[1:], strict=True))


def test_stale_and_fresh_agree_without_turnover_and_part_with_it(reader: Reader) -> None:
    same, other = group_of(reader, "recall"), group_of(reader, "recall", turnover=1.0)
    reference = group_read(same)
    assert worst_kl(same, "stale:full@0", reference) < 1e-6
    assert worst_kl(same, "recall:full@0", reference) < 1e-6
    reference = group_read(other)
    assert worst_kl(other, "recall:full@1", reference) < 1e-6
    assert worst_kl(other, "stale:full@1", reference) > 1e-5


def test_bytes_are_those_of_the_patches(reader: Reader) -> None:
    group = group_of(reader, "multi_hop")
    served = parse_arm("patched:3").serve(group)[0]
    assert served is not None
    layers = len(group.patch(0, 1, 3).layers)
    tokens, width = reader.frame.tokens, reader.spec.width // reader.spec.layers
    assert served.stored == 3 * 3 * (tokens + layers * width) * 4  # three chunks, rank 3, float32
    assert served.over == 3 * tokens * reader.spec.width * 2


def test_a_sweep_cuts_what_direct_compression_gives(reader: Reader) -> None:
    group = group_of(reader, "multi_hop", count=1)
    weight = make_weight("output", reader.engine._model, reader.spec, group.exact[0][1])
    for layout in ("joint", "per_layer"):
        patcher = Patcher(reader.spec, layout, weight=weight)  # type: ignore[arg-type]
        held: dict[object, object] = {}
        lost = group.deficit(0, 2)
        patcher.patch(lost, 5, held, "x")  # type: ignore[arg-type]
        cut = patcher.patch(lost, 2, held, "x")  # type: ignore[arg-type]
        direct = compress(lost, reader.spec, rank=2, layout=layout, weight=weight)  # type: ignore[arg-type]
        assert cut.nbytes == direct.nbytes
        for layer in cut.layers:
            for a, b in zip(cut.delta(layer) or (), direct.delta(layer) or (), strict=True):
                torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


def test_a_shared_basis_of_full_rank_restores_everything(reader: Reader) -> None:
    group = group_of(reader, "multi_hop", count=1)
    basis = fit_basis([group.deficit(0, place) for place in (1, 2, 3)], reader.spec, 10_000, dtype=torch.float32)
    group.patcher = Patcher(reader.spec, "shared", dtype=torch.float32, basis=basis)
    assert worst_kl(group, "patched:full") < 1e-6
    assert worst_kl(group, "patched:0", "blind") < 1e-12
    assert group.patcher.basis_bytes(1) == basis.nbytes // basis.rank


def test_canonicals_do_not_depend_on_where_they_stand(reader: Reader) -> None:
    group = group_of(reader, "multi_hop", count=1)
    for i, (moved, canonical) in enumerate(zip(group.blind[0], group.canonical[0], strict=True)):
        assert moved.start == reader.start(i)
        assert torch.equal(moved.v, canonical.v)
        back = relocate(moved, reader.spec, 0)
        torch.testing.assert_close(back.k, canonical.k, atol=1e-5, rtol=1e-5)
