"""Two ranks on a CPU: spans cut to each rank's heads, or to each stage's layers, at load, and joined from all at capture.

Held against the same model in one process; spans and patches go from either to the other, since a store knows nothing of
ranks. Four processes on a small machine take a minute to start, so these tests are slow ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from adapters.vllm.layouts import distance, laid, picture
from ctxwin import Chunk, Fidelity, Window
from ctxwin.audit import Options, attach_audits, auditor_of
from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.kv.deficit import deficit
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.patch import form_patch
from ctxwin.kv.pooling import fit_basis, project
from engines import models
from interpreted import resident_copies

pytestmark = [pytest.mark.slow]
HEADER, QUERY = "watch a camera", "what color"
FIRST = Sampling(max_tokens=3, logprobs=-1)
# Float32: two ranks add halves of each projection that one rank adds at once.
CLOSE = 1e-4


def write_two_heads(folder: Path) -> Path:
    """A text model with two KV heads of 32, one for each rank."""
    with mock.patch.dict(models.SIZES, hidden_size=128):
        return models.write_text_model(folder)


def write_one_head(folder: Path) -> Path:
    """A vision model with one KV head, which both ranks hold."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    return models.wide(models.write_vision_model, folder, rope_parameters=rope)


TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"
CASES = {
    "heads cut": (write_two_heads, TENSOR, False),
    "head copied, pictures": (write_one_head, TENSOR, False),
    "layers cut, pictures": (write_one_head, PIPELINE, False),
    "heads cut, copies": (write_two_heads, TENSOR, True),
    "layers cut, copies": (write_one_head, PIPELINE, True),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """The model in one process, and on two ranks, which may keep copies of spans as on GPUs."""
    from ctxwin_vllm.engine import VLLMEngine

    write, kind, copies = request.param
    folder = write(tmp_path_factory.mktemp("ranks") / "model")
    start = partial(VLLMEngine, folder, dtype="float32", max_model_len=512)
    two = partial(start, **{kind: 2})
    # What is forked is opened first: of its process no engine may be open then.
    with resident_copies(two, interpret=False) if copies else closing(two()) as ranks, closing(start()) as one:
        yield one, ranks


def chunk(engine: Engine, seed: int) -> Chunk:
    if engine.spec.vision:
        return picture(seed)
    return Chunk.text(f"the color of frame {seed} is red now, and of the shape behind it blue {seed * 7}")


def parts_of(engine: Engine, seeds: list[int]) -> list[Encoded]:
    return [engine.encode_system_prompt(HEADER), *(engine.encode(chunk(engine, seed)) for seed in seeds)]


def computed(engine: Any, seeds: list[int], salt: str) -> tuple[Any, list[SpanKV]]:
    made = engine.generate(laid(parts_of(engine, seeds)), engine.encode_query(QUERY), FIRST, salt=salt)
    return made, [made.captured[i] for i in range(len(seeds) + 1)]


def test_captures_are_whole(engines: tuple[Any, Any]) -> None:
    one, two = engines
    (answer, spans), (answer2, spans2) = (computed(engine, [1, 2, 3], "a") for engine in (one, two))
    assert answer2.token_ids == answer.token_ids and distance(answer.logprobs, answer2.logprobs) < CLOSE
    for span, span2 in zip(spans, spans2, strict=True):
        span2.validate(two.spec.kv)
        assert torch.equal(span.positions, span2.positions) and span.start == span2.start
        torch.testing.assert_close(span2.k, span.k, atol=CLOSE, rtol=0)
        torch.testing.assert_close(span2.v, span.v, atol=CLOSE, rtol=0)


def test_slots_are_dropped_on_both_ranks(engines: tuple[Any, Any]) -> None:
    """In one request, but for stages, with a prompt that is merged by the attention of all heads."""
    rows, sent, answers = [], [], []
    for engine in engines:
        layout, query = laid(parts_of(engine, [1])), engine.encode_query(QUERY)
        for merging in (False, True):
            sampling = Sampling(30, hold=0.6, hold_every=8, merge_prompt=merging)
            with mock.patch.object(engine._core.driver, "submit", wraps=engine._core.driver.submit) as submit:
                answers.append(engine.generate(layout, query, sampling, salt="dropped").token_ids)
            sent.append(submit.call_count)
            rows += engine.forced_logprobs(layout, [(query, list(range(20, 50)))], sampling=sampling)
    assert answers[:2] == answers[2:] and sent[:2] == [2, 2]
    assert sent[2:] == ([2, 2] if engines[1]._core.shortens else [4, 5])
    for one, two in zip(rows[0] + rows[1], rows[2] + rows[3], strict=True):
        assert max(abs(one[token] - two[token]) for token in one.keys() & two.keys()) < 1e-3


def test_spans_go_from_either_to_the_other(engines: tuple[Any, Any]) -> None:
    """In another order, so that every span is turned on its way into both ranks' caches."""
    one, two = engines
    answers = []
    for make, serve in ((one, two), (two, one), (one, one)):
        _, spans = computed(make, [1, 2, 3], "a")
        order = [0, 3, 1, 2]
        layout = laid([parts_of(serve, [1, 2, 3])[i] for i in order], [spans[i] for i in order])
        salt = f"moved by {make is one}, {serve is one}"
        answers.append(serve.generate(layout, serve.encode_query(QUERY), FIRST, salt=salt))
        assert answers[-1].computed_tokens == serve.encode_query(QUERY).tokens
        assert answers[-1].bytes_loaded == sum(span.nbytes for span in spans) and answers[-1].fallbacks == 0
    for answer in answers:
        assert distance(answer.logprobs, answers[-1].logprobs) < CLOSE
        assert answer.token_ids == answers[-1].token_ids


@pytest.mark.parametrize("shared", [False, True], ids=["joint", "shared"])
def test_a_patch_formed_from_two_ranks(engines: tuple[Any, Any], shared: bool) -> None:
    """The deficit runs over all heads: formed where they are joined, served where they are cut."""
    one, two = engines
    answers = {}
    for engine in (one, two):
        parts = parts_of(engine, [4, 5])
        whole, spans = computed(engine, [4, 5], "patched")
        canonical = engine.prefill([Segment(parts[0], 0, span=spans[0])], parts[2], parts[0].advance, salt="canonical")
        patch = form_patch(spans[2], canonical, engine.spec.kv, dtype=torch.float32)
        if shared:
            lost = deficit(spans[2], canonical, engine.spec.kv)
            basis = fit_basis([lost], engine.spec.kv, 1000, dtype=torch.float32)
            patch = project(lost, basis, engine.spec.kv)
        layout = laid(parts, [spans[0], spans[1], canonical], {2: patch})
        query = engine.encode_query(QUERY)
        served = engine.generate(layout, query, FIRST, salt=f"served, {shared}")
        assert served.computed_tokens == query.tokens and served.fallbacks == 0
        assert distance(served.logprobs, whole.logprobs) < CLOSE
        bare = engine.generate(laid(parts, [*spans[:2], canonical]), query, FIRST, salt=f"bare, {shared}")
        assert distance(bare.logprobs, whole.logprobs) > 10 * CLOSE  # the patch is what makes them equal
        answers[engine] = served.logprobs
    assert distance(answers[one], answers[two]) < CLOSE


def test_an_audit_says_what_it_says_in_one_process(engines: tuple[Any, Any]) -> None:
    found = []
    for engine in engines:
        attach_audits(engine)
        with Window(engine, HEADER, fidelity=Fidelity("blind", audit=1.0, advanced={"reference": "window"})) as window:
            window.extend([chunk(engine, seed) for seed in (11, 12, 13)])
            found.append(window.ask(QUERY, max_tokens=3))
            assert auditor_of(engine, Options(share=1.0)).drain(60)
    assert found[0].token_ids == found[1].token_ids and found[0].audit and found[0].audit > 0
    assert found[0].audit == pytest.approx(found[1].audit, rel=1e-2, abs=CLOSE)


def test_a_prefix_hit_and_a_hole(engines: tuple[Any, Any]) -> None:
    _, two = engines
    whole, spans = computed(two, [6, 7, 8], "hole")
    again = two.generate(laid(parts_of(two, [6, 7, 8])), two.encode_query(QUERY), FIRST, salt="hole")
    assert again.cached_tokens > 0 and distance(again.logprobs, whole.logprobs) < CLOSE
    holed = laid(parts_of(two, [6, 7, 8]), [spans[0], spans[1], None, spans[3]])  # type: ignore[list-item]
    found = two.generate(holed, two.encode_query(QUERY), FIRST, salt="holed")
    assert distance(found.logprobs, whole.logprobs) < CLOSE and list(found.captured) == [2]
    torch.testing.assert_close(found.captured[2].k, spans[2].k, atol=CLOSE, rtol=0)


def test_several_at_once(engines: tuple[Any, Any]) -> None:
    """A pipeline has two batches under way: what one request loads, and what another computes, stay apart."""
    one, two = engines
    query, longer = two.encode_query(QUERY), Sampling(max_tokens=12)
    layouts = []
    for seed in range(4):
        _, spans = computed(one, [seed, seed + 20, seed + 40], f"at once {seed}")
        spans[3] = spans[3] if seed % 2 else None  # type: ignore[call-overload]  # every other computes its last chunk
        layouts.append(laid(parts_of(two, [seed, seed + 20, seed + 40]), spans))
    alone = [two.generate(layout, query, longer, salt=f"alone {i}") for i, layout in enumerate(layouts)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: two.generate(layouts[i], query, longer, salt=f"together {i}"), range(4)))
    assert [f.token_ids for f in found] == [a.token_ids for a in alone] and not any(f.fallbacks for f in found)


def test_a_corrupt_file_of_one_span(engines: tuple[Any, Any]) -> None:
    """Both ranks fail, the request alone ends, and the engine serves it in another way."""
    _, two = engines
    whole, spans = computed(two, [9, 10], "corrupt")
    layout = laid(parts_of(two, [9, 10]), spans)
    query = two.encode_query(QUERY)
    with mock.patch("ctxwin_vllm.transport.shared_memory.encode_span", return_value=b"nothing that anybody can read"):
        found = two.generate(layout, query, FIRST, salt="corrupt load")
    assert found.fallbacks == 1 and distance(found.logprobs, whole.logprobs) < CLOSE
    assert two.generate(layout, query, FIRST, salt="sound load").fallbacks == 0
