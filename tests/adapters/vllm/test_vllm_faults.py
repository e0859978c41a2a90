"""The embedded vLLM engine where loads fail, requests are refused, and another engine comes and goes."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from adapters.vllm.layouts import ALL, encoded, gap, laid, picture, spans_of
from ctxwin.engines.sampling import Sampling
from ctxwin.errors import EngineFailed, UnsupportedModel


@pytest.fixture(scope="module")
def engine(shared_engine: Any) -> Any:
    return shared_engine


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
            drawn = Sampling(max_tokens=6, temperature=2.0, seed=3)
            once, in_steps = (e.generate(laid(parts), query, drawn, salt="drawn").token_ids for e in (engine, second))
            assert in_steps == once
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

    def test_strided_views_read_what_the_permutation_does(self, engine: Any) -> None:
        from ctxwin.kv.kernels import CacheStrides
        from ctxwin_vllm.paged import PagedKV

        paged = engine._core.transport.paged
        layers = {f"layers.{i}.attn": layer for i, layer in enumerate(paged.layers)}
        strided = PagedKV(layers, engine.spec.kv, paged.block_size)
        with mock.patch.object(CacheStrides, "find", return_value=None):
            permuted = PagedKV(layers, engine.spec.kv, paged.block_size)
        strided._gathers.clear()
        parts, query = encoded(engine, [1, 2, 3, 4]), engine.encode_query("what color")
        engine.generate(laid(parts), query, ALL, salt="strided")
        blocks, end = [3, 1, 2], 2 * paged.block_size + 3
        pairs = [reader.read(blocks, 1, end) for reader in (strided, permuted)]
        assert any(x.any() for x in pairs[0])
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*pairs, strict=True))


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
