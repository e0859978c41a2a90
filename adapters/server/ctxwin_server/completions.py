"""Chat completions in OpenAI's format: requests that name chunks, and the bodies of their answers.

Answers are `openai.types`. Requests have a model of our own: unknown fields have to be refused by name, and the types of
OpenAI's client and of vLLM accept anything.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, Self

from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, Field, field_validator, model_validator

from ctxwin.engines.base import ScoredToken
from ctxwin.fidelity import Fidelity
from ctxwin.window.answer import Answer
from ctxwin.window.decoding import ChatDecoding
from ctxwin.window.serialization import scores_to
from ctxwin_server.schemas import Body, Reference, Text

FinishReason = Literal["stop", "length"]
_MOST_SCORES = 1 << 20


class _Url(Body):
    url: str
    detail: Literal["auto"] | None = None


class ImageUrl(Body):
    """OpenAI's own image part; only ``data:`` URLs are accepted."""

    type: Literal["image_url"]
    image_url: _Url


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Reference | Text | ImageUrl]
    # Fields with which the official client sends an answer back.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Extension(Body):
    """Our extension of a request: ``extra_body={"ctxwin": {...}}`` with the official client."""

    fidelity: Fidelity | None = None
    windows: Literal["auto", "off"] | None = None


class ChatRequest(ChatDecoding, Body):
    """A request that names chunks; unknown fields are refused, not ignored."""

    messages: list[Message] = Field(min_length=1)
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ctxwin: Extension | None = None
    # Accepted only with the value that applies anyway.
    tools: list[Any] | None = Field(default=None, max_length=0)
    tool_choice: Literal["none"] | None = None
    no_stop_trim: Literal[False] | None = None
    ignore_eos: Literal[False] | None = None
    continue_final_message: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    return_hidden_states: Literal[False] | None = None
    # Accepted and ignored: they do not affect an answer.
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
        if self.stream_options and not self.stream:
            raise ValueError("stream must be true where stream_options are given")
        return self

    def answer_limit(self, remaining: int, defaults: Mapping[str, float]) -> int:
        """Return the most tokens of an answer; ``remaining`` fit, and an explicit limit may exceed that.

        Raises ValueError where their log-probabilities would not fit into memory.
        """
        requested = self.max_completion_tokens or self.max_tokens
        limit = requested or min(remaining, int(defaults.get("max_tokens", remaining)))
        scores = (self.n or 1) * limit * (1 + (self.top_logprobs or 0)) if self.logprobs else 0
        if scores > _MOST_SCORES:
            raise ValueError(
                f"n * max_tokens * (1 + top_logprobs) must be at most {_MOST_SCORES} log-probabilities, got {scores}; "
                "lower one of them"
            )
        return limit


@dataclass(frozen=True)
class Piece:
    """New text of one choice; ``tokens`` where log-probabilities were requested, ``finish`` at the end."""

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
    """Builds the bodies of one completion, as JSON: OpenAI's own types, with ours beside them under ``ctxwin``.

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
        """Return the body of the complete answer."""
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
        """Return the first events of a stream: an empty message for each choice."""
        return [self._event(index, {"role": "assistant", "content": ""}) for index in range(choices)]

    def piece(self, piece: Piece) -> bytes:
        """Return one event of a stream."""
        scores = self._scores(piece.tokens) if piece.tokens else None
        return self._event(piece.index, {} if piece.finish else {"content": piece.text}, piece.finish, scores)

    def usage(self, replies: Sequence[Reply]) -> bytes:
        """Return the last event of a stream that reports its usage."""
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
        return scores_to(tokens, self.decode) if self.scores else None


def _usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return OpenAI's usage, and ours summed over all choices; lanes and time to first token are the first choice's.

    The prompt counts once; its cached tokens are those that the first choice ran no forward for.
    """
    usages = [reply.answer.usage for reply in replies]
    first, completion_tokens = usages[0], sum(u.answer_tokens for u in usages)
    openai_usage = {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": first.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": max(0, first.prompt_tokens - first.computed_tokens)},
    }
    sums = ("computed_tokens", "forwards", "bytes_loaded", "cached_tokens", "answer_tokens", "misses", "fallbacks")
    ctxwin_usage = asdict(first) | {name: sum(getattr(u, name) for u in usages) for name in sums}
    ctxwin_usage |= {"total_s": max(u.total_s for u in usages), "exact": all(u.exact for u in usages)}
    return {"usage": openai_usage, "ctxwin": {"usage": ctxwin_usage}}
