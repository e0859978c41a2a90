"""Chat completions in OpenAI's format: what a request that names chunks may hold, and the bodies of its answer."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ctxwin.engines.base import Sampling, ScoredToken
from ctxwin.fidelity import Fidelity
from ctxwin.serve.specs import SEED, Body, Reference, Text, checked
from ctxwin.window.answer import Answer

_MOST_CHOICES = 128
_MOST_SCORES = 1 << 20
_MOST_SCHEMA = 256 << 10
_Stop = Annotated[str, Field(max_length=1000)]
_LEAST_LOGPROB = -9999.0
"""What is shown for a token that could not be drawn, as vLLM shows it: JSON has no infinities."""


class _Url(Body):
    url: str
    detail: Literal["auto"] | None = None


class ImageUrl(Body):
    """OpenAI's own image part; only ``data:`` URLs are taken."""

    type: Literal["image_url"]
    image_url: _Url


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Reference | Text | ImageUrl]
    # Answers are sent back with what the official client shows of them.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Extension(Body):
    """Our part of a request: ``extra_body={"ctxwin": {...}}`` with the official client."""

    fidelity: Fidelity | None = None


class _Schema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # an answer is held to the schema either way


class _AnyText(Body):
    type: Literal["text"]


class _JsonObject(Body):
    type: Literal["json_object"]


class _JsonSchema(Body):
    type: Literal["json_schema"]
    json_schema: _Schema


class ChatRequest(Body):
    """What a request that names chunks may hold; what is not understood is refused, not ignored."""

    messages: list[Message] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    seed: SEED | None = None
    n: int | None = Field(default=None, ge=1, le=_MOST_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: Annotated[_AnyText | _JsonObject | _JsonSchema, Field(discriminator="type")] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ctxwin: Extension | None = None
    # Taken where they say what is the case anyway.
    tools: list[Any] | None = Field(default=None, max_length=0)
    tool_choice: Literal["none"] | None = None
    # Mean nothing to an answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("tools", "tool_choice", mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value not in (None, [], "none"):
            raise ValueError(
                "a chat that names chunks is not served with tools; send the pictures themselves, or describe the tools "
                "in the system message and read the calls from the answer"
            )
        return value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("logprobs must be true where top_logprobs are asked for")
        if self.stream_options and not self.stream:
            raise ValueError("stream must be true where stream_options are given")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(filter(None, stops))

    def most(self, left: int, defaults: Mapping[str, float]) -> int:
        """Most tokens of an answer where there is room for ``left``; what is asked for may be more than that.

        Raises ValueError where their log-probabilities would not fit into memory.
        """
        asked = self.max_completion_tokens or self.max_tokens
        most = asked or min(left, int(defaults.get("max_tokens", left)))
        scores = (self.n or 1) * most * (1 + (self.top_logprobs or 0)) if self.logprobs else 0
        if scores > _MOST_SCORES:
            raise ValueError(
                f"n * max_tokens * (1 + top_logprobs) must be at most {_MOST_SCORES} log-probabilities, got {scores}; "
                "lower one of them"
            )
        return most

    def sampling(self, defaults: Mapping[str, float]) -> Sampling:
        """How to decode, but for ``max_tokens``: what the request says, else the server's ``defaults``, else OpenAI's.

        Raises ValueError for several choices that could only be the same.
        """

        def given(name: str, otherwise: float) -> float:
            value = getattr(self, name)
            return float(defaults.get(name, otherwise) if value is None else value)

        made = Sampling(
            temperature=given("temperature", 1.0),
            seed=self.seed,
            top_p=given("top_p", 1.0),
            top_k=max(0, int(given("top_k", 0))),
            min_p=given("min_p", 0.0),
            presence_penalty=given("presence_penalty", 0.0),
            frequency_penalty=given("frequency_penalty", 0.0),
            repetition_penalty=given("repetition_penalty", 1.0),
            token_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            json_schema=self._schema(),
        )
        if (self.n or 1) > 1 and made.temperature == 0:
            raise ValueError(f"n must be 1 where the temperature is 0 (all choices would be the same), got {self.n}")
        return made

    def _schema(self) -> str | None:
        wanted = self.response_format
        if wanted is None or isinstance(wanted, _AnyText):
            return None
        if isinstance(wanted, _JsonObject):
            return '{"type": "object"}'
        try:
            schema = json.dumps(wanted.json_schema.schema_)
        except RecursionError:
            raise ValueError("the JSON schema must not be nested without end") from None
        if len(schema) > _MOST_SCHEMA:
            raise ValueError(f"the JSON schema must have at most {_MOST_SCHEMA} characters, got {len(schema)}")
        return schema


def parse(data: Any) -> ChatRequest:
    request: ChatRequest = checked(ChatRequest.model_validate, data)
    return request


@dataclass(frozen=True)
class Piece:
    """What is new of one choice; ``tokens`` where their log-probabilities were asked for, ``finish`` at its end."""

    index: int
    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    finish: str | None = None


@dataclass(frozen=True)
class Reply:
    """One finished choice."""

    index: int
    text: str
    finish_reason: str
    answer: Answer


def usage_of(replies: Sequence[Reply]) -> dict[str, Any]:
    """OpenAI's usage: the prompt counts once; cached tokens are those of it that the first choice ran no forward for."""
    first = replies[0].answer.usage
    cached = max(0, first.prompt_tokens - first.computed_tokens)
    made = sum(reply.answer.usage.answer_tokens for reply in replies)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": first.prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _own_usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """What all choices cost together, in our terms; lanes and the time to the first token are the first one's."""
    usages = [reply.answer.usage for reply in replies]
    sums = ("computed_tokens", "forwards", "bytes_loaded", "cached_tokens", "answer_tokens", "misses", "fallbacks")
    whole = asdict(usages[0]) | {name: sum(getattr(u, name) for u in usages) for name in sums}
    return whole | {"total_s": max(u.total_s for u in usages), "exact": all(u.exact for u in usages)}


@dataclass(frozen=True)
class Shapes:
    """The bodies of one completion.

    Args:
        decode: the text of token ids, for those whose log-probabilities are shown.
        scores: whether they are.
    """

    model: str
    decode: Callable[[Sequence[int]], str]
    scores: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = [
            {
                "index": reply.index,
                "message": {"role": "assistant", "content": reply.text, "refusal": None},
                "logprobs": self._logprobs(reply.answer.token_ids),
                "finish_reason": reply.finish_reason,
            }
            for reply in replies
        ]
        return {**self._head("chat.completion"), "choices": choices, **_usages(replies)}

    def first(self, choices: int) -> list[dict[str, Any]]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, None) for index in range(choices)]

    def piece(self, piece: Piece) -> dict[str, Any]:
        scores = self._logprobs(piece.tokens) if piece.tokens else None
        return self._chunk(piece.index, {} if piece.finish else {"content": piece.text}, piece.finish, scores)

    def usage(self, replies: Sequence[Reply]) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": [], **_usages(replies)}

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None, scores: Any = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, tokens: Sequence[int]) -> dict[str, Any] | None:
        if not self.scores:
            return None
        content = [
            {
                **self._entry(token, token.logprob),
                "top_logprobs": [self._entry(other, logprob) for other, logprob in token.best.items()],
            }
            for token in tokens
            if isinstance(token, ScoredToken)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token])
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(text.encode())}


def _usages(replies: Sequence[Reply]) -> dict[str, Any]:
    return {"usage": usage_of(replies), "ctxwin": {"usage": _own_usage(replies)}}


def sse(data: Any) -> str:
    """One server-sent event; bytes are JSON already."""
    if isinstance(data, bytes):
        return f"data: {data.decode()}\n\n"
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


DONE = "data: [DONE]\n\n"
