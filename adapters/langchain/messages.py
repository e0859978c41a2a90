"""LangChain messages to a window's system prompt, chunks and query.

A window's chunks live in one open user turn. System messages at the front are the system prompt. A run of human messages is
one user turn: its media and texts are bare chunks, and its last text is what a question asks. An AI message behind it
makes that question an exchange, in the form `Window.remember` gives it, so that the KV of an answered question is found
again. What a chat template writes around tool calls and their results is read off the template.

System prompt, chunks and query, tokenised one after the other, are the chat template's own rendering of the conversation,
with consecutive messages of one author joined to one turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
    message_chunk_to_message,
)

from ctxwin.adapters.langchain.blocks import identity, parts, text_of
from ctxwin.adapters.langchain.toolcalls import spelled, template_of
from ctxwin.chunk import Chunk, TextPart, TokensPart
from ctxwin.engines.base import Engine
from ctxwin.engines.encoding.templates import PROBE_CALL
from ctxwin.errors import UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.store.recent import Recent

_CHAT_ROLES = ("ai", "assistant", "developer", "human", "system", "user")
_PROBE_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class Conversation:
    """A conversation as a window takes it.

    Attributes:
        system_prompt: the window's system prompt.
        pieces: chunks in order, each with the key (`message_key`) of the last message in it.
        query: what to ask; empty where it was not wanted.
    """

    system_prompt: str
    pieces: list[tuple[str, Chunk]] = field(default_factory=list)
    query: str = ""

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks of the conversation, in order."""
        return [chunk for _, chunk in self.pieces]


def converse(
    engine: Engine,
    messages: Iterable[Any],
    tools: Sequence[dict[str, Any]] = (),
    *,
    ask: bool = True,
    bare: bool = False,
    seen: Recent[Chunk] | None = None,
    allowed_local_media_path: str | Path | None = None,
) -> Conversation:
    """What ``messages`` (anything that LangChain takes for messages) are for a window of ``engine``.

    Args:
        tools: JSON schemas in OpenAI's form; the chat template shows them in the system prompt.
        ask: whether the last text is a query; otherwise it is a chunk like the others.
        bare: whether the query may be empty behind a picture or a tool's empty result that ends the messages.
        seen: remembers decoded pictures between calls, see `parts`; their chunks then hold no pixels.
        allowed_local_media_path: folder whose files messages may name, by path or ``file:`` url; None: files are refused.

    Raises:
        ValueError: no text to ask at the end, a system message behind others, a tool result nobody asked for, or a block
            that is neither text, image nor video, would have to be downloaded or names a file elsewhere (BadMedia: cannot
            be decoded).
        UnsupportedModel: there are tools, and the chat template does not take them.

    Cost: decoding and hashing every picture that was not ``seen``.
    """
    given = [_plain_type(m) for m in convert_to_messages(list(messages))]
    runs = [(kind, list(run)) for kind, run in groupby(given, lambda message: message.type)]
    front = runs.pop(0)[1] if runs and runs[0][0] == "system" else []
    system_prompt = "\n".join(filter(None, (text_of(m.content) for m in front)))
    if tools:
        _check_spelled(engine, template_of(engine).system("", [_PROBE_TOOL]))
        system_prompt = template_of(engine).system(system_prompt, tools)
    builder = _Builder(engine, seen, allowed_local_media_path)
    asked: Any = None  # the message in front of a run
    for i, (kind, run) in enumerate(runs):
        if kind == "human":
            for message in run:
                builder.human(message)
        elif kind == "ai":
            builder.answer(run, called=i + 1 < len(runs) and runs[i + 1][0] == "tool")
        elif kind == "system":
            raise ValueError(
                "a SystemMessage must stand in front of all others, got one behind them; "
                "put it at the front, or say the same in a HumanMessage"
            )
        elif not isinstance(asked, AIMessage) or not asked.tool_calls:
            raise ValueError("a ToolMessage must follow the AIMessage whose tool calls it answers, got none before it")
        else:
            for message in run:
                builder.result(message, first=message is run[0])
        asked = run[-1]
    if not ask:
        builder.end()
        return Conversation(system_prompt, builder.pieces)
    query = builder.query()
    if not query and not (bare and builder.open_without_text):
        last = f"an empty or unanswerable {given[-1].type} message" if given else "no message"
        raise ValueError(
            f"the messages must end with a text to answer, got {last} at the end; append a HumanMessage with a question"
        )
    return Conversation(system_prompt, builder.pieces, query)


def message_key(message: BaseMessage) -> str:
    """Content identity of a message: its type, content and tool calls, without the ids that LangChain generates. O(content)."""
    calls = [
        [c["name"], json.dumps(c["args"], sort_keys=True, default=str)] for c in getattr(message, "tool_calls", ())
    ]
    return digest("message", message.type, identity(message.content), calls)


def _plain_type(message: BaseMessage) -> BaseMessage:
    """A system, human, AI or tool message, also of a streamed chunk or a message whose role is given by name."""
    if isinstance(message, ChatMessage):
        if message.role not in _CHAT_ROLES:
            raise ValueError(f"a message's role must be one of {_CHAT_ROLES}, got {message.role!r}")
        return convert_to_messages([(message.role, message.content)])[0]
    if not isinstance(message, SystemMessage | HumanMessage | AIMessage | ToolMessage):
        raise ValueError(f"a message must be system, human, ai or tool, got {type(message).__name__}")
    return message_chunk_to_message(message)


class _Builder:
    """Turns the conversation into chunks, front to back; ``text`` is the last text of the open turn, which is no chunk yet."""

    def __init__(self, engine: Engine, seen: Recent[Chunk] | None, folder: str | Path | None) -> None:
        self.pieces: list[tuple[str, Chunk]] = []
        self._engine, self._seen, self._folder = engine, seen, folder
        self._text = self._key = ""
        self._in_tools = False  # the open turn holds tool results, not a user's text

    def human(self, message: BaseMessage) -> None:
        key, shown = message_key(message), list(parts(message.content, self._seen, self._folder))
        if not shown:
            return
        if self._in_tools:
            self._cut(template_of(self._engine).tool_turn().reopening)
            self._in_tools = False
        elif self._text:
            # Texts of two messages must not run into each other; the line end goes to the one that becomes a chunk.
            if isinstance(shown[0], str) and not self._text.endswith("\n"):
                self._text += "\n"
            self._cut()
        self._add(key, shown)

    def answer(self, run: Sequence[Any], *, called: bool) -> None:
        engine, template = self._engine, self._engine.template
        text = "\n".join(filter(None, (text_of(m.content) for m in run)))
        calls = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["args"]}}
            for m in run
            for c in m.tool_calls
        ]
        keys = [message_key(m) for m in run]
        query, self._text = self.query(), ""
        if template is None or template.plain:
            if calls:
                template_of(engine).answer(text, calls)  # says why not
            ids = engine.encode_exchange(query, engine.text_ids(text)).token_ids
        else:
            before, after = template.turns("assistant")
            if called:
                opening = template.tool_turn().opening
                if opening.startswith(after) and spelled(engine, opening.removeprefix(after)):
                    self._text = opening.removeprefix(after)
                else:
                    after = opening
            if calls:
                _check_spelled(engine, template.answer("", [PROBE_CALL]))
            text = template.answer(text, calls)
            ids = (*engine.text_ids(query), *engine.template_ids(before))
            ids += (*engine.text_ids(text), *engine.template_ids(after))
        label = f"{query.strip()} {text.strip()}".strip()
        self.pieces.append((keys[0] if len(keys) == 1 else digest("messages", keys), Chunk.tokens(ids, label=label)))
        self._key, self._in_tools = "", called

    def result(self, message: BaseMessage, *, first: bool) -> None:
        if not first:
            turn = template_of(self._engine).tool_turn()
            left = turn.between.removeprefix(turn.tail)
            if turn.between.startswith(turn.tail) and all(spelled(self._engine, t) for t in (turn.tail, left)):
                self._text += turn.tail
                self._cut()
                self._text = left
            else:
                self._cut(turn.between)
        self._add(message_key(message), parts(message.content, self._seen, self._folder))

    def query(self) -> str:
        """The text that ends the open turn."""
        if not self._in_tools:
            return self._text
        tail = template_of(self._engine).tool_turn().tail
        if not spelled(self._engine, tail):
            raise UnsupportedModel("the chat template ends tool results with special tokens, which a query cannot hold")
        return self._text + tail

    @property
    def open_without_text(self) -> bool:
        """Whether the open turn is a picture, or an empty result of a tool: it can be answered with nothing behind it."""
        return self._in_tools or (not self._text and bool(self.pieces) and bool(self.pieces[-1][1].media))

    def end(self) -> None:
        """The rest becomes a chunk."""
        self._text = self.query()
        self._cut()

    def _add(self, key: str, shown: Iterable[str | Chunk]) -> None:
        self._key = key
        for part in shown:
            if isinstance(part, str):
                self._text += part
                continue
            if self._text:  # stands right in front, as `Chunk.image` puts its ``text``
                both = (TextPart(text=self._text), *part.parts)
                part = part.model_copy(update={"parts": both, "label": self._text.strip()})
            self.pieces.append((key, part))
            self._text = ""

    def _cut(self, glue: str = "") -> None:
        """What is open becomes a chunk, with a piece of the template behind it."""
        made: list[TextPart | TokensPart] = [TextPart(text=self._text)] if self._text else []
        if glue:
            made.append(TokensPart(ids=self._engine.template_ids(glue)))
        if made:
            self.pieces.append((self._key, Chunk(parts=tuple(made), label=self._text.strip())))
        self._text = ""


def _check_spelled(engine: Engine, text: str) -> None:
    """Raises UnsupportedModel where special tokens are in what the template writes for tools."""
    if not spelled(engine, text):
        raise UnsupportedModel(
            "the chat template writes tools with special tokens, which system prompts and answers cannot hold"
        )
