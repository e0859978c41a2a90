"""Items of texts and pictures of different sizes: what batches cannot share still agrees with the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ctxwin.chunk import Chunk
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment
from ctxwin_evals.arms import parse_arms
from ctxwin_evals.decoder import Decoder
from ctxwin_evals.group import Group
from ctxwin_evals.items import Item, Scored, Task
from ctxwin_evals.metrics import kl_divergence
from ctxwin_evals.patching import Patcher
from ctxwin_evals.run import Runner, Settings, plan_jobs
from engines.oracle import teacher_forced

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ctxwin.engines.hf.engine import HFEngine

HEADER = "You watch a camera."


def chunks(seed: int) -> list[Chunk]:
    rng = np.random.default_rng(seed)
    small, wide = (rng.integers(0, 255, (28 * h, 28 * w, 3), dtype=np.uint8) for h, w in ((2, 2), (1, 3)))
    return [
        Chunk.text("a red circle"),
        Chunk.image(small, text="frame 1"),
        Chunk.image(wide),
        Chunk.text("the number of the square is now blue " * (1 + seed % 2)),
    ]


def item(seed: int, max_tokens: int = 5) -> Item:
    return Item(
        task="mixed", index=seed, load=lambda: chunks(seed), count=4, placed=(0, 1, 2, 3), query="what color is it?",
        target="red", doc_id=f"doc-{seed}", cluster=f"doc-{seed}", digest=f"mixed-{seed}", max_tokens=max_tokens,
    )  # fmt: skip


class Mixed(Task):
    name = "mixed"
    about = "texts and pictures"

    def items(self, n: int | None = None) -> Sequence[Item]:
        return [item(seed) for seed in range(3 if n is None else min(n, 3))]

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        return Scored(float(answer == target), answer)


def exact_layout(engine: HFEngine, seed: int) -> list[Segment]:
    system_prompt = engine.encode_system_prompt(HEADER)
    layout, start = [Segment(system_prompt, 0)], system_prompt.advance
    for chunk in chunks(seed):
        encoded = engine.encode(chunk)
        layout.append(Segment(encoded, start))
        start += encoded.advance
    return layout


@pytest.fixture(scope="module")
def decoder(engine: HFEngine) -> Decoder:
    return Decoder(engine)


def test_answers_and_their_distributions_are_the_engines(engine: HFEngine, tmp_path: Path) -> None:
    task = Mixed()
    runner = Runner(engine, Settings(dtype="float32"), tmp_path, [task])
    runner.run(plan_jobs(parse_arms("reprefill,blind,patched:full,patched:1,first_k:all"), [task]), None)
    for seed in range(3):
        layout, query = exact_layout(engine, seed), engine.encode_query("what color is it?")
        made = engine.generate(layout, query, Sampling(max_tokens=5))
        rows = {arm: row for (_, arm, index), row in runner.samples.rows.items() if index == seed}
        assert all(row.reference == made.text.strip() for row in rows.values())
        assert rows["reprefill"].answer == made.text.strip()
        for exact in ("patched:full", "first_k:all"):
            assert rows[exact].kl < 1e-6
            assert rows[exact].answer == made.text.strip()
        if len(made.token_ids) > 1:
            assert rows["patched:full"].forced_kl < 1e-6 < rows["blind"].forced_kl
        assert rows["blind"].kl > 1e-6
        assert rows["blind"].tokens == sum(p.encoded.tokens for p in layout) + query.tokens
        assert rows["blind"].media == 2
        assert rows["reprefill"].computed == rows["blind"].tokens - layout[0].encoded.tokens - query.tokens
        assert rows["blind"].computed == 0


def test_teacher_forcing_is_the_engines(engine: HFEngine, decoder: Decoder) -> None:
    from ctxwin_evals.generation import forced_logits

    group = Group(decoder, [item(1)], Patcher(decoder.spec), HEADER)
    layout, query = exact_layout(engine, 1), engine.encode_query("what color is it?")
    answer = [5, 9, 77]
    want = teacher_forced(engine, layout, query, answer)
    have = forced_logits(decoder, group.memory(group.exact), [query], group.begin, [answer])[0].log_softmax(-1)
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)


def test_items_of_other_sizes_do_not_share_a_group(decoder: Decoder) -> None:
    with pytest.raises(ValueError, match="same sizes"):
        Group(decoder, [item(0), item(1)], Patcher(decoder.spec), HEADER)


def test_pictures_are_told_from_texts(decoder: Decoder) -> None:
    group = Group(decoder, [item(0)], Patcher(decoder.spec), HEADER)
    pictured = group.pictured()[0]
    assert int(pictured.sum()) == sum(m.tokens for encoded in group.chunks[0] for m in encoded.media)
    assert not pictured[: group.places[0].end].any()
    assert not pictured[group.places[3].slot :].any()


def test_a_prompt_that_does_not_fit_is_unscored_and_says_why(engine: HFEngine, tmp_path: Path) -> None:
    class Long(Mixed):
        name = "long"

        def items(self, n: int | None = None) -> Sequence[Item]:
            return [
                Item(
                    task="long", index=0, load=lambda: [Chunk.text("now a red circle " * 400)], count=1, placed=(0,),
                    query="?", target="", doc_id="0", cluster="0", digest="long",
                )
            ]  # fmt: skip

    runner = Runner(engine, Settings(), tmp_path, [Long()])
    runner.run(plan_jobs(parse_arms("reprefill,blind"), [Long()]), None)
    assert len(runner.samples.rows) == 2
    assert all("longer than the model's 1024" in (row.unscored or "") for row in runner.samples.rows.values())


def test_orders_of_chunks_of_other_sizes(decoder: Decoder) -> None:
    """Conditioned behind the same chunks in another order, at another place: full-rank patches are right at theirs."""
    group = Group(decoder, [item(0, 1)], Patcher(decoder.spec, dtype=torch.float32), HEADER)
    spans = group.last_spans([(0, (1, 0, 2)), (0, (0, 1, 2)), (0, (1, 0, 2))])
    assert spans[0] is spans[2]
    torch.testing.assert_close(spans[1].k, group.exact[0][2].k, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(spans[0].v, spans[1].v)
    read = [
        decoder.read(group.memory([s.spans for s in arm.serve(group) if s]), ["what color is it?"], group.begin)[0]
        for arm in parse_arms("reprefill,patched:full,orbit:full")
    ]
    assert kl_divergence(read[0].numpy(), read[1].numpy()) < 1e-6
    assert kl_divergence(read[0].numpy(), read[2].numpy()) > 0
