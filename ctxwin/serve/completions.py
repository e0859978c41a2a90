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

from openai.types import CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionTokenLogprob,
    chat_completion,
    chat_completion_chunk,
)
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_usage import PromptTokensDetails
from pydantic import Field, field_validator, model_validator

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
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
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
        return schema_text(wanted.json_schema.schema_)


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
        choices = [
            chat_completion.Choice(
                index=reply.index,
                message=ChatCompletionMessage(role="assistant", content=reply.text, refusal=None),
                logprobs=None
                if (scores := self._scores(reply.answer.token_ids)) is None
                else chat_completion.ChoiceLogprobs(content=scores, refusal=None),
                finish_reason=reply.finish_reason,
            )
            for reply in replies
        ]
        made = ChatCompletion(
            id=self.id, object="chat.completion", created=self.created, model=self.model, choices=choices,
            usage=usage_of(replies), **_own_usage(replies),
        )  # fmt: skip
        return _json(made)

    def opening(self, choices: int) -> list[bytes]:
        """What a stream begins with: an empty message for each choice."""
        return [self._chunk(index, ChoiceDelta(role="assistant", content="")) for index in range(choices)]

    def piece(self, piece: Piece) -> bytes:
        scores = self._scores(piece.tokens) if piece.tokens else None
        delta = ChoiceDelta() if piece.finish else ChoiceDelta(content=piece.text)
        return self._chunk(piece.index, delta, piece.finish, scores)

    def usage(self, replies: Sequence[Reply]) -> bytes:
        """The last event of a stream whose usage was asked for."""
        return self._event([], usage=usage_of(replies), **_own_usage(replies))

    def _chunk(
        self,
        index: int,
        delta: ChoiceDelta,
        finish: FinishReason | None = None,
        scores: list[ChatCompletionTokenLogprob] | None = None,
    ) -> bytes:
        logprobs = None if scores is None else chat_completion_chunk.ChoiceLogprobs(content=scores, refusal=None)
        return self._event(
            [chat_completion_chunk.Choice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)]
        )

    def _event(self, choices: list[chat_completion_chunk.Choice], **more: Any) -> bytes:
        made = ChatCompletionChunk(
            id=self.id, object="chat.completion.chunk", created=self.created, model=self.model, choices=choices, **more
        )
        return _json(made)

    def _scores(self, tokens: Sequence[int]) -> list[ChatCompletionTokenLogprob] | None:
        if not self.scores:
            return None
        return [
            ChatCompletionTokenLogprob(
                **self._entry(token, token.logprob),
                top_logprobs=[TopLogprob(**self._entry(other, logprob)) for other, logprob in token.best.items()],
            )
            for token in tokens
            if isinstance(token, ScoredToken)
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token])
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(text.encode())}


def _json(made: ChatCompletion | ChatCompletionChunk) -> bytes:
    return made.model_dump_json(exclude_unset=True).encode()


def usage_of(replies: Sequence[Reply]) -> CompletionUsage:
    """OpenAI's usage: the prompt counts once; cached tokens are those of it that the first choice ran no forward for."""
    first = replies[0].answer.usage
    made = sum(reply.answer.usage.answer_tokens for reply in replies)
    cached = max(0, first.prompt_tokens - first.computed_tokens)
    return CompletionUsage(
        prompt_tokens=first.prompt_tokens,
        completion_tokens=made,
        total_tokens=first.prompt_tokens + made,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def _own_usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """What all choices cost together, in our terms; lanes and the time to the first token are the first one's."""
    usages = [reply.answer.usage for reply in replies]
    sums = ("computed_tokens", "forwards", "bytes_loaded", "cached_tokens", "answer_tokens", "misses", "fallbacks")
    whole = asdict(usages[0]) | {name: sum(getattr(u, name) for u in usages) for name in sums}
    whole |= {"total_s": max(u.total_s for u in usages), "exact": all(u.exact for u in usages)}
    return {"ctxwin": {"usage": whole}}
