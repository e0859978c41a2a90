"""Answers that keep a share of the KV in a process that is forked: from one in which no other engine is open."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from adapters.vllm.held_answers import answers, once
from adapters.vllm.layouts import encoded, laid, spans_of
from ctxwin.engines.sampling import Sampling
from interpreted import resident_copies


@pytest.mark.slow
@pytest.mark.guard
def test_an_answer_in_another_process_is_generated_again(model_dir: Path) -> None:
    """Where the copy of its prompt has gone, its first move fails, or it is preempted between two."""
    from ctxwin_vllm.engine import VLLMEngine
    from ctxwin_vllm.paged import PagedKV
    from ctxwin_vllm.transport.base import Endpoint

    sampling = Sampling(40, hold=0.5, hold_every=8, token_logprobs=0)
    start = partial(VLLMEngine, model_dir, dtype="float32", processes="multi")
    # In the process that is forked from this one.
    failing = mock.patch.object(Endpoint, "_compact", autospec=True, side_effect=once(Endpoint._compact))
    lost = mock.patch.object(PagedKV, "select", autospec=True, side_effect=once(PagedKV.select))
    with failing, lost, resident_copies(start, interpret=False) as engine:
        moved, requests = answers(engine, sampling, True)
        assert (requests, engine.counters.retries) == (4, 2) and engine.bytes_copied.value, (
            "sent by the host, then moved"
        )
        copied = engine.bytes_copied.value
        right, requests = answers(engine, sampling, True)
        assert requests == 2 and right.token_ids == moved.token_ids and engine.bytes_copied.value == copied
        driver = engine._core.driver

        def preempting(token: Any, text: str) -> bool:
            if token.index in (12, 25) and engine.counters.retries == 2:
                with contextlib.suppress(Exception):  # it preempts, and then finds blocks of a step that it is ahead of
                    driver.call(lambda: driver.engine.reset_prefix_cache(True))
            return True

        again, requests = answers(engine, sampling, True, on_token=preempting)
        assert again.token_ids == right.token_ids and (requests, engine.counters.retries) == (3, 3)
        spans, parts = spans_of(engine, [1, 2], "kept"), encoded(engine, [1, 2])
        assert not engine.generate(
            laid(parts, spans), engine.encode_query("what color"), Sampling(1), salt="moved"
        ).fallbacks
