"""Chats whose messages name uploaded chunks, as a window takes them: system prompt, chunks and query.

The prompt is the chat template's: system messages in front are the system prompt, a run of user messages is one open turn in
which chunks stand bare, its last text is the query, and an answered query is an exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ctxwin.chunk import Chunk, TokensPart
from ctxwin.engines.base import Engine
from ctxwin.errors import BudgetExceeded
from ctxwin.serve.completions import Message
from ctxwin.serve.limits import Allowance
from ctxwin.serve.specs import Reference, Text
from ctxwin.serve.uploads import Uploads


@dataclass
class Layout:
    """A chat as a window takes it. ``query`` may be empty where the messages end in a chunk."""

    system_prompt: str
    chunks: list[Chunk] = field(default_factory=list)
    query: str = ""

    def check_room(self, most: int) -> None:
        """Raises BudgetExceeded at ``most`` chunks, for each has a token: making more takes time and is for nothing."""
        if len(self.chunks) >= most:
            raise BudgetExceeded(
                f"a chat must fit the {most} tokens the model takes, got more chunks than that; send fewer",
                needed=len(self.chunks) + 1,
                budget=most,
            )


def lay_out(engine: Engine, uploads: Uploads, messages: Sequence[Message]) -> Layout:
    """The layout of a chat; ValueError for an order of messages that has none, UnknownUpload, BadMedia."""
    front = 0
    while front < len(messages) and messages[front].role in ("system", "developer"):
        front += 1
    layout = Layout("\n".join(_text(m) for m in messages[:front]))
    text, allowance = "", uploads.allowance()
    for role, run in groupby(messages[front:], lambda m: m.role):
        turn = list(run)
        layout.check_room(engine.spec.max_tokens)
        if role == "user":
            text = _user(uploads, layout, turn, allowance, engine.spec.max_tokens)
        elif role == "assistant":
            layout.chunks.append(_exchange(engine, text, "\n".join(_text(m) for m in turn)))
            text = ""
        else:
            raise ValueError(f"a {role} message must stand in front of all others; put it there, or make it a user's")
    if messages[-1].role != "user":
        raise ValueError(f"the messages must end with the user's, got the {messages[-1].role}'s at the end")
    layout.query = text
    return layout


def _user(uploads: Uploads, layout: Layout, turn: Sequence[Message], allowance: Allowance, most: int) -> str:
    """Adds the chunks of one user turn, ``most`` in all; returns the text at its end."""
    text = ""
    for message in turn:
        parts = message.content
        if isinstance(parts, str):
            parts = [Text(type="text", text=parts)] if parts else []
        if text and parts and isinstance(parts[0], Text) and not text.endswith("\n"):
            text += "\n"  # texts of two messages must not run into each other
        for part in parts:
            if isinstance(part, Text):
                text += part.text
                continue
            if text:
                layout.chunks.append(Chunk.text(text))
                text = ""
            layout.check_room(most)
            if isinstance(part, Reference):
                layout.chunks.append(uploads.find(part.chunk))
            else:
                image = {"type": "image", "image": _data_url(part.image_url.url)}
                layout.chunks.append(uploads.build(image, allowance=allowance))
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
