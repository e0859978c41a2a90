"""The embedded vLLM engine, against transformers and against plain vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from adapters.vllm.layouts import ALL, encoded, gap, laid, picture, spans_of
from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import BadMedia, ChunkUnavailable, EngineFailed
from ctxwin.kv.layout import SpanKV
from ctxwin.store import Store
from engines import models
from engines.whole_conformance import WholeEngineConformance
from twins import guard

# Float32 logprobs of two implementations of the same 3 layers: sums in another order, a few ulp each.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def wide_text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.wide(models.write_text_model, tmp_path_factory.mktemp("vllm") / "text")


@pytest.fixture(scope="module")
def engine(shared_engine: Any) -> Any:
    return shared_engine


@pytest.fixture(scope="module")
def hf(model_dir: Path) -> Iterator[Any]:
    from ctxwin.engines.hf.engine import HFEngine

    opened = HFEngine(model_dir, dtype="float32")
    yield opened
    opened.close()


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

    def test_a_load_prepares_no_layout_without_the_spans(self, engine: Any) -> None:
        parts, query = encoded(engine, [1, 2]), engine.encode_query("what color")
        whole = engine.generate(laid(parts), query, ALL, salt="alone-1")
        spans = [whole.captured[i] for i in range(len(parts))]
        with mock.patch("ctxwin_vllm.asks.without_spans") as without_spans:
            again = engine.generate(laid(parts, spans), query, ALL, salt="alone-2")
        assert gap(whole, again) < 1e-5 and again.bytes_loaded and not again.fallbacks
        assert not without_spans.called

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
