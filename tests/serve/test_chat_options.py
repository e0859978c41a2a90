"""What a chat that names chunks may ask for: sampling, log-probabilities, several choices; and what is refused."""

from __future__ import annotations

import http.client
import json
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from openai import OpenAI

from ctxwin import Chunk
from ctxwin.engines.base import Sampling
from ctxwin.engines.hf.model import filter_logits
from ctxwin.errors import AnswerStopped
from ctxwin.tiny import world
from ctxwin_client import chunk_part, upload
from ctxwin_server.chat import answer_choices
from ctxwin_server.completions import ChatRequest, Reply
from ctxwin_server.limits import Limits
from serve.serving import Server, serving
from serve.test_routes import call, wait_for

parse = ChatRequest.model_validate
FRAMES = world.make_stream(seed=9, n_frames=4)
CHUNKS = [Chunk.image(world.render(f), text=f"t={i} s") for i, f in enumerate(FRAMES)]
QUESTION = f"color of {FRAMES[2].marks[0]:02d}?"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Limits(threads=3)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.client(max_retries=0)


@pytest.fixture(scope="module")
def asked(client: OpenAI) -> dict[str, Any]:
    """A request over three pictures."""
    content: list[Any] = [*map(chunk_part, [upload(client, chunk) for chunk in CHUNKS[:3]])]
    content.append({"type": "text", "text": QUESTION})
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 6}


@pytest.fixture(scope="module")
def vague(asked: dict[str, Any]) -> dict[str, Any]:
    """The same without a question that has an answer: the model is sure of nothing."""
    (message,) = asked["messages"]
    content = [*message["content"][:-1], {"type": "text", "text": "go on"}]
    return {**asked, "messages": [{"role": "user", "content": content}], "max_tokens": 12}


def text_of(client: OpenAI, asked: dict[str, Any], **change: Any) -> str:
    return client.chat.completions.create(**{**asked, **change}).choices[0].message.content or ""


def drawn(client: OpenAI, vague: dict[str, Any], **change: Any) -> list[str]:
    """Eight choices at a high temperature."""
    made = client.chat.completions.create(**{**vague, "temperature": 2.0, "seed": 5, "n": 8, **change})
    return [choice.message.content or "" for choice in made.choices]


@pytest.mark.parametrize("only", [{"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}])
def test_one_token_to_draw_from_is_greedy(client: OpenAI, vague: dict[str, Any], only: dict[str, Any]) -> None:
    assert set(drawn(client, vague, **only)) == {text_of(client, vague)}


@pytest.mark.parametrize("temperature", [1e-6, 1e-45, 5e-324])
def test_a_temperature_next_to_nothing_is_none(client: OpenAI, vague: dict[str, Any], temperature: float) -> None:
    assert set(drawn(client, vague, temperature=temperature, top_p=0.9)) == {text_of(client, vague)}


def test_a_seed_gives_the_same_answers_again(client: OpenAI, vague: dict[str, Any]) -> None:
    once, again, other = (drawn(client, vague, seed=seed) for seed in (5, 5, 6))
    assert once == again != other and once[1:] == other[:-1]  # a choice's seed is the one before it and one
    assert len(set(once)) > 1


def test_what_may_be_drawn_is_what_transformers_allows() -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(0)
    for top_p, top_k, min_p in ((0.7, 0, 0.0), (1.0, 5, 0.0), (1.0, 0, 0.2), (0.5, 9, 0.05)):
        logits = 3 * torch.randn(50)
        expected = logits[None] / 0.8
        for wanted, warper in (
            (min_p > 0, MinPLogitsWarper(min_p)),
            (top_k > 0, TopKLogitsWarper(max(top_k, 1))),
            (top_p < 1, TopPLogitsWarper(top_p)),
        ):
            expected = warper(None, expected) if wanted else expected
        made = filter_logits(logits, Sampling(temperature=0.8, top_p=top_p, top_k=top_k, min_p=min_p), [])
        assert torch.equal(made.isfinite(), expected[0].isfinite()) and 1 <= made.isfinite().sum() < 50
        assert torch.equal(made[made.isfinite()], logits[made.isfinite()])


def test_penalties_count_what_the_answer_has() -> None:
    logits = torch.zeros(4)
    made = filter_logits(logits, Sampling(presence_penalty=0.5, frequency_penalty=0.25), [1, 1, 3])
    assert made.tolist() == [0.0, -1.0, 0.0, -0.75]


def test_requests_that_say_nothing_take_the_servers_defaults() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    defaults = {"temperature": 0.1, "top_p": 0.8, "repetition_penalty": 1.05, "top_k": 20, "max_tokens": 7}
    made = parse(body).sampling(defaults)
    assert (made.temperature, made.top_p, made.repetition_penalty, made.top_k) == (0.1, 0.8, 1.05, 20)
    assert parse(body).sampling({}) == Sampling(temperature=1.0)
    said = ChatRequest.model_validate(
        {**body, "temperature": 0, "top_p": 1, "top_k": -1, "repetition_penalty": 1}
    ).sampling(defaults)
    assert (said.temperature, said.top_p, said.repetition_penalty, said.top_k) == (0, 1, 1, 0)
    most = [
        parse({**body, **more}).answer_limit(100, defaults) for more in ({}, {"max_tokens": 50}, {"max_tokens": 200})
    ]
    assert most == [7, 50, 200] and parse(body).answer_limit(100, {}) == 100


def test_log_probabilities_are_the_models(client: OpenAI, server: Server, asked: dict[str, Any]) -> None:
    greedy = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    scores = greedy.choices[0].logprobs
    assert scores is not None and scores.content and greedy.usage is not None
    assert len(scores.content) == greedy.usage.completion_tokens
    for entry in scores.content:
        assert entry.bytes == list(entry.token.encode())
        best = entry.top_logprobs
        assert len(best) == 3 and (best[0].token, best[0].logprob) == (entry.token, entry.logprob)
        assert [b.logprob for b in best] == sorted((b.logprob for b in best), reverse=True)
        assert sum(math.exp(b.logprob) for b in best) <= 1 + 1e-6
    assert "".join(entry.token for entry in scores.content) == greedy.choices[0].message.content
    bare = client.chat.completions.create(**asked, logprobs=True).choices[0].logprobs
    assert bare is not None and [e.logprob for e in bare.content or ()] == [e.logprob for e in scores.content]
    assert not any(e.top_logprobs for e in bare.content or ())
    assert client.chat.completions.create(**asked).choices[0].logprobs is None


def test_log_probabilities_are_streamed_with_their_tokens(client: OpenAI, asked: dict[str, Any]) -> None:
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content
    events = list(client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True))
    scored = [e.choices[0].logprobs.content or [] for e in events if e.choices[0].logprobs is not None]
    assert [entry for part in scored for entry in part] == whole.logprobs.content
    assert "".join(e.choices[0].delta.content or "" for e in events) == whole.message.content


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_those_of_requests_of_their_own(client: OpenAI, vague: dict[str, Any], stream: bool) -> None:
    """More choices than the server has threads."""
    hot: dict[str, Any] = {**vague, "temperature": 2.0}
    alone = [client.chat.completions.create(**hot, seed=11 + i) for i in range(5)]
    if stream:
        texts, ended = [""] * 5, [""] * 5
        for event in client.chat.completions.create(**hot, seed=11, n=5, stream=True):
            (choice,) = event.choices
            assert not ended[choice.index]  # nothing comes behind the end of a choice
            texts[choice.index] += choice.delta.content or ""
            ended[choice.index] = choice.finish_reason or ended[choice.index]
    else:
        made = client.chat.completions.create(**hot, seed=11, n=5)
        assert [choice.index for choice in made.choices] == list(range(5)) and made.usage is not None
        texts = [choice.message.content or "" for choice in made.choices]
        ended = [choice.finish_reason for choice in made.choices]
        counts = [one.usage.completion_tokens for one in alone if one.usage is not None]
        assert made.usage.completion_tokens == sum(counts)
        assert made.usage.prompt_tokens == alone[0].usage.prompt_tokens  # type: ignore[union-attr]
    assert texts == [one.choices[0].message.content for one in alone] and len(set(texts)) > 1
    assert ended == [one.choices[0].finish_reason for one in alone]


def test_choices_end_where_nothing_runs_beside_them_and_stop_with_the_first_error() -> None:
    """Threads that never come, threads that come late, and an error in any choice."""
    never: list[Future[Reply]] = []

    def park(work: Callable[[], Reply]) -> Future[Reply]:
        never.append(Future())
        return never[-1]

    def one(index: int, begun: Callable[[], None], halted: Callable[[], bool]) -> Reply:
        begun()
        begun()
        return Reply(index, str(index), "stop", None)  # type: ignore[arg-type]

    assert [reply.index for reply in answer_choices(one, 4, park, lambda: False)] == [0, 1, 2, 3]
    assert len(never) == 3 and all(future.cancelled() for future in never)
    assert [reply.index for reply in answer_choices(one, 1, park, lambda: False)] == [0] and len(never) == 3

    def failing(index: int, begun: Callable[[], None], halted: Callable[[], bool]) -> Reply:
        begun()
        if index == 2:
            raise ValueError("the second")
        for _ in range(10_000):  # like an answer that looks at each token whether it is still wanted
            if halted():
                raise AnswerStopped
            threading.Event().wait(0.001)
        raise AssertionError("nobody stopped it")

    with ThreadPoolExecutor(4) as pool, pytest.raises(ValueError, match="the second"):
        answer_choices(failing, 3, pool.submit, lambda: False)
    with pytest.raises(AnswerStopped):
        answer_choices(failing, 2, park, lambda: True)


def test_a_client_that_leaves_stops_every_choice(server: Server, vague: dict[str, Any]) -> None:
    body = {**vague, "temperature": 2.0, "seed": 1, "n": 5, "max_tokens": 3000, "stream": True}
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    assert connection.getresponse().read(10)
    running = server.service._pool._running
    assert running[""] >= 1
    connection.close()
    wait_for(lambda: not running[""] and not server.service._pool.waiting(""))
    assert server.engines[""].store.stats().leased == 0


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": 129, "temperature": 1}, "n:"),
        ({"n": 2, "temperature": 0}, "n must be 1"),
        ({"n": 2}, "n must be 1"),  # the server's default is greedy
        ({"top_logprobs": 3}, "logprobs must be true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": "x"}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e999}, "repetition_penalty"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),  # not on this engine
        ({"seed": 2**63}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1001}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream must be true"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
        ({"response_format": {"type": "json_object"}}, "JSON schemas"),  # not on this engine
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "structural tag"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"logprobs": True, "top_logprobs": 20, "n": 128, "temperature": 1, "max_tokens": 3000}, "top_logprobs"),
        ({"response_format": schema({"const": "x" * 300_000})}, "JSON schema"),
        ({"cache_salt": "x"}, "cache_salt"),
        ({"priority": -1}, "priority"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    server: Server, asked: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    raw = json.dumps({**asked, **change}).encode()
    status, answer = call(server, "/v1/chat/completions", raw)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer
    assert said in answer["error"]["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "yes", "prefix": True},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
    ],
)
def test_parts_of_messages_that_are_not_understood_are_refused(
    server: Server, asked: dict[str, Any], message: dict[str, Any]
) -> None:
    body = {**asked, "messages": [message, *asked["messages"]]}
    status, answer = call(server, "/v1/chat/completions", body)
    assert status == 400 and answer["error"]["message"].startswith("the request is malformed: messages.0"), answer


def test_a_schema_without_end_and_chunks_without_end_are_refused(server: Server, asked: dict[str, Any]) -> None:
    for depth in (150, 400, 100_000):
        deep = b'{"not": ' * depth + b"{}" + b"}" * depth
        raw = json.dumps({**asked, "response_format": schema("DEEP")}).encode().replace(b'"DEEP"', deep)
        status, answer = call(server, "/v1/chat/completions", raw)
        assert (status, answer["error"]["code"]) in (
            (400, "invalid_value"), (400, "unsupported_model"), (413, "too_large"),
        ), answer  # fmt: skip
    (message,) = asked["messages"]
    told = [{"role": "user", "content": ""}, {"role": "assistant", "content": "a"}] * 5000
    for many in ([{**message, "content": message["content"][:1] * 5000}], [*told, message]):
        status, answer = call(server, "/v1/chat/completions", {**asked, "messages": many})
        assert (status, answer["error"]["code"]) == (422, "budget_exceeded")
        assert "more chunks" in answer["error"]["message"]


def test_an_answer_may_be_sent_back_as_it_came(client: OpenAI, asked: dict[str, Any]) -> None:
    first = client.chat.completions.create(**asked).choices[0].message
    messages = [*asked["messages"], first.model_dump(), {"role": "user", "content": QUESTION}]
    assert text_of(client, {**asked, "messages": messages})
