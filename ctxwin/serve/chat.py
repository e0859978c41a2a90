"""Chat completions whose messages name uploaded chunks: messages to a window's layout, answers in OpenAI's format.

The prompt is the chat template's: system messages in front are the header, a run of user messages is one open turn in
which chunks stand bare, its last text is the query, and an answered query is an exchange. Each request is a window of its
own, so an answer depends on its messages alone; KV is found in the store by provenance, whoever computed it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ctxwin import asking
from ctxwin.answer import Answer, Usage
from ctxwin.chunk import Chunk, TokensPart
from ctxwin.engines.base import Engine
from ctxwin.errors import BudgetExceeded
from ctxwin.fidelity import Fidelity
from ctxwin.serve.specs import REFERENCE, Body, Pixels, Reference, Text, checked
from ctxwin.serve.uploads import Uploads
from ctxwin.window import Window


class _Url(BaseModel):
    url: str


class ImageUrl(BaseModel):
    """OpenAI's own image part; only ``data:`` URLs are taken."""

    type: Literal["image_url"]
    image_url: _Url


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Reference | Text | ImageUrl]


class StreamOptions(BaseModel):
    include_usage: bool = False


class Extension(Body):
    """Our part of a request: ``extra_body={"ctxwin": {...}}`` with the official client."""

    fidelity: Fidelity | None = None


class ChatRequest(BaseModel):
    """What a request that names chunks may hold; what is not understood is refused, not ignored."""

    model_config = ConfigDict(extra="forbid")

    messages: list[Message] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ctxwin: Extension | None = None
    # Taken where they say what is the case anyway.
    n: int | None = Field(default=None, ge=1, le=1)
    top_p: float | None = Field(default=None, ge=1, le=1)
    frequency_penalty: float | None = Field(default=None, ge=0, le=0)
    presence_penalty: float | None = Field(default=None, ge=0, le=0)
    logprobs: Literal[False] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    tools: list[Any] | None = Field(default=None, max_length=0)
    tool_choice: Literal["none"] | None = None
    # Mean nothing to an answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(filter(None, stops))


def names_chunks(body: dict[str, Any]) -> bool:
    """Whether a chat request has a chunk among its content parts."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == REFERENCE:
                return True
    return False


@dataclass
class Layout:
    """A chat as a window takes it. ``query`` may be empty where the messages end in a chunk."""

    header: str
    chunks: list[Chunk] = field(default_factory=list)
    query: str = ""


def lay_out(engine: Engine, uploads: Uploads, messages: Sequence[Message]) -> Layout:
    """The layout of a chat; ValueError for an order of messages that has none, UnknownUpload, BadMedia."""
    front = 0
    while front < len(messages) and messages[front].role in ("system", "developer"):
        front += 1
    layout = Layout("\n".join(_text(m) for m in messages[:front]))
    text, pixels = "", uploads.pixels()
    for role, run in groupby(messages[front:], lambda m: m.role):
        turn = list(run)
        if role == "user":
            text = _user(uploads, layout, turn, pixels)
        elif role == "assistant":
            layout.chunks.append(_exchange(engine, text, "\n".join(_text(m) for m in turn)))
            text = ""
        else:
            raise ValueError(f"a {role} message must stand in front of all others; put it there, or make it a user's")
    if messages[-1].role != "user":
        raise ValueError(f"the messages must end with the user's, got the {messages[-1].role}'s at the end")
    layout.query = text
    return layout


def _user(uploads: Uploads, layout: Layout, turn: Sequence[Message], pixels: Pixels) -> str:
    """Adds the chunks of one user turn; returns the text at its end."""
    text = ""
    for message in turn:
        parts = [Text(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        if text and parts and isinstance(parts[0], Text) and not text.endswith("\n"):
            text += "\n"  # texts of two messages must not run into each other
        for part in parts:
            if isinstance(part, Text):
                text += part.text
                continue
            if text:
                layout.chunks.append(Chunk.text(text))
                text = ""
            if isinstance(part, Reference):
                layout.chunks.append(uploads.find(part.chunk))
            else:
                image = {"type": "image", "image": _data_url(part.image_url.url)}
                layout.chunks.append(uploads.build(image, pixels=pixels))
    return text


def _exchange(engine: Engine, query: str, answer: str) -> Chunk:
    """An answered query, token by token as `Window.remember` gives it."""
    template = engine.template
    if template is None or template.plain:
        ids = engine.encode_exchange(query, engine.text_ids(answer)).token_ids
    else:
        before, after = template.turns("assistant")
        ids = (
            *engine.text_ids(query), *engine.template_ids(before),
            *engine.text_ids(answer), *engine.template_ids(after),
        )  # fmt: skip
    return Chunk(parts=(TokensPart(ids=tuple(ids)),), label=f"{query} {answer}".strip()[:80])


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    others = sorted({part.type for part in message.content} - {"text"})
    if others:
        raise ValueError(f"a {message.role} message must hold text only, got {', '.join(others)}")
    return "".join(part.text for part in message.content if isinstance(part, Text))


def _data_url(url: str) -> str:
    if not url.startswith("data:"):
        raise ValueError(
            f"beside chunks an image must be a data: URL, got {url[:60]!r}; upload it with POST /v1/chunks and name its id"
        )
    return url


class Stops:
    """Cuts an answer at the first of ``stops`` and keeps back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self.text = ""
        self.stopped = False

    def feed(self, whole: str, *, last: bool = False) -> str:
        """What is new and certain in ``whole``, the text so far."""
        if self.stopped:
            return ""
        found = [at for stop in self._stops if (at := whole.find(stop)) >= 0]
        if found:
            self.stopped, ready = True, whole[: min(found)]
        elif last:
            ready = whole
        else:
            ready = whole.rstrip("\ufffd")  # half a character: its text changes with the next token
            kept = max((n for stop in self._stops for n in range(1, len(stop)) if ready.endswith(stop[:n])), default=0)
            ready = ready[: len(ready) - kept]
        new = ready[len(self.text) :]
        if new:
            self.text = ready
        return new


@dataclass(frozen=True)
class Reply:
    """A finished chat answer."""

    text: str
    finish_reason: str
    answer: Answer


class Chat:
    """Answers chats of one tenant.

    Args:
        temperature: of requests that name none.
        watch: observes every window that is made.
    """

    def __init__(
        self, engine: Engine, uploads: Uploads, fidelity: Fidelity, temperature: float, watch: Callable[[Window], None]
    ) -> None:
        self._engine = engine
        self._uploads = uploads
        self._fidelity = fidelity
        self._temperature = temperature
        self._watch = watch

    def answer(self, request: ChatRequest, heard: Callable[[str], None], stopped: Callable[[], bool]) -> Reply:
        """Answers; ``heard`` gets the text as it comes. Raises like `Window.ask` and `lay_out`. Blocks."""
        layout = lay_out(self._engine, self._uploads, request.messages)
        given = request.ctxwin.fidelity if request.ctxwin else None
        stops = Stops(request.stops)

        def on_token(_: int, text: str) -> bool:
            new = stops.feed(text)
            if new:
                heard(new)
            return not stops.stopped

        with Window(self._engine, layout.header, fidelity=given or self._fidelity) as window:
            self._watch(window)
            window.extend(layout.chunks)
            asked = self._engine.encode_query(layout.query).tokens
            left = window.budget - window.tokens - asked
            most = request.max_completion_tokens or request.max_tokens or left
            if left < most or left < 1:
                raise BudgetExceeded(
                    f"the prompt ({window.tokens + asked} tokens) and its answer ({max(most, 1)}) must fit the "
                    f"{window.budget} tokens the model takes; send fewer chunks or lower max_tokens",
                    needed=window.tokens + asked + max(most, 1), budget=window.budget,
                )  # fmt: skip
            temperature = self._temperature if request.temperature is None else request.temperature
            answer = asking.ask(
                window, layout.query, most, temperature=temperature, seed=request.seed, on_token=on_token,
                stopped=stopped, bare=bool(layout.chunks),
            )  # fmt: skip
        rest = stops.feed(answer.text, last=True)
        if rest:
            heard(rest)
        long = not stops.stopped and answer.usage.answer_tokens >= most
        return Reply(stops.text, "length" if long else "stop", answer)


def parse(data: Any) -> ChatRequest:
    request: ChatRequest = checked(ChatRequest.model_validate, data)
    return request


# -- OpenAI's shapes ---------------------------------------------------------------------------------------------------


def usage_of(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage: cached tokens are the prompt's that no forward was run for."""
    cached = max(0, usage.prompt_tokens - usage.computed_tokens)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.answer_tokens,
        "total_tokens": usage.prompt_tokens + usage.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass(frozen=True)
class Shapes:
    """The bodies of one completion."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, reply: Reply) -> dict[str, Any]:
        message = {"role": "assistant", "content": reply.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage_of(reply.answer.usage),
            "ctxwin": {"usage": asdict(reply.answer.usage)},
        }

    def first(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text}, None)

    def last(self, reply: Reply, *, usage: bool) -> Iterator[dict[str, Any]]:
        yield self._chunk({}, reply.finish_reason)
        if usage:
            yield {
                **self._head("chat.completion.chunk"),
                "choices": [],
                "usage": usage_of(reply.answer.usage),
                "ctxwin": {"usage": asdict(reply.answer.usage)},
            }

    def _chunk(self, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def sse(data: Any) -> str:
    """One server-sent event; bytes are JSON already."""
    if isinstance(data, bytes):
        return f"data: {data.decode()}\n\n"
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


DONE = "data: [DONE]\n\n"
