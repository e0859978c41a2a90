"""Hybrids (Gated DeltaNet beside attention) on transformers: states travel with the KV, behind exactly the same only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ctxwin import Chunk, Fidelity, Window
from ctxwin.audit import attach_audits
from ctxwin.engines.base import Engine
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import UnsupportedModel
from ctxwin.store import Store, open_store
from engines.conformance import ALL, QUERY, laid, picture, with_spans
from engines.hybrid_windows import CLOSE, assert_computes_what_is_new, chunk, opened, program, reprefill, window_on
from engines.hybrids import WRITERS, gap
from engines.oracle import assert_answers, real_answer
from engines.whole_conformance import WholeEngineConformance

SEEING = ("qwen3_5", "qwen3_5_moe")


def refused(test: Callable[..., None], *given: object) -> None:
    """What the suite holds of approximations: a state is of all that stood in front, and of nothing else."""
    with pytest.raises((UnsupportedModel, ValueError), match=r"recurrent layers|must hold states after it"):
        test(*given)


class OnTransformers(WholeEngineConformance):
    fidelity = Fidelity("exact")

    @classmethod
    def make_engine(cls, model_dir: Path, store: Store) -> Engine:
        return HFEngine(model_dir, dtype="float32", store=store)

    def test_recomputed_tokens_are_what_a_forward_gives(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        refused(super().test_recomputed_tokens_are_what_a_forward_gives, engine, encoded, query, whole)

    def test_gaps_are_computed_at_once_each_behind_what_is_stored(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        refused(super().test_gaps_are_computed_at_once_each_behind_what_is_stored, engine, encoded, query, whole)

    def test_merged_segments_take_fewer_slots(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        with pytest.raises(UnsupportedModel, match="recurrent layers, whose states cannot be merged"):
            engine.attended([], encoded[1], 0)
        layout = with_spans(laid(encoded), whole.captured)
        layout[1] = replace(layout[1], merged=True)
        refused(engine.generate, layout, query, ALL)

    def test_a_canonical_that_is_recomputed_whole_is_computed_in_place(
        self, engine: Engine, encoded: list[Encoded], query: Encoded, whole: Generation
    ) -> None:
        refused(super().test_a_canonical_that_is_recomputed_whole_is_computed_in_place, engine, encoded, query, whole)

    def test_a_full_rank_patch_formed_at_one_place_serves_at_another(
        self, engine: Engine, encoded: list[Encoded], query: Encoded
    ) -> None:
        refused(super().test_a_full_rank_patch_formed_at_one_place_serves_at_another, engine, encoded, query)

    def test_forced_logprobs_see_what_is_served(self, engine: Engine, encoded: list[Encoded], query: Encoded) -> None:
        """Not what a state is of."""
        alone = engine.prefill([], encoded[1], 0)
        bare = replace(alone, states={})
        layout = with_spans(laid(encoded[:2]), {1: bare})
        with pytest.raises(ValueError, match="must hold states after it"):
            engine.forced_logprobs(layout, [(query, [5])])


class TestQwen35(OnTransformers):
    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("qwen3_5")


class TestQwen3Next(OnTransformers):
    vision = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("qwen3_next")


@pytest.mark.parametrize("kind", [name for name in WRITERS if name not in SEEING])
def test_text_against_the_real_model_path(kind: str, folders: Callable[[str], Path]) -> None:
    engine = opened(folders(kind))
    assert engine.spec.kv.recurrent and engine.spec.kv.layers == 2
    encoded = [
        engine.encode_system_prompt("watch"),
        *(engine.encode(Chunk.text(f"frame {i} is red\n")) for i in range(3)),
    ]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    assert_answers(engine, encoded, real_answer(folders(kind), ids), CLOSE)


@pytest.mark.parametrize("kind", SEEING)
def test_pictures_against_the_real_model_path(kind: str, folders: Callable[[str], Path]) -> None:
    from PIL import Image
    from transformers import AutoProcessor

    folder = folders(kind)
    engine, shown = opened(folder), (picture(1), picture(2, 56))
    encoded = [engine.encode_system_prompt("watch"), *(engine.encode(Chunk.image(pixels)) for pixels in shown)]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    processor = AutoProcessor.from_pretrained(folder)
    made = processor.image_processor([Image.fromarray(pixels) for pixels in shown], return_tensors="pt")
    assert engine._checkpoint.media is not None
    kinds = torch.tensor([[1 if i == engine._checkpoint.media.image else 0 for i in ids]])
    assert_answers(engine, encoded, real_answer(folder, ids, mm_token_type_ids=kinds, **made), CLOSE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_what_the_layout_says(dtype: str, folders: Callable[[str], Path]) -> None:
    engine = HFEngine(folders("qwen3_5_text"), dtype=dtype)
    encoded = engine.encode(Chunk.text("a red square"))
    span = engine.prefill([], encoded, 0)
    assert sum(state.nbytes for state in span.states.values()) == engine.spec.kv.state_bytes
    assert (
        len(span.states) == 12
        and span.nbytes == encoded.tokens * engine.spec.kv.token_bytes + engine.spec.kv.state_bytes
    )
    assert not span.slice(0, span.tokens - 1).states and span.slice(1, span.tokens).states


@pytest.mark.parametrize("count", [2, pytest.param(300, marks=pytest.mark.slow)])
def test_random_edits_against_a_re_prefill(count: int, folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_5_text"))
    for seed in range(count):
        program(engine, seed)


def test_what_needs_no_forward(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_5_text"))
    assert_computes_what_is_new(engine, window_on(engine), chunk(0), chunk(1))
    with window_on(engine) as other:
        other.extend([chunk(0), chunk(1), chunk(2)])
        new = other.chunks[2].tokens + engine.encode_query(QUERY).tokens
        assert other.ask(QUERY).usage.computed_tokens == new, "in another window, too"


def test_a_stream_of_pictures_computes_each_once(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_5"))
    query = engine.encode_query(QUERY).tokens
    with Window(engine, "watch", 1024) as window:
        for i in range(24):
            window.append(Chunk.image(picture(i)))
            want = window.chunks[-1].tokens + query + (window.core.state.system_prompt_tokens if not i else 0)
            assert window.ask(QUERY, max_tokens=1).usage.computed_tokens == want
        assert window.ask(QUERY, max_tokens=1).usage.vision_encodes == 0 and engine.counters.vision_encodes == 24


def test_states_outlive_the_process_and_are_missed_where_they_are_lost(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, where = folders("qwen3_5_text"), f"disk:{tmp_path / 'kv'}"
    engine = opened(folder, store=open_store(where))
    window = window_on(engine)
    window.extend([chunk(i) for i in range(3)])
    answer, said = window.ask(QUERY, logprobs=-1), window.snapshot().model_dump_json()
    engine.store.close()
    again = opened(folder, store=open_store(where))
    back = Window.restore(again, said)
    query = again.encode_query(QUERY).tokens
    found = back.ask(QUERY, logprobs=-1)
    assert found.usage.computed_tokens == query
    assert gap(found.first_token_logprobs, answer.first_token_logprobs) < 1e-6
    kv = back.snapshot().placed[2].kv
    assert kv is not None
    held = again.repo.get_span(kv.span)
    assert held is not None
    again.repo.put_span(kv.span, replace(held[0], states={}), held[1])
    mended = back.ask(QUERY, logprobs=-1)
    assert mended.usage.computed_tokens == query + back.chunks[2].tokens and mended.usage.exact
    assert gap(mended.first_token_logprobs, answer.first_token_logprobs) < CLOSE


def test_remembered_exchanges(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_5_text"))
    window = window_on(engine)
    window.extend([chunk(0), chunk(1)])
    plain = window.ask(QUERY, max_tokens=4)
    window.ask(QUERY, max_tokens=4, remember=True)
    answer = window.ask(QUERY, logprobs=-1)
    assert gap(answer.first_token_logprobs, reprefill(engine, window)) < CLOSE
    stop = engine.decode(plain.token_ids[1:2])
    if stop:
        window.ask(QUERY, max_tokens=4, stop=stop, remember=True)
        answer = window.ask(QUERY, logprobs=-1)
        assert gap(answer.first_token_logprobs, reprefill(engine, window)) < CLOSE


def test_what_a_hybrid_does_not_do(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_5_text"))
    for mode in ("patched", "blind"):
        with pytest.raises(UnsupportedModel, match=f"mode must be 'exact' or 'auto', got '{mode}'"):
            window_on(engine, Fidelity(mode))  # type: ignore[arg-type]
    attach_audits(engine)
    window = window_on(engine)
    a = window.append(chunk(0))
    assert window.fidelity.mode == "exact" and not window.core.audits.earns
    with pytest.raises(UnsupportedModel, match="no view without its context"):
        window.toggle(a, conditioned=False)
    with pytest.raises(ValueError, match="must allow merged KV"):
        window.maintenance.merge(a)
    with pytest.raises(UnsupportedModel, match="hold must be 1"):
        engine.generate([Segment(engine.encode_system_prompt("x"), 0)], engine.encode_query("y"), Sampling(hold=0.5))
    window.ask(QUERY)
    plan, kv = window.plan(), engine.spec.kv
    assert plan.entries[0].bytes == plan.entries[0].tokens * kv.token_bytes + kv.state_bytes
    assert window.bytes == window.tokens * kv.token_bytes + 2 * kv.state_bytes
