"""Answers that keep a share of the KV on vLLM, held against transformers with the same schedule, and what is refused."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.vllm import second_runner
from adapters.vllm.held_answers import answers, once, question
from adapters.vllm.layouts import encoded, laid, spans_of
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.sampling import Sampling
from ctxwin.errors import EngineFailed, UnsupportedModel
from ctxwin.kv.merge import merge, merged_slots

ANY = -1


@pytest.fixture(scope="module")
def engine(shared_engine: Any) -> Any:
    return shared_engine


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Iterator[HFEngine]:
    with HFEngine(model_dir, dtype="float32") as opened:
        yield opened


@given(
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    hold=st.sampled_from([0.2, 0.4, 0.6, 0.8, 0.95]),
    every=st.sampled_from([1, 3, 16, 64]),
    merging=st.booleans(),
    tokens=st.integers(1, 40),
)
def test_an_answer_is_that_of_transformers_with_the_same_schedule(
    engine: Any, oracle: HFEngine, seeds: list[int], hold: float, every: int, merging: bool, tokens: int
) -> None:
    sampling = Sampling(tokens, hold=hold, hold_every=every, merge_prompt=merging, token_logprobs=2)
    streamed: list[int] = []
    made = engine.generate(
        *question(engine, seeds), sampling, salt="held", on_token=lambda token, text: bool(streamed.append(token) or 1)
    )
    assert streamed == made.token_ids and [token.index for token in made.token_ids] == list(range(len(made.token_ids)))
    layout, query = question(oracle, seeds)
    (rows,) = oracle.forced_logprobs(layout, [(query, made.token_ids)], best=ANY, sampling=sampling)
    for token, row in zip(made.token_ids, rows, strict=False):
        assert token.logprob == pytest.approx(row[token], abs=1e-3)
        assert row[token] >= max(row.values()) - 1e-3, "the likeliest, but for rounding"
    assert len(made.token_ids) == tokens or max(rows[-1], key=rows[-1].__getitem__) in oracle.ends
    (scored,) = engine.forced_logprobs(*_scored(engine, seeds, made.token_ids), sampling=sampling)
    assert len(scored) == len(rows)
    for row, want in zip(scored, rows, strict=True):
        assert max(abs(row[token] - want[token]) for token in row) < 1e-3


def _scored(engine: Any, seeds: list[int], ids: list[int]) -> tuple[list[Any], list[tuple[Any, list[int]]]]:
    layout, query = question(engine, seeds)
    return layout, [(query, ids)]


def test_spans_merged_or_not_are_held_like_what_is_computed(engine: Any, oracle: HFEngine) -> None:
    sampling = Sampling(40, hold=0.7, hold_every=16, token_logprobs=0)
    spans = spans_of(engine, [1, 2, 3], "held-spans")
    for merged in (False, True):
        parts, query = encoded(engine, [1, 2, 3]), engine.encode_query("what color")
        layout = laid(parts, spans)
        if merged:
            from torch import Generator, rand

            count = merged_slots(0.5, parts[2].tokens)
            noise = rand(engine.spec.kv.layers, parts[2].tokens, generator=Generator().manual_seed(0))
            span = merge(spans[2], noise, count)
            layout[2] = replace(layout[2], span=span, merged=True, approximate=True, span_key="half")
        made = engine.generate(layout, query, sampling, salt=f"held-{merged}")
        on_oracle = [
            replace(segment, encoded=part) for segment, part in zip(layout, encoded(oracle, [1, 2, 3]), strict=True)
        ]
        (rows,) = oracle.forced_logprobs(
            on_oracle, [(oracle.encode_query("what color"), made.token_ids)], sampling=sampling
        )
        assert [t.logprob for t in made.token_ids] == pytest.approx(
            [row[t] for t, row in zip(made.token_ids, rows, strict=False)], abs=1e-3
        )


def test_a_lost_load_is_submitted_again(engine: Any) -> None:
    from ctxwin_vllm.transport import base

    sampling = Sampling(20, hold=0.5, hold_every=8, merge_prompt=True)
    layout, query = question(engine, [1, 2])
    right = engine.generate(layout, query, sampling)
    retries = engine.counters.retries
    with mock.patch.object(base, "write", wraps=base.write, side_effect=[OSError("once"), *[mock.DEFAULT] * 9]):
        again = engine.generate(layout, query, sampling)
    assert again.token_ids == right.token_ids and engine.counters.retries == retries + 1
    with (
        mock.patch.object(base, "write", side_effect=OSError("a lost page")),
        pytest.raises(EngineFailed, match="so far could not be loaded"),
    ):
        engine.generate(layout, query, sampling)
    assert engine.generate(layout, query, sampling).token_ids == right.token_ids


@pytest.mark.parametrize("merging", [False, True])
def test_slots_leave_a_running_request(engine: Any, merging: bool) -> None:
    sampling = Sampling(60, hold=0.4, hold_every=4, merge_prompt=merging, token_logprobs=0)
    whole, requests = answers(engine, sampling, True)
    pieces, more = answers(engine, sampling, False)
    assert len(whole.token_ids) == 60 and requests == 2 and more == 15 + merging
    assert whole.token_ids == pieces.token_ids
    assert [t.logprob for t in whole.token_ids] == pytest.approx([t.logprob for t in pieces.token_ids], abs=1e-4)
    assert not engine._core.transport.kept
    scheduler = engine._core.driver.engine.engine_core.engine_core.scheduler
    assert scheduler.kv_cache_manager.block_pool.get_usage() == 0


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize("processes", ["multi", "async"])
def test_slots_leave_a_running_request_in_another_process(oracle: HFEngine, model_dir: Path, processes: str) -> None:
    """Where the workers weigh a merged prompt's tokens by its attention, too."""
    from ctxwin_vllm.engine import VLLMEngine

    with VLLMEngine(model_dir, dtype="float32", processes=processes) as engine:
        for merging in (False, True):
            sampling = Sampling(60, hold=0.4, hold_every=4, merge_prompt=merging)
            whole, requests = answers(engine, sampling, engine._core.shortens)
            assert requests == 2 and len(whole.token_ids) == 60
            layout, query = question(oracle, [1, 2])
            assert whole.token_ids == oracle.generate(layout, query, sampling).token_ids
            assert not len(engine._core.transport)


@pytest.mark.newest
def test_slots_leave_a_running_request_of_the_second_model_runner(engine: Any, model_dir: Path) -> None:
    """The same tokens as of the first one; drawn ones by the seed that each piece would have."""
    command = [sys.executable, second_runner.__file__, str(model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for (whole, pieces), sampling in zip(found, second_runner.SAMPLINGS, strict=True):
        assert whole[1] == 2 < pieces[1] and whole[0] == pieces[0] and len(whole[0]) == sampling.max_tokens
        if not sampling.temperature:
            assert [*second_runner.answers(engine, sampling, True)] == whole


@pytest.mark.slow
def test_an_answer_that_is_stopped_while_its_prompt_is_loaded_ends_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("late_load.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["said"] == ["stopped"] and found["again"] and found["dead"] == "None"


def test_an_answer_that_is_preempted_or_not_moved_is_generated_again(engine: Any) -> None:
    """What it held is gone with its blocks; it is never computed from the placeholders that stand for it."""
    sampling = Sampling(40, hold=0.5, hold_every=8, token_logprobs=0)
    right, _ = answers(engine, sampling, True)
    driver, retries = engine._core.driver, engine.counters.retries
    scheduler = driver.engine.engine_core.engine_core.scheduler

    def preempting(token: Any, text: str) -> bool:
        if token.index in (12, 25) and engine.counters.retries == retries:
            driver.call(lambda: scheduler.reset_prefix_cache(reset_running_requests=True))
        return True

    again, requests = answers(engine, sampling, True, on_token=preempting)
    assert again.token_ids == right.token_ids and (requests, engine.counters.retries) == (3, retries + 1)
    from ctxwin_vllm.transport.base import Endpoint

    with mock.patch.object(Endpoint, "_compact", autospec=True, side_effect=once(Endpoint._compact)):
        again, requests = answers(engine, sampling, True)
    assert again.token_ids == right.token_ids and (requests, engine.counters.retries) == (3, retries + 2)


def test_a_caller_stops_between_and_within_pieces(engine: Any) -> None:
    layout, query = question(engine, [1, 2])
    sampling = Sampling(30, hold=0.5, hold_every=8)
    whole = engine.generate(layout, query, sampling).token_ids
    for most in (1, 9, 10, 20):
        made = engine.generate(layout, query, sampling, on_token=_stopping(most))
        assert made.token_ids == whole[:most] and not made.finished


def _stopping(most: int) -> Callable[[int, str], bool]:
    tokens = itertools.count(1)
    return lambda token, text: next(tokens) < most


def test_what_cannot_be_held_is_refused_by_name(engine: Any) -> None:
    layout, query = question(engine, [1])
    forwards, held = engine.counters.prefill_forwards, Sampling(hold=0.5)
    several = "share of the KV.*got 0.5: json_schema and penalties .*; leave them out, .* eliminate .* hf:MODEL$"
    for sampling in (
        replace(held, repetition_penalty=1.1),
        replace(held, presence_penalty=1.0),
        replace(held, json_schema="{}"),
    ):
        with pytest.raises(UnsupportedModel, match=several):
            engine.generate(layout, query, sampling)
    with pytest.raises(UnsupportedModel, match="remembered with all of its KV"):
        engine.generate(layout, query, held, capture_query=True)
    with pytest.raises(ValueError, match="hold_every must be"):
        engine.generate(layout, query, replace(held, hold_every=0))
    with mock.patch.object(engine._core, "kv", replace(engine._core.kv, family="mla")):
        engine.check_hold(held)
        with pytest.raises(UnsupportedModel, match="GQA and MHA only"):
            engine.check_hold(replace(held, merge_prompt=True))
    for name, value, reason in (("outputs", True, "outputs=True"), ("draft_model", object(), "draft model")):
        with mock.patch.object(engine._core, name, value), pytest.raises(UnsupportedModel, match=reason):
            engine.check_hold(held)
    assert engine.counters.prefill_forwards == forwards
