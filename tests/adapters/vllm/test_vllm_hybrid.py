"""Hybrids on vLLM: states are loaded and read back beside the KV, at any number of tokens.

vLLM's CPU kernels for recurrent layers take bfloat16 only, in which an answer depends on where a prompt is cut. So a window's
answers are held to the bit against the same prompt cut at the same places and computed anew, and both against one forward,
where states that are wrong show by far more than rounding does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
import torch

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.base import Engine
from ctxwin.engines.segments import Segment
from ctxwin.errors import UnsupportedModel
from ctxwin.store import open_store
from engines.conformance import ALL, QUERY, laid, picture, with_spans
from engines.hybrid_windows import assert_computes_what_is_new
from engines.hybrids import WRITERS, edited, gap
from engines.models import edit_config, write_hybrid

if TYPE_CHECKING:
    from ctxwin_vllm.engine import VLLMEngine

pytestmark = [pytest.mark.slow]
PROGRAMS = int(os.environ.get("CTXWIN_PROGRAMS", "6"))
CUT = 1.0
"""Most that a log-probability changes where a prompt is cut elsewhere, on these random models; states of zeros change more."""
TEXTS = ("frame {} is red", "a camera sees {} squares", "now {}", "the number is {} and the shape is a circle")
HEADER = "watch a camera"


def opened(folder: Path, **options: object) -> VLLMEngine:
    from ctxwin_vllm.engine import VLLMEngine

    return VLLMEngine(folder, dtype="bfloat16", **{"store": open_store("memory:"), **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=list(WRITERS))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    with opened(WRITERS[request.param](tmp_path_factory.mktemp("hybrids") / request.param)) as made:
        yield made


def chunk(i: int, vision: bool = False) -> Chunk:
    text = TEXTS[i % len(TEXTS)].format(i) + "\n"
    return Chunk.image(picture(i, (84, 56)[i % 2]), text=text) if vision and i % 3 == 0 else Chunk.text(text)


def anew(engine: Engine, window: Window) -> tuple[dict[int, float], dict[int, float]]:
    """What is placed, computed without anything stored: cut behind each chunk, and in one go."""
    encoded = [engine.encode_system_prompt(window.system_prompt), *(engine.encode(window.chunk(i)) for i in window.ids)]
    query = engine.encode_query(QUERY)
    cut = engine.generate(laid(encoded, capture=True), query, ALL)
    return cut.logprobs, engine.generate(laid(encoded), query, ALL).logprobs


def program(engine: Engine, seed: int) -> float:
    """Random edits, each followed by an ask; returns by how much answers changed at most where the prompt was not cut."""
    rng, chunk_of, most = np.random.default_rng(seed), partial(chunk, vision=engine.spec.vision), 0.0
    windows = [Window(engine, HEADER)]
    windows[0].extend([chunk_of(i) for i in range(3)])
    for step in range(6):
        window = edited(rng, windows, chunk_of)
        answer = window.ask(QUERY, max_tokens=2, logprobs=-1)
        assert answer.usage.exact and not answer.usage.fallbacks
        cut, whole = anew(engine, window)
        assert gap(answer.first_token_logprobs, cut) == 0, (seed, step)
        most = max(most, gap(cut, whole))
        assert window.ask(QUERY, max_tokens=1).usage.computed_tokens == engine.encode_query(QUERY).tokens
        window.check()
    return most


def test_random_edits_against_a_re_prefill(engine: VLLMEngine) -> None:
    changes = [program(engine, seed) for seed in range(PROGRAMS)]
    assert np.median(changes) < CUT, sorted(changes)  # rounding may send a token to another expert


def test_states_matter(engine: VLLMEngine) -> None:
    encoded = [engine.encode_system_prompt(HEADER), *(engine.encode(chunk(i)) for i in range(4))]
    query, layout = engine.encode_query(QUERY), laid(encoded)
    made = engine.generate(laid(encoded, capture=True), query, ALL)
    held = with_spans(layout, made.captured)
    found = engine.generate(held, query, ALL)
    assert gap(found.logprobs, made.logprobs) == 0 and found.computed_tokens == query.tokens and found.forwards == 1
    last = held[-1].span
    assert last is not None
    nbytes, planned = sum(s.nbytes for s in last.states.values()), engine.spec.kv.state_bytes
    # Without AMX vLLM's kernel keeps the recurrent states in the model's dtype; `state_bytes` bounds them.
    assert nbytes == planned if torch.cpu._is_amx_tile_supported() else planned // 2 <= nbytes <= planned
    zeros = replace(last, states={name: state * 0 for name, state in last.states.items()})
    wrong = engine.generate([*held[:-1], replace(held[-1], span=zeros, span_key="zeros")], query, ALL)
    assert gap(wrong.logprobs, made.logprobs) > 2 * CUT


def test_what_needs_no_forward(engine: VLLMEngine) -> None:
    with Window(engine, HEADER) as window:
        assert_computes_what_is_new(engine, window, chunk(100), chunk(101))


def test_an_exchange_is_remembered_with_the_states_behind_it(engine: VLLMEngine) -> None:
    with Window(engine, HEADER) as window:
        window.extend([chunk(1), chunk(2)])
        window.ask(QUERY, max_tokens=4, remember=True)
        answer = window.ask(QUERY, logprobs=-1)
        assert answer.usage.exact
        assert gap(answer.first_token_logprobs, anew(engine, window)[1]) < CUT


def test_lost_states_are_computed_again(engine: VLLMEngine) -> None:
    """A load that lacks states fails, is counted, and no answer comes from it."""
    encoded = [engine.encode_system_prompt(HEADER), *(engine.encode(chunk(i)) for i in range(3))]
    query, layout = engine.encode_query(QUERY), laid(encoded)
    made = engine.generate(laid(encoded, capture=True), query, ALL)
    held = with_spans(layout, made.captured)
    span = held[-1].span
    assert span is not None
    half = replace(span, states={name: s for name, s in span.states.items() if not name.startswith("0.")})
    got = engine.generate([*held[:-1], replace(held[-1], span=half, span_key="half")], query, ALL)
    assert got.fallbacks == 1 and gap(got.logprobs, made.logprobs) < CUT
    again = engine.generate(held, query, ALL)
    assert gap(again.logprobs, made.logprobs) == 0


def test_requests_side_by_side(engine: VLLMEngine) -> None:
    """Each has states of its own, also while others are loaded or computed in the same step."""
    from concurrent.futures import ThreadPoolExecutor

    windows = []
    for i in range(6):
        windows.append(Window(engine, HEADER))
        windows[-1].extend([chunk(7 * i + j, engine.spec.vision) for j in range(3)])
    alone = [window.ask(QUERY, max_tokens=1, logprobs=-1).first_token_logprobs for window in windows]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(4):
            together = list(pool.map(lambda w: w.ask(QUERY, max_tokens=1, logprobs=-1), windows))
            for got, want in zip(together, alone, strict=True):
                assert not got.usage.fallbacks
                assert gap(got.first_token_logprobs, want) < CUT


def test_what_a_hybrid_does_not_do(engine: VLLMEngine) -> None:
    from ctxwin_vllm.rendered import NotAWindow, RenderedRequest

    with pytest.raises(UnsupportedModel, match="mode must be 'exact' or 'auto', got 'patched'"):
        Window(engine, HEADER, fidelity=Fidelity("patched"))
    with pytest.raises(UnsupportedModel, match="states cannot be merged"):
        engine.attended([], engine.encode(chunk(0)), 0)
    with pytest.raises(NotAWindow, match="left to vLLM"):
        RenderedRequest(engine, mock.Mock())
    encoded = engine.encode(chunk(0))
    span = engine.prefill([], encoded, 0)
    with pytest.raises(UnsupportedModel, match="served after exactly the same tokens"):
        engine.generate([Segment(encoded, 0, span, approximate=True)], engine.encode_query(QUERY), ALL, salt="x")


@pytest.mark.parametrize("processes", ["multi", "async"])
def test_in_processes_of_their_own(processes: str, tmp_path: Path) -> None:
    with opened(write_hybrid(tmp_path / "model"), processes=processes) as engine:
        for seed in range(2):
            program(engine, seed)
        with Window(engine, HEADER) as window:
            window.extend([chunk(1), chunk(2)])
            window.ask(QUERY, max_tokens=4, remember=True)
            assert gap(window.ask(QUERY, logprobs=-1).first_token_logprobs, anew(engine, window)[1]) < CUT


def test_what_a_start_refuses(tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path / "model")
    from ctxwin_vllm.engine import VLLMEngine

    with pytest.raises(UnsupportedModel, match="take bfloat16 only, got float32"):
        VLLMEngine(folder, dtype="float32")
    with pytest.raises(ValueError, match="enable_prefix_caching must be False"):
        opened(folder, enable_prefix_caching=True)
    with pytest.raises(UnsupportedModel, match="tensor_parallel_size must be 1 for a model with recurrent layers"):
        opened(folder, tensor_parallel_size=2)


def test_a_stream_of_pictures_computes_each_once(tmp_path: Path) -> None:
    folder = WRITERS["qwen3_5"](tmp_path / "model")
    edit_config(folder, max_position_embeddings=4096)
    with opened(folder) as engine, Window(engine, HEADER, 4096) as window:
        query = engine.encode_query(QUERY).tokens
        for i in range(100):
            window.append(Chunk.image(picture(i)))
            want = window.chunks[-1].tokens + query + (window.core.state.system_prompt_tokens if not i else 0)
            assert window.ask(QUERY, max_tokens=1).usage.computed_tokens == want
        assert engine.counters.vision_encodes == 100


def test_a_window_outlives_vllm(tmp_path: Path) -> None:
    folder, where = write_hybrid(tmp_path / "model"), f"disk:{tmp_path / 'kv'}"
    with (
        opened(folder, store=open_store(where)) as engine,
        Window(engine, HEADER, fidelity=Fidelity("exact")) as window,
    ):
        window.extend([chunk(i) for i in range(3)])
        answer, said = window.ask(QUERY, logprobs=-1), window.snapshot().model_dump_json()
    engine.store.close()
    with opened(folder, store=open_store(where)) as engine, Window.restore(engine, said) as back:
        found = back.ask(QUERY, logprobs=-1)
        assert found.usage.computed_tokens == engine.encode_query(QUERY).tokens
        assert gap(found.first_token_logprobs, answer.first_token_logprobs) == 0


def test_the_trained_hybrid_answers_from_a_window() -> None:
    """What chunks absorbed while they were prefilled is in what vLLM is handed."""
    from ctxwin.tiny.world import make_item, render

    right = 0
    with opened(Path(__file__).parents[2] / "models" / "hybrid") as engine:
        for i in range(24):
            item = make_item(1_000_000 + i, "multi_hop", 2 + i % 3, conflict=0.8)
            with Window(engine, "You watch a camera.") as window:
                first = window.append(Chunk.image(picture(i, 224)))
                window.extend([Chunk.image(render(frame)) for frame in item.frames])
                window.ask(item.questions[0].text, 4)
                window.evict(first)
                answer = window.ask(item.questions[0].text, 4)
                again = window.ask(item.questions[0].text, 4)
            assert again.text == answer.text and again.usage.computed_tokens < answer.usage.computed_tokens
            right += answer.text.strip() == item.questions[0].answer
    assert right >= 22
