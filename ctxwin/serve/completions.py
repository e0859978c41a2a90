"""Chat completions in OpenAI's format: what a request that names chunks may hold, and the bodies of its answer.

The answers are `openai.types`. The request is a model of our own: what is not understood has to be refused by name, and the
servers' and clients' own types take anything.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, Self

from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, Field, field_validator, model_validator

from ctxwin.engines.base import Sampling, ScoredToken
from ctxwin.fidelity import Fidelity
from ctxwin.serve.specs import SEED, Body, Reference, Text
from ctxwin.window.answer import Answer

FinishReason = Literal["stop", "length"]
MOST_CHOICES = 128
_MOST_SCORES = 1 << 20
_MOST_SCHEMA = 256 << 10
_Stop = Annotated[str, Field(max_length=1000)]
_LEAST_LOGPROB = -9999.0
"""What is shown for a token that could not be drawn, as vLLM shows it: JSON has no infinities."""


_DECODING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class _Url(Body):
    url: str
    detail: Literal["auto"] | None = None


class ImageUrl(Body):
    """OpenAI's own image part; only ``data:`` URLs are taken."""

    type: Literal["image_url"]
    image_url: _Url


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Reference | Text | ImageUrl]
    # Answers are sent back with what the official client shows of them.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class StreamOptions(Body):
    """What a stream holds beside its text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Extension(Body):
    """Our part of a request: ``extra_body={"ctxwin": {...}}`` with the official client."""

    fidelity: Fidelity | None = None
    windows: Literal["auto", "off"] | None = None


class _Schema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # an answer is held to the schema either way


class _Format(Body):
    type: Literal["text", "json_object"]


class _SchemaFormat(Body):
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
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: Annotated[_Format | _SchemaFormat, Field(discriminator="type")] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ctxwin: Extension | None = None
    # Taken where they say what is the case anyway.
    tools: list[Any] | None = Field(default=None, max_length=0)
    tool_choice: Literal["none"] | None = None
    no_stop_trim: Literal[False] | None = None
    ignore_eos: Literal[False] | None = None
    continue_final_message: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    return_hidden_states: Literal[False] | None = None
    # Mean nothing to an answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None

    @field_validator("tools", "tool_choice", mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value not in (None, [], "none"):
            raise ValueError(
                "a chat with tools is vLLM's, which this route is not; send it to /v1/chat/completions, chunks and all"
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
        """The texts at which an answer ends."""
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

        given = {name: value for name in _DECODING if (value := getattr(self, name)) is not None}
        chosen = {"temperature": 1.0} | {n: v for n, v in defaults.items() if n in _DECODING} | given
        chosen["top_k"] = max(0, int(chosen.get("top_k", 0)))
        scores = (self.top_logprobs or 0) if self.logprobs else None
        made = Sampling(**chosen, seed=self.seed, token_logprobs=scores, json_schema=self._schema())
        if (self.n or 1) > 1 and made.temperature == 0:
            raise ValueError(f"n must be 1 where the temperature is 0 (all choices would be the same), got {self.n}")
        return made

    def _schema(self) -> str | None:
        match self.response_format:
            case _SchemaFormat(json_schema=schema):
                return schema_text(schema.schema_)
            case _Format(type="json_object"):
                return '{"type": "object"}'
        return None


def schema_text(schema: Any) -> str:
    """A JSON schema as text; ValueError for one that is larger than any answer needs."""
    text = json.dumps(schema)
    if len(text) > _MOST_SCHEMA:
        raise ValueError(f"the JSON schema must have at most {_MOST_SCHEMA} characters, got {len(text)}")
    return text


@dataclass(frozen=True)
class Piece:
    """What is new of one choice; ``tokens`` where their log-probabilities were asked for, ``finish`` at its end."""

    index: int
    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True)
class Reply:
    """One finished choice."""

    index: int
    text: str
    finish_reason: FinishReason
    answer: Answer


@dataclass(frozen=True)
class Bodies:
    """Makes the bodies of one completion, as JSON: OpenAI's own types, with ours beside them under ``ctxwin``.

    Args:
        decode: the text of token ids, for those whose log-probabilities are shown.
        scores: whether they are.
    """

    model: str
    decode: Callable[[Sequence[int]], str]
    scores: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, replies: Sequence[Reply]) -> bytes:
        """The whole answer."""
        choices = [
            {
                "index": reply.index,
                "message": {"role": "assistant", "content": reply.text, "refusal": None},
                "logprobs": self._scores(reply.answer.token_ids),
                "finish_reason": reply.finish_reason,
            }
            for reply in replies
        ]
        return self._body(ChatCompletion, "chat.completion", choices, **_usage(replies))

    def opening(self, choices: int) -> list[bytes]:
        """What a stream begins with: an empty message for each choice."""
        return [self._event(index, {"role": "assistant", "content": ""}) for index in range(choices)]

    def piece(self, piece: Piece) -> bytes:
        """One event of a stream."""
        scores = self._scores(piece.tokens) if piece.tokens else None
        return self._event(piece.index, {} if piece.finish else {"content": piece.text}, piece.finish, scores)

    def usage(self, replies: Sequence[Reply]) -> bytes:
        """The last event of a stream whose usage was asked for."""
        return self._body(ChatCompletionChunk, "chat.completion.chunk", [], **_usage(replies))

    def _event(
        self, index: int, delta: dict[str, Any], finish: FinishReason | None = None, scores: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}
        return self._body(ChatCompletionChunk, "chat.completion.chunk", [choice])

    def _body(self, kind: type[BaseModel], name: str, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}
        return kind.model_validate({**head, **more}).model_dump_json(exclude_unset=True).encode()

    def _scores(self, tokens: Sequence[int]) -> dict[str, Any] | None:
        if not self.scores:
            return None
        scored = [token for token in tokens if isinstance(token, ScoredToken)]
        content = [
            {**self._entry(t, t.logprob), "top_logprobs": [self._entry(*other) for other in t.best.items()]}
            for t in scored
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token])
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(text.encode())}


def _usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """OpenAI's usage, and ours of all choices together; our lanes and time to the first token are the first one's.

    The prompt counts once; its cached tokens are those that the first choice ran no forward for.
    """
    usages = [reply.answer.usage for reply in replies]
    first, made = usages[0], sum(u.answer_tokens for u in usages)
    theirs = {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": first.prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": max(0, first.prompt_tokens - first.computed_tokens)},
    }
    sums = ("computed_tokens", "forwards", "bytes_loaded", "cached_tokens", "answer_tokens", "misses", "fallbacks")
    ours = asdict(first) | {name: sum(getattr(u, name) for u in usages) for name in sums}
    ours |= {"total_s": max(u.total_s for u in usages), "exact": all(u.exact for u in usages)}
    return {"usage": theirs, "ctxwin": {"usage": ours}}
