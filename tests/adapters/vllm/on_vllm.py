"""The conformance suite on vLLM, with the transformers engine as an oracle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from adapters.vllm.layouts import gap
from ctxwin.chunk import Chunk
from ctxwin.doctor.models import assess
from ctxwin.engines.base import Engine
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import partial_ranges
from ctxwin.kv.config import sliding_window
from ctxwin.kv.merge import merge, merged_slots
from ctxwin.store import Store
from engines.conformance import HEADER, QUERY, EngineConformance, assert_same_kv, difference, laid, picture, with_spans

if TYPE_CHECKING:
    from ctxwin_vllm.core import Core

ALL = Sampling(max_tokens=4, logprobs=-1)
# Float32 logprobs of two implementations of the same 3 layers: sums in another order, a few ulp each.
CLOSE = 1e-4


class OnVLLM(EngineConformance):
    @classmethod
    def make_engine(cls, model_dir: Path, store: Store) -> Engine:
        from ctxwin_vllm.engine import VLLMEngine

        return VLLMEngine(model_dir, dtype="float32", store=store)

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, model_dir: Path) -> Iterator[Engine]:
        with HFEngine(model_dir, dtype="float32") as opened:
            yield opened

    @pytest.mark.slow
    def test_the_vision_tower_runs_once(self, model_dir: Path, tmp_path: Path) -> None:
        super().test_the_vision_tower_runs_once(model_dir, tmp_path)

    def test_doctor_says_that_it_is_served(self, engine: Engine, model_dir: Path) -> None:
        found = assess(model_dir)
        assert found.standing == "tested" and found.engines == ("hf", "vllm"), found

    def test_a_prompt_that_is_computed_in_slices_answers_as_one_computed_at_once(self, engine: Engine) -> None:
        """What `ChatPrefill` computes ahead ends at blocks, in a picture, too, where the model allows it."""
        if not engine.spec.vision:
            pytest.skip("it sees no pictures")
        from vllm import SamplingParams

        from ctxwin_vllm.inputs import join
        from ctxwin_vllm.rendered import Pictures, RenderedPrompt

        core: Core = engine._core  # type: ignore[attr-defined]
        shown = [
            engine.encode(chunk) for i in (1, 2) for chunk in (Chunk.image(picture(i, 224)), Chunk.text(f"{i} red"))
        ]
        ids, media = join([engine.encode_system_prompt(HEADER), *shown, engine.encode_query(QUERY)])

        def rendered(salt: str) -> RenderedPrompt:
            return Pictures().read(core.inputs.prompt(ids, media, engine.embed, salt).prompt)

        def run(prompt: Mapping[str, Any]) -> Any:
            parameters = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1, detokenize=False)
            ticket = core.driver.submit(dict(prompt), parameters, 0)
            while not getattr(output := ticket.outputs.get(), "finished", True):
                pass
            assert not isinstance(output, BaseException), output
            return output

        sliced, ends = rendered("sliced"), set[int]()
        middles = {medium.offset + medium.tokens // 2 for medium in sliced.media}
        for end in sorted({*range(core.block_size, len(ids), core.block_size), *middles}):
            ends.add(end := sliced.boundary(end, whole_media=core.whole_media))
            run(sliced.prefix(end))
        inside = [end for end in ends if any(m.offset < end < m.offset + m.tokens for m in sliced.media)]
        assert bool(inside) != core.whole_media
        at_once, last = run(rendered("at once").engine_input), run(sliced.engine_input)
        blocks = (len(ids) - 1) // core.block_size if core.has_prefix_cache else 0
        assert at_once.num_cached_tokens == 0 and last.num_cached_tokens == blocks * core.block_size
        expected, got = (output.outputs[0].logprobs[0] for output in (at_once, last))
        assert max(abs(got[token].logprob - entry.logprob) for token, entry in expected.items()) < CLOSE

    def compare_gaps(self, engine: Engine, reference: Engine, chunks: list[Chunk]) -> None:
        """Gaps in stored chunks, in one step, against transformers, whose own oracle is a forward for each."""
        made = []
        for side in (engine, reference):
            encoded = [side.encode_system_prompt(HEADER), *(side.encode(c) for c in chunks)]
            segments, query = laid(encoded), side.encode_query(QUERY)
            front = segments[0] = replace(segments[0], span=side.prefill([], encoded[0], 0))
            for i, each in enumerate(encoded[1:], 1):
                alone = side.prefill([front], each, encoded[0].advance)
                ranges = (*((0, 1), (2, 3)), *([(each.tokens - 1, each.tokens)] * (i == len(chunks))))
                segments[i] = replace(segments[i], span=alone, approximate=True, capture=True, recompute=ranges)
            made.append(side.generate(segments, query, ALL, salt="gaps"))
        ours, theirs = made
        assert ours.forwards == 2 and not ours.fallbacks, "the gaps, and the question with the last of them"
        assert sorted(ours.captured) == sorted(theirs.captured) == list(range(1, len(chunks) + 1))
        for i, span in theirs.captured.items():
            assert_same_kv(ours.captured[i], span, CLOSE)
        assert gap(ours, theirs) < CLOSE

    def compare(self, engine: Engine, reference: Engine, chunks: list[Chunk], salt: str) -> None:
        """The same chunks computed on both engines, and answered from their spans alone."""
        made = []
        for side in (engine, reference):
            encoded = [side.encode_system_prompt(HEADER), *(side.encode(c) for c in chunks)]
            made.append(side.generate(laid(encoded, capture=True), side.encode_query(QUERY), ALL, salt=salt))
            assert made[-1].token_ids
        ours, theirs = made
        assert ours.token_ids == theirs.token_ids and gap(ours, theirs) < CLOSE
        encoded = [engine.encode_system_prompt(HEADER), *(engine.encode(c) for c in chunks)]
        query = engine.encode_query(QUERY)
        loaded = engine.generate(with_spans(laid(encoded), ours.captured), query, ALL, salt=f"{salt}-loaded")
        assert gap(ours, loaded) < 1e-5 and loaded.computed_tokens == query.tokens and not loaded.fallbacks
        ours, theirs = (self.linked(side, chunks, salt) for side in (engine, reference))
        assert ours.token_ids == theirs.token_ids and gap(ours, theirs) < CLOSE
        for i, span in theirs.captured.items():
            assert difference(ours.captured[i].v, span.v) < 1e-4  # an MLA model's keys are in another order there

        if sliding_window(reference._checkpoint.config) is not None:
            return  # their attention does not tell what to merge
        header, *seen = [reference.encode_system_prompt(HEADER), *(reference.encode(c) for c in chunks)]
        front = laid([header])
        sums = [reference.attended(front, each, header.advance).sums for each in seen]
        ours, theirs = (
            self.merged(side, chunks, made, sums, salt) for side, made in zip((engine, reference), made, strict=True)
        )
        assert ours.token_ids == theirs.token_ids and gap(ours, theirs) < CLOSE
        for i, span in theirs.captured.items():
            assert difference(ours.captured[i].v, span.v) < 1e-4

    @staticmethod
    def merged(
        engine: Engine, chunks: list[Chunk], whole: Generation, sums: list[torch.Tensor], salt: str
    ) -> Generation:
        """The answer over chunks in half their slots, behind them one whose gaps are linked, and one that is computed."""
        encoded = [engine.encode_system_prompt(HEADER), *(engine.encode(c) for c in [*chunks, chunks[0], chunks[0]])]
        segments = with_spans(laid(encoded), whole.captured)
        linked = len(segments) - 2
        alone = engine.prefill(segments[:1], encoded[linked], encoded[0].advance)
        gaps = {"span": alone, "approximate": True, "capture": True, "recompute": ((0, 1), (2, 3))}
        segments[linked] = replace(segments[linked], span_key=f"{salt}-gaps", **gaps)
        for i, attended in enumerate(sums, start=1):
            span = merge(whole.captured[i], attended, merged_slots(0.5, encoded[i].tokens))
            segments[i] = replace(segments[i], span=span, merged=True, approximate=True, span_key=f"{salt}-half-{i}")
        got = engine.generate(segments, engine.encode_query(QUERY), ALL, salt=f"{salt}-merged")
        assert sorted(got.captured) == [linked, linked + 1] and not got.fallbacks
        return got

    @staticmethod
    def linked(engine: Engine, chunks: list[Chunk], salt: str) -> Generation:
        """The answer over canonicals of which all text and the first tokens of each medium are computed in context."""
        header, *encoded = [engine.encode_system_prompt(HEADER), *(engine.encode(c) for c in chunks)]
        segments = laid([header, *encoded])
        for i, each in enumerate(encoded, start=1):
            ranges = partial_ranges(each.media_ranges, 2, each.tokens) if each.media else ((0, 1), (2, each.tokens - 1))
            alone = engine.prefill(segments[:1], each, header.advance)
            linked = {"span": alone, "approximate": True, "capture": True, "recompute": ranges}
            segments[i] = replace(segments[i], span_key=f"{salt}-{i}", **linked)
        got = engine.generate(segments, engine.encode_query(QUERY), ALL, salt=f"{salt}-linked")
        assert sorted(got.captured) == list(range(1, len(segments))) and not got.fallbacks
        return got
