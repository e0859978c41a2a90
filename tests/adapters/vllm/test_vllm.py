"""The embedded vLLM engine, against transformers and against plain vLLM."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import BadMedia, ChunkUnavailable, EngineFailed, UnsupportedModel
from ctxwin.kv.layout import SpanKV
from ctxwin.store import Store
from engines import models
from engines.whole_conformance import WholeEngineConformance
from twins import guard

ALL = Sampling(max_tokens=4, logprobs=-1)
# Float32 logprobs of two implementations of the same 3 layers: sums in another order, a few ulp each.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    return models.wide(models.write_vision_model, tmp_path_factory.mktemp("vllm") / "vision", rope_parameters=rope)


@pytest.fixture(scope="module")
def wide_text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.wide(models.write_text_model, tmp_path_factory.mktemp("vllm") / "text")


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Any]:
    from ctxwin_vllm.engine import VLLMEngine

    opened = VLLMEngine(model_dir, dtype="float32")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def hf(model_dir: Path) -> Iterator[Any]:
    from ctxwin.engines.hf.engine import HFEngine

    opened = HFEngine(model_dir, dtype="float32")
    yield opened
    opened.close()


def picture(seed: int) -> Chunk:
    pixels = np.random.default_rng(seed).integers(0, 255, (84, 84, 3), dtype=np.uint8)
    return Chunk.image(pixels, text=f"frame {seed}")


def encoded(engine: Engine, seeds: Sequence[int]) -> list[Encoded]:
    return [engine.encode_system_prompt("watch a camera"), *(engine.encode(picture(s)) for s in seeds)]


def laid(parts: Sequence[Encoded], spans: Sequence[SpanKV | None] | None = None, capture: bool = True) -> list[Segment]:
    start, out = 0, []
    for i, part in enumerate(parts):
        span = None if spans is None else spans[i]
        out.append(Segment(part, start, span=span, capture=capture and span is None))
        start += part.advance
    return out


def gap(a: Generation, b: Generation) -> float:
    assert a.logprobs.keys() == b.logprobs.keys() and len(a.logprobs) > 100
    return max(abs(a.logprobs[token] - b.logprobs[token]) for token in a.logprobs)


def spans_of(engine: Engine, seeds: Sequence[int], salt: str) -> list[SpanKV]:
    """Each segment's KV behind those before it."""
    parts = encoded(engine, seeds)
    made = engine.generate(laid(parts), engine.encode_query("what color"), ALL, salt=salt)
    return [made.captured[i] for i in range(len(parts))]


def open_engine(model_dir: Path, store: Store) -> Engine:
    from ctxwin_vllm.engine import VLLMEngine

    return VLLMEngine(model_dir, dtype="float32", store=store)


class OnVLLM(WholeEngineConformance):
    make_engine = staticmethod(open_engine)

    @guard
    def test_a_closed_engine_says_so(self, model_dir: Path) -> None:
        super().test_a_closed_engine_says_so(model_dir)


class TestVision(OnVLLM):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, engine: Any) -> Any:
        """The module's: it opens for seconds."""
        return engine

    @guard
    def test_the_vision_tower_runs_once(self, model_dir: Path, tmp_path: Path) -> None:
        super().test_the_vision_tower_runs_once(model_dir, tmp_path)


class TestText(OnVLLM):
    vision = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, wide_text_dir: Path) -> Path:
        return wide_text_dir


class TestAgainstTransformers:
    def test_computed_in_place(self, engine: Any, hf: Any) -> None:
        ours = engine.generate(laid(encoded(engine, [1, 2, 3])), engine.encode_query("what color"), ALL, salt="hf-1")
        theirs = hf.generate(laid(encoded(hf, [1, 2, 3])), hf.encode_query("what color"), ALL)
        assert ours.token_ids == theirs.token_ids and ours.text == theirs.text
        assert gap(ours, theirs) < CLOSE
        for i in range(4):
            torch.testing.assert_close(ours.captured[i].k, theirs.captured[i].k, atol=CLOSE, rtol=0)
            torch.testing.assert_close(ours.captured[i].v, theirs.captured[i].v, atol=CLOSE, rtol=0)

    def test_moved_spans(self, engine: Any, hf: Any) -> None:
        """The same wrong-order spans give the same (approximate) answer on both engines."""
        spans = spans_of(hf, [1, 2, 3], "")
        order = [0, 3, 1, 2]
        answers = []
        for side in (engine, hf):
            parts = encoded(side, [1, 2, 3])
            layout = laid([parts[i] for i in order], [spans[i] for i in order])
            answers.append(side.generate(layout, side.encode_query("what color"), ALL, salt="hf-2"))
        ours, theirs = answers
        assert gap(ours, theirs) < CLOSE and ours.token_ids == theirs.token_ids
        query = engine.encode_query("what color").tokens
        assert ours.computed_tokens == query == theirs.computed_tokens
        assert ours.bytes_loaded == theirs.bytes_loaded == sum(s.nbytes for s in spans)

    def test_query_span(self, engine: Any, hf: Any) -> None:
        made = []
        for side in (engine, hf):
            layout = laid(encoded(side, [1, 2]))
            query = side.encode_query("what color")
            made.append(side.generate(layout, query, Sampling(max_tokens=5), salt="hf-3", capture_query=True))
        ours, theirs = made
        assert ours.token_ids == theirs.token_ids and len(ours.token_ids) > 1
        assert ours.query_span.start == theirs.query_span.start
        assert torch.equal(ours.query_span.positions, theirs.query_span.positions)
        torch.testing.assert_close(ours.query_span.k, theirs.query_span.k, atol=CLOSE, rtol=0)
        torch.testing.assert_close(ours.query_span.v, theirs.query_span.v, atol=CLOSE, rtol=0)

    def test_video(self, engine: Any) -> None:
        """A native video: its tokens move like any other's; the tower runs once."""
        rng = np.random.default_rng(7)
        frames = [rng.integers(0, 255, (56, 56, 3), dtype=np.uint8) for _ in range(4)]
        front = encoded(engine, [1])
        before = engine.counters.vision_encodes
        clip = engine.encode(Chunk.video(frames, fps=2.0))
        assert engine.counters.vision_encodes == before + 1
        parts = [*front, clip]
        whole = engine.generate(laid(parts), engine.encode_query("what color"), ALL, salt="video-1")
        spans = [whole.captured[i] for i in range(3)]
        again = engine.generate(laid(parts, spans), engine.encode_query("what color"), ALL, salt="video-2")
        assert gap(whole, again) < 1e-5 and engine.counters.vision_encodes == before + 1

    def test_a_video_beyond_the_models_positions_is_refused(self, engine: Any) -> None:
        """vLLM would look up angles that its table does not have, and end. At still lower rates media are refused."""
        frames = [np.full((56, 56, 3), i, dtype=np.uint8) for i in range(6)]
        with pytest.raises(BadMedia, match="fps must be from"):
            engine.encode(Chunk.video(frames, fps=1e-6))
        parts = [engine.encode_system_prompt("watch"), engine.encode(Chunk.video(frames, fps=1e-3))]
        query = engine.encode_query("what color")
        with pytest.raises(EngineFailed, match="positions must be in"):
            engine.generate(laid(parts), query, ALL)
        with pytest.raises(EngineFailed, match="positions must be in"):
            engine.prefill([Segment(parts[0], 0)], parts[1], parts[0].advance)
        assert engine.generate(laid(parts[:1]), query, ALL).token_ids


PLAIN = """
import json, sys
from ctxwin.engines.torchvision_repair import repair
repair()
import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.model_executor.models.registry import ModelRegistry
# Imported here, since vLLM would look at the class in a process of its own, which has had no repair.
name = "Qwen2_5_VLForConditionalGeneration"
ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
job = json.load(open(sys.argv[1]))
llm = LLM(job["model"], dtype="float32", enforce_eager=True, block_size=32, kv_cache_memory_bytes=1 << 28,
          max_logprobs=-1, disable_log_stats=True)
images = []
for seed in job["seeds"]:
    images.append(Image.fromarray(np.random.default_rng(seed).integers(0, 255, (84, 84, 3), dtype=np.uint8)))
(out,) = llm.generate(
    {"prompt_token_ids": job["ids"], "multi_modal_data": {"image": images}},
    SamplingParams(max_tokens=4, temperature=0, logprobs=-1, detokenize=False), use_tqdm=False)
part = out.outputs[0]
ids = list(part.token_ids)
if part.finish_reason == "stop":
    ids.pop()
json.dump({"ids": ids, "prompt": out.prompt_token_ids,
           "logprobs": {k: v.logprob for k, v in part.logprobs[0].items()}}, open(sys.argv[2], "w"))
"""


@guard
def test_exact_window_equals_plain_vllm(engine: Any, model_dir: Path, tmp_path: Path) -> None:
    """Same ids, pixels through vLLM's own processor and tower, no connector, another process."""
    seeds = [1, 2, 3]
    parts = encoded(engine, seeds)
    query = engine.encode_query("what color")
    ours = engine.generate(laid(parts), query, ALL)
    pad = engine.encoder.checkpoint.media.image
    whole = [i for part in [*parts, query] for i in part.token_ids]
    single = [i for at, i in enumerate(whole) if i != pad or whole[at - 1] != pad]
    job, out = tmp_path / "job.json", tmp_path / "out.json"
    job.write_text(json.dumps({"model": str(model_dir), "ids": single, "seeds": seeds}))
    env = {
        **os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",  # compiling vLLM's sampling functions would take longer than everything else here
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", PLAIN, str(job), str(out)], env=env, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    plain = json.loads(out.read_text())
    assert plain["prompt"] == whole
    assert plain["ids"] == ours.token_ids
    assert max(abs(ours.logprobs[int(t)] - p) for t, p in plain["logprobs"].items()) < 1e-5


class TestLoading:
    def test_same_place_is_exact(self, engine: Any) -> None:
        parts, query = encoded(engine, [4, 5, 6]), engine.encode_query("what color")
        whole = engine.generate(laid(parts), query, ALL, salt="load-1")
        spans = [whole.captured[i] for i in range(4)]
        loaded = engine.generate(laid(parts, spans), query, ALL, salt="load-2")
        assert gap(whole, loaded) < 1e-5 and loaded.token_ids == whole.token_ids
        assert loaded.computed_tokens == query.tokens and loaded.cached_tokens == 0 and loaded.forwards == 1
        assert loaded.bytes_loaded == sum(span.nbytes for span in spans)
        assert whole.computed_tokens == sum(p.tokens for p in parts) + query.tokens and whole.bytes_loaded == 0

    def test_canonical_frame(self, engine: Any) -> None:
        """Spans stored at their own origin are turned to their place on the way in."""
        from ctxwin.kv.relocate import canonicalise

        parts, query = encoded(engine, [4, 5, 6]), engine.encode_query("what color")
        whole = engine.generate(laid(parts), query, ALL, salt="load-3")
        spans = [canonicalise(whole.captured[i], engine.spec.kv) for i in range(4)]
        loaded = engine.generate(laid(parts, spans), query, ALL, salt="load-4")
        assert gap(whole, loaded) < 1e-5

    def test_missing_piece_between_spans(self, engine: Any) -> None:
        parts, query = encoded(engine, [4, 5, 6, 7]), engine.encode_query("what color")
        whole = engine.generate(laid(parts), query, ALL, salt="hole-1")
        spans: list[SpanKV | None] = [whole.captured[i] for i in range(5)]
        kept = spans[2]
        assert kept is not None
        spans[2] = None
        holed = engine.generate(laid(parts, spans), query, ALL, salt="hole-2")
        assert gap(whole, holed) < 1e-5 and holed.forwards == 2 and list(holed.captured) == [2]
        torch.testing.assert_close(holed.captured[2].k, kept.k, atol=1e-5, rtol=0)
        torch.testing.assert_close(holed.captured[2].v, kept.v, atol=1e-5, rtol=0)
        assert holed.captured[2].start == kept.start
        assert parts[2].tokens + query.tokens <= holed.computed_tokens < sum(p.tokens for p in parts)

    def test_two_holes_and_a_missing_tail(self, engine: Any) -> None:
        parts, query = encoded(engine, [4, 5, 6, 7, 8]), engine.encode_query("what color")
        whole = engine.generate(laid(parts), query, ALL, salt="hole-3")
        spans = [None if i in (1, 3, 5) else whole.captured[i] for i in range(6)]
        holed = engine.generate(laid(parts, spans), query, ALL, salt="hole-4")
        assert gap(whole, holed) < 1e-5 and holed.forwards == 3 and sorted(holed.captured) == [1, 3, 5]
        for i in (1, 3, 5):
            torch.testing.assert_close(holed.captured[i].k, whole.captured[i].k, atol=1e-5, rtol=0)

    def test_capture_of_what_the_prefix_cache_served(self, engine: Any) -> None:
        parts, query = encoded(engine, [4, 5, 6]), engine.encode_query("what color")
        first = engine.generate(laid(parts), query, ALL, salt="hit-1")
        second = engine.generate(laid(parts), query, ALL, salt="hit-1")
        assert second.cached_tokens > 0 and second.computed_tokens < first.computed_tokens
        for i in range(4):
            assert torch.equal(first.captured[i].k, second.captured[i].k)
            assert torch.equal(first.captured[i].v, second.captured[i].v)

    def test_no_tower_inside_a_request(self, engine: Any) -> None:
        parts, query = encoded(engine, [4, 5]), engine.encode_query("what color")
        with mock.patch.object(engine._core.inputs.model.visual, "forward", side_effect=AssertionError("tower ran")):
            engine.generate(laid(parts), query, ALL, salt="tower")
            with pytest.raises(AssertionError, match="tower ran"):
                engine.encode(picture(99))

    def test_media_under_loaded_kv_need_no_embeddings(self, engine: Any) -> None:
        parts, query = encoded(engine, [4, 5]), engine.encode_query("what color")
        whole = engine.generate(laid(parts), query, ALL, salt="gone-1")
        spans = [whole.captured[i] for i in range(3)]
        with mock.patch.object(engine.encoder, "embed", side_effect=ChunkUnavailable("left the store")):
            loaded = engine.generate(laid(parts, spans), query, ALL, salt="gone-2")
            assert gap(whole, loaded) < 1e-5 and loaded.fallbacks == 0
            with pytest.raises(ChunkUnavailable):
                engine.generate(laid(parts, [spans[0], spans[1], None]), query, ALL, salt="gone-3")
        # And no zeros were left in vLLM's cache of embeddings.
        assert gap(whole, engine.generate(laid(parts), query, ALL, salt="gone-4")) < 1e-5

    def test_an_empty_piece(self, engine: Any) -> None:
        """A base model without a chat template has an empty system prompt where none was given."""
        empty = Encoded("", (), np.zeros((3, 0), dtype=np.int64), 0)
        parts, query = [empty, engine.encode(picture(4))], engine.encode_query("what color")
        whole = engine.generate(laid(parts), query, ALL, salt="empty-1")
        assert whole.captured[0].tokens == 0
        spans = [whole.captured[i] for i in range(2)]
        assert gap(whole, engine.generate(laid(parts, spans), query, ALL, salt="empty-2")) < 1e-5


class TestPrefixCache:
    def test_an_append_loads_only_what_is_new(self, engine: Any) -> None:
        spans = spans_of(engine, [1, 2, 3, 4], "append-0")
        parts, query = encoded(engine, [1, 2, 3, 4]), engine.encode_query("what color")
        first = engine.generate(laid(parts[:4], spans[:4]), query, ALL, salt="append-1")
        assert first.bytes_loaded == sum(s.nbytes for s in spans[:4])
        again = engine.generate(laid(parts[:4], spans[:4]), query, ALL, salt="append-1")
        # vLLM caches whole blocks of 32 tokens; what stands in the last, partial one is loaded again.
        token = spans[0].nbytes // spans[0].tokens
        assert again.bytes_loaded < 32 * token and again.cached_tokens > 0
        assert again.computed_tokens + again.cached_tokens + again.bytes_loaded // token == (
            sum(p.tokens for p in parts[:4]) + query.tokens
        )
        longer = engine.generate(laid(parts, spans), query, ALL, salt="append-1")
        assert spans[4].nbytes <= longer.bytes_loaded < spans[4].nbytes + 32 * token
        assert gap(first, again) < 1e-5

    def test_a_repeat_whose_blocks_are_whole_loads_nothing(self, engine: Any) -> None:
        """The query fills the block in which the last span ends."""
        spans = spans_of(engine, [1, 2], "append-2")
        parts = encoded(engine, [1, 2])
        query = engine.encode_query("what color is the shape of a frame camera watch number now red blue circle " * 4)
        assert query.tokens > 32
        first = engine.generate(laid(parts, spans), query, ALL, salt="append-3")
        again = engine.generate(laid(parts, spans), query, ALL, salt="append-3")
        assert first.bytes_loaded > 0 and again.bytes_loaded == 0 and gap(first, again) < 1e-5

    def test_salts_keep_approximate_kv_out_of_the_exact_space(self, engine: Any) -> None:
        parts, query = encoded(engine, [5, 6, 7]), engine.encode_query("what color")
        spans = spans_of(engine, [5, 6, 7], "salt-1")
        wrong = [spans[0], *(replace(s, k=s.k * 1.5, v=-s.v) for s in spans[1:])]
        before = engine.generate(laid(parts), query, ALL)
        approximate = engine.generate(laid(parts, wrong), query, ALL, salt="salt-2")
        after = engine.generate(laid(parts), query, ALL)
        assert gap(before, approximate) > 1e-2
        assert gap(before, after) < 1e-5 and after.cached_tokens > 0
        other = engine.generate(laid(parts), query, ALL, salt="salt-3")
        assert other.cached_tokens == 0 and gap(before, other) < 1e-5

    def test_tenants_have_spaces_of_their_own(self, engine: Any) -> None:
        parts, query = encoded(engine, [8]), engine.encode_query("what color")
        engine.generate(laid(parts), query, ALL)
        with mock.patch.object(engine.prompts, "tenant", "somebody"):
            assert engine.generate(laid(parts), query, ALL).cached_tokens == 0
            assert engine.generate(laid(parts), query, ALL).cached_tokens > 0


class TestPrefill:
    def test_equals_computing_in_place(self, engine: Any) -> None:
        spans = spans_of(engine, [1, 2, 3], "prefill-1")
        layout = laid(encoded(engine, [1, 2, 3]), spans)
        counted = engine.counters.prefill_tokens
        made = engine.prefill(layout[:3], layout[3].encoded, layout[3].start, salt="prefill-2")
        torch.testing.assert_close(made.k, spans[3].k, atol=1e-5, rtol=0)
        torch.testing.assert_close(made.v, spans[3].v, atol=1e-5, rtol=0)
        assert made.start == layout[3].start
        assert engine.counters.prefill_tokens == counted + made.tokens

    def test_alone_at_any_start(self, engine: Any, hf: Any) -> None:
        part = encoded(engine, [3])[1]
        for start in (0, 40):
            ours, theirs = engine.prefill([], part, start), hf.prefill([], encoded(hf, [3])[1], start)
            assert ours.start == start
            torch.testing.assert_close(ours.k, theirs.k, atol=CLOSE, rtol=0)
            torch.testing.assert_close(ours.v, theirs.v, atol=CLOSE, rtol=0)


class TestSampling:
    def test_seeds(self, engine: Any) -> None:
        parts, query = encoded(engine, [1]), engine.encode_query("what color")

        def draw(seed: int) -> list[int]:
            warm = Sampling(max_tokens=8, temperature=2.0, seed=seed)
            return list(engine.generate(laid(parts), query, warm).token_ids)

        assert draw(1) == draw(1)
        assert len({tuple(draw(seed)) for seed in range(5)}) > 1

    def test_stream_and_early_stop(self, engine: Any) -> None:
        parts, query = encoded(engine, [1]), engine.encode_query("what color")
        seen: list[tuple[int, str]] = []

        def take(token: int, text: str) -> bool:
            seen.append((token, text))
            return len(seen) < 2

        full = engine.generate(laid(parts), query, Sampling(max_tokens=6))
        made = engine.generate(laid(parts), query, Sampling(max_tokens=6), on_token=take, capture_query=True)
        assert made.token_ids == full.token_ids[:2] == [token for token, _ in seen]
        assert seen[-1][1] == made.text and not made.finished and full.finished
        assert made.query_span is not None and made.query_span.tokens == query.tokens + 1
        assert 0 < made.ttft_s <= made.total_s
        assert engine.generate(laid(parts), query, Sampling(max_tokens=6)).token_ids == full.token_ids

    def test_a_callback_that_raises_leaves_the_engine_usable(self, engine: Any) -> None:
        parts, query = encoded(engine, [1]), engine.encode_query("what color")

        def bad(token: int, text: str) -> bool:
            raise ZeroDivisionError("mine")

        full = engine.generate(laid(parts), query, ALL)
        with pytest.raises(ZeroDivisionError, match="mine"):
            engine.generate(laid(parts), query, Sampling(max_tokens=6), on_token=bad)
        assert gap(full, engine.generate(laid(parts), query, ALL)) < 1e-5

    def test_the_ending_token_is_left_out(self, engine: Any) -> None:
        parts, query = encoded(engine, [1]), engine.encode_query("what color")
        full = engine.generate(laid(parts), query, Sampling(max_tokens=6))
        ending = full.token_ids[2]
        cut = full.token_ids.index(ending)
        made = engine.generate(laid(parts), query, Sampling(max_tokens=6, stop_ids=(ending,)), capture_query=True)
        assert made.token_ids == full.token_ids[:cut] and made.finished
        assert made.query_span.tokens == query.tokens + cut

    def test_best_logprobs(self, engine: Any) -> None:
        parts, query = encoded(engine, [1]), engine.encode_query("what color")
        every = engine.generate(laid(parts), query, ALL).logprobs
        best = engine.generate(laid(parts), query, Sampling(max_tokens=1, logprobs=5)).logprobs
        assert list(best) == sorted(every, key=lambda t: (-every[t], t))[:5]
        assert sum(np.exp(list(every.values()))) == pytest.approx(1.0, abs=1e-4)


class TestFaults:
    def test_a_load_that_fails_is_computed_instead(self, engine: Any) -> None:
        from ctxwin_vllm.transport import base

        parts, query = encoded(engine, [1, 2, 3]), engine.encode_query("what color")
        spans = spans_of(engine, [1, 2, 3], "fault-1")
        right = engine.generate(laid(parts), query, ALL, salt="fault-2")
        before = replace(engine.counters)
        with mock.patch.object(base, "write", side_effect=OSError("a lost page")):
            made = engine.generate(laid(parts, spans), query, ALL, salt="fault-3")
        assert made.fallbacks == 1 and engine.counters.fallbacks == before.fallbacks + 1
        assert engine.counters.retries == before.retries + 3
        assert gap(right, made) < 1e-5 and made.token_ids == right.token_ids
        # A load that fails once is tried again: the answer is that of the spans.
        with mock.patch.object(base, "write", wraps=base.write, side_effect=[OSError("once"), mock.DEFAULT]):
            again = engine.generate(laid(parts, spans), query, ALL, salt="fault-3b")
        assert again.fallbacks == 0 and engine.counters.retries == before.retries + 4
        assert gap(right, again) < 1e-5 and again.bytes_loaded == sum(s.nbytes for s in spans)
        # Nothing of the failed load stays behind in the prefix cache.
        healthy = engine.generate(laid(parts, spans), query, ALL, salt="fault-3")
        assert healthy.fallbacks == 0 and healthy.cached_tokens == 0 and gap(right, healthy) < 1e-5

    def test_a_load_that_never_happens_is_noticed(self, engine: Any) -> None:
        from ctxwin_vllm.connector import CtxwinConnector

        parts, query = encoded(engine, [1, 2]), engine.encode_query("what color")
        spans = spans_of(engine, [1, 2], "fault-4")
        right = engine.generate(laid(parts), query, ALL, salt="fault-5")
        with mock.patch.object(CtxwinConnector, "_load", lambda *args: None):
            made = engine.generate(laid(parts, spans), query, ALL, salt="fault-6")
        assert made.fallbacks == 1 and gap(right, made) < 1e-5
        assert gap(right, engine.generate(laid(parts, spans), query, ALL, salt="fault-6")) < 1e-5

    def test_bad_spans_are_refused_before_anything_runs(self, engine: Any) -> None:
        parts, query = encoded(engine, [1, 2]), engine.encode_query("what color")
        spans = spans_of(engine, [1, 2], "fault-7")
        forwards = engine.counters.prefill_forwards
        other_chunk = replace(spans[1], positions=spans[1].positions + 1)
        for bad in (spans[1].slice(0, 3), replace(spans[1], k=spans[1].k[:1]), other_chunk):
            with pytest.raises(ValueError, match="must"):
                engine.generate(laid(parts, [spans[0], bad, spans[2]]), query, ALL, salt="fault-8")
        shifted = laid(parts, spans)
        shifted[2] = replace(shifted[2], start=shifted[2].start + 5)
        with pytest.raises(ValueError, match="must start at position"):
            engine.generate(shifted, query, ALL, salt="fault-8")
        with pytest.raises(EngineFailed, match="tokens"):
            engine.generate(laid(parts), query, Sampling(max_tokens=5000))
        with pytest.raises(UnsupportedModel, match="keeps every token"):
            engine.generate(laid(parts), query, Sampling(hold=0.5))
        assert engine.counters.prefill_forwards == forwards

    def test_an_error_of_vllm_is_ours(self, engine: Any) -> None:
        parts, query = encoded(engine, [1]), engine.encode_query("what color")
        llm = engine._core.driver.llm.llm_engine
        with (
            mock.patch.object(llm, "add_request", side_effect=RuntimeError("boom")),
            pytest.raises(EngineFailed, match="boom"),
        ):
            engine.generate(laid(parts), query, ALL)
        assert engine.generate(laid(parts), query, ALL).token_ids

    def test_kv_that_is_no_number_is_an_error(self, engine: Any) -> None:
        """vLLM answers with the first token of its vocabulary then."""
        parts, query = encoded(engine, [1]), engine.encode_query("what color")
        paged = engine._core.transport.paged
        plain = paged.read

        def broken(*given: Any) -> Any:
            k, v = plain(*given)
            return k, v.fill_(float("nan"))

        with mock.patch.object(paged, "read", broken), pytest.raises(EngineFailed, match="not finite"):
            engine.generate([replace(s, capture=True) for s in laid(parts)], query, ALL, salt="broken")
        assert engine.generate(laid(parts), query, ALL).token_ids

    def test_options_that_spans_cannot_follow_are_refused(self, model_dir: Path) -> None:
        from ctxwin_vllm.engine import VLLMEngine
        from ctxwin_vllm.transport.local import find

        with pytest.raises(UnsupportedModel, match="data_parallel_size must be 1, got 2"):
            VLLMEngine(model_dir, data_parallel_size=2)
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            with pytest.raises(ValueError, match="pipeline_parallel_size need processes="):
                VLLMEngine(model_dir, processes="single", **{name: 2})
        with pytest.raises(ValueError, match="processes must be one of"):
            VLLMEngine(model_dir, processes="many")
        with pytest.raises(ValueError, match="enable_prefix_caching must be True"):
            VLLMEngine(model_dir, enable_prefix_caching=False)
        with pytest.raises(RuntimeError, match="processes='multi'"):
            find("of-another-process")


class TestLifeCycle:
    def test_two_engines_at_once(self, engine: Any, model_dir: Path) -> None:
        """The second prefills in small steps; both work, and the first survives the second's end."""
        from ctxwin_vllm.engine import VLLMEngine

        parts, query = encoded(engine, [1, 2, 3, 4]), engine.encode_query("what color")
        whole = engine.generate(laid(parts), query, ALL, salt="two-1")
        threads, state = torch.set_num_threads, random.getstate()
        rng, environment = torch.get_rng_state(), dict(os.environ)
        second = VLLMEngine(model_dir, dtype="float32", max_num_batched_tokens=48, max_num_seqs=4)
        assert torch.set_num_threads is threads and random.getstate() == state
        assert torch.equal(torch.get_rng_state(), rng)
        assert {k: v for k, v in os.environ.items() if k in environment} == environment
        try:
            assert sum(p.tokens for p in parts) > 48
            made = second.generate(laid(encoded(second, [1, 2, 3, 4])), query, ALL)
            assert gap(whole, made) < 1e-5
            for i in range(5):
                torch.testing.assert_close(made.captured[i].k, whole.captured[i].k, atol=1e-5, rtol=0)
            spans = [made.captured[i] for i in range(5)]
            loaded = second.generate(laid(parts, spans), query, ALL, salt="two")
            assert gap(whole, loaded) < 1e-5 and loaded.bytes_loaded > 0
            here = engine.generate(laid(parts, spans), query, ALL, salt="two-2")
            assert gap(whole, here) < 1e-5 and here.bytes_loaded > 0
        finally:
            second.close()
        second.close()
        with pytest.raises(EngineFailed, match="closed"):
            second.generate(laid(parts), query, ALL)
        spans = [whole.captured[i] for i in range(5)]
        after = engine.generate(laid(parts, spans), query, ALL, salt="two-3")
        assert gap(whole, after) < 1e-5 and after.bytes_loaded > 0 and after.fallbacks == 0


class TestPaging:
    def test_a_packing_that_loses_numbers_is_refused(self, engine: Any) -> None:
        from ctxwin_vllm.paged import PagedKV

        paged = engine._core.transport.paged
        layers = {f"layers.{i}.attn": layer for i, layer in enumerate(paged.layers)}
        assert PagedKV(layers, engine.spec.kv, paged.block_size)
        impl = paged.layers[0].impl
        real = type(impl).do_kv_cache_update

        def lossy(self: Any, layer: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
            real(self, layer, k, k.clone(), cache, slots)

        with (
            mock.patch.object(type(impl), "do_kv_cache_update", lossy),
            pytest.raises(UnsupportedModel, match="permutation"),
        ):
            PagedKV(layers, engine.spec.kv, paged.block_size)
        with pytest.raises(UnsupportedModel, match="one attention layer per decoder layer"):
            PagedKV(dict(list(layers.items())[1:]), engine.spec.kv, paged.block_size)


def test_media_that_come_with_their_data_share_one_entry_of_vllms_item_cache(engine: Any) -> None:
    """Each new picture, and each new place of a picture, was an entry for ever: 24 bytes by its count, 2 KB in memory."""
    from ctxwin import Window

    cache = engine._core.driver.engine.engine_core.engine_core.mm_receiver_cache._cache
    before = len(cache)
    with Window(engine, "watch a camera", 130) as window:
        for seed in range(100, 112):
            window.append(picture(seed))
            window.slide(reserve_tokens=32)
            window.maintenance.prefill()
        assert window.evicted
    assert len(cache) - before <= 1
