"""LangChain messages to a window's system prompt, chunks and query.

A window's chunks live in one open user turn. System messages at the front are the system prompt. A run of human messages is
one user turn: its media and texts are bare chunks, and its last text is the question. An AI message after it turns the
question into an exchange, in the form `Window.remember` gives it, so that the KV of an answered question is reused. The
text that a chat template writes around tool calls and their results is read off the template.

System prompt, chunks and query, tokenised one after the other, are the chat template's own rendering of the conversation,
with consecutive messages of one author joined to one turn.

Content blocks come in several dialects: plain strings, v1 standard blocks, v0 ``source_type`` blocks, OpenAI's ``image_url``,
Anthropic's ``source``, Qwen's ``image``. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlparse
from urllib.request import url2pathname

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

from ctxwin.chunk import Chunk, TextPart, TokensPart
from ctxwin.engines.base import Engine
from ctxwin.engines.encoding.templates import PROBE_CALL
from ctxwin.errors import BadMedia, BudgetExceeded, UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.media import as_rgb, pixels_digest
from ctxwin.store.lru import LRUCache
from ctxwin.window.toolcalls import is_plain_text, template_of

_CHAT_ROLES = ("ai", "assistant", "developer", "human", "system", "user")
_PROBE_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
# Blocks of an AI message other than its text: calls are in `AIMessage.tool_calls`, and thinking is not repeated.
_CALLS = {"tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "input_json_delta", "function_call"}
_THINKING = {"reasoning", "reasoning_content", "thinking", "redacted_thinking"}


@dataclass(frozen=True)
class Conversation:
    """A conversation in the form a window takes.

    Attributes:
        system_prompt: the window's system prompt.
        pieces: chunks in order, each with the key (`message_key`) of the last message in it.
        query: the question; empty if none was requested.
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
    seen: LRUCache[Chunk] | None = None,
    allowed_local_media_path: str | Path | None = None,
) -> Conversation:
    """Convert ``messages`` (anything LangChain accepts as messages) to a conversation for a window of ``engine``.

    Args:
        tools: JSON schemas in OpenAI's form; the chat template shows them in the system prompt.
        ask: take the last text as the query; otherwise it is a chunk like the others.
        bare: allow an empty query after a picture or an empty tool result that ends the messages.
        seen: cache of decoded pictures between calls, see `parts`; their chunks then hold no pixels.
        allowed_local_media_path: folder whose files messages may name, by path or ``file:`` url; None: files are refused.

    Raises:
        ValueError: no text to ask at the end, a system message after others, a tool result without its call, or a block
            that is neither text, image nor video, would have to be downloaded or names a file elsewhere (BadMedia: cannot
            be decoded).
        UnsupportedModel: there are tools, and the chat template does not take them.

    Cost: decoding and hashing every picture that is not in ``seen``.
    """
    typed = [_plain_type(m) for m in convert_to_messages(list(messages))]
    runs = [(kind, list[Any](run)) for kind, run in groupby(typed, lambda message: message.type)]
    system_messages = runs.pop(0)[1] if runs and runs[0][0] == "system" else []
    system_prompt = "\n".join(filter(None, (text_of(m) for m in system_messages)))
    if tools:
        _check_spelled(engine, template_of(engine).system("", [_PROBE_TOOL]))
        system_prompt = template_of(engine).system(system_prompt, tools)
    builder = _Builder(engine, seen, allowed_local_media_path)
    for i, (kind, run) in enumerate(runs):
        previous: Any = runs[i - 1][1][-1] if i else None
        if kind == "human":
            for message in run:
                builder.human(message)
        elif kind == "ai":
            builder.answer(run, called=i + 1 < len(runs) and runs[i + 1][0] == "tool")
        elif kind == "system":
            raise ValueError(
                "a SystemMessage must come before all others, got one after them; "
                "move it to the start, or put its text in a HumanMessage"
            )
        elif not _calls(previous):
            raise ValueError("a ToolMessage must follow the AIMessage whose tool calls it answers, got none before it")
        else:
            broken = {c["id"] for c in previous.invalid_tool_calls}  # an answer shows them in front of the others
            for j, message in enumerate(sorted(run, key=lambda m: m.tool_call_id not in broken)):
                builder.result(message, first=j == 0)
    if not ask:
        builder.end()
        return Conversation(system_prompt, builder.pieces)
    query = builder.query()
    if not query and not (bare and builder.open_without_text):
        last = f"an empty or unanswerable {typed[-1].type} message" if typed else "no message"
        raise ValueError(f"the messages must end with a text to answer, got {last}; append a HumanMessage that asks")
    return Conversation(system_prompt, builder.pieces, query)


def in_order(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return messages that `converse` takes: system messages first, each result behind its call, or as the user's message."""
    typed = [_plain_type(m) for m in convert_to_messages(list(messages))]
    rest = [m for m in typed if not isinstance(m, SystemMessage)]
    first = {c["id"]: i for i, m in reversed([*enumerate(rest)]) for c in _calls(m)}
    if any(isinstance(m, ToolMessage) and i < first.get(m.tool_call_id, 0) for i, m in enumerate(rest)):
        rest.reverse()  # LangChain's `trim_messages` counts from the end
    units, called = [list[Any](m for m in typed if isinstance(m, SystemMessage))], dict[Any, list[Any]]()
    for m in rest:
        if isinstance(m, ToolMessage) and m.tool_call_id in called:
            called[m.tool_call_id].append(m)
        else:
            units.append([HumanMessage(m.content) if isinstance(m, ToolMessage) else m])
            called |= {c["id"]: units[-1] for c in _calls(m)}
    return [*chain.from_iterable(units)]


def message_key(message: BaseMessage) -> str:
    """Return the content identity of a message: type, content and tool calls, without LangChain's generated ids. O(content)."""
    calls = [[c["name"], json.dumps(c["args"], sort_keys=True, default=str)] for c in _calls(message)]
    return digest("message", message.type, identity(message.content), calls)


def _calls(message: BaseMessage | None) -> list[Any]:
    """Return the tool calls of a message, malformed ones behind the others."""
    return [*message.tool_calls, *message.invalid_tool_calls] if isinstance(message, AIMessage) else []


def _plain_type(message: BaseMessage) -> BaseMessage:
    """Return a system, human, AI or tool message for ``message``, a streamed chunk or a `ChatMessage` included."""
    if isinstance(message, ChatMessage):
        if message.role not in _CHAT_ROLES:
            raise ValueError(f"a message's role must be one of {_CHAT_ROLES}, got {message.role!r}")
        return convert_to_messages([(message.role, message.content)])[0]
    if not isinstance(message, SystemMessage | HumanMessage | AIMessage | ToolMessage):
        raise ValueError(f"a message must be system, human, ai or tool, got {type(message).__name__}")
    return message_chunk_to_message(message)


class _Builder:
    """Turns the conversation into chunks, front to back; ``_text`` is the last text of the open turn, not yet a chunk."""

    def __init__(self, engine: Engine, cache: LRUCache[Chunk] | None, folder: str | Path | None) -> None:
        self.pieces: list[tuple[str, Chunk]] = []
        self._engine, self._cache, self._folder = engine, cache, folder
        self._text = self._key = ""
        self._in_tools = False  # the open turn holds tool results, not a user's text

    def human(self, message: BaseMessage) -> None:
        key, content = message_key(message), list(parts(message.content, self._cache, self._folder))
        if not content:
            return
        if self._in_tools:
            self._cut(template_of(self._engine).tool_turn().reopening)
            self._in_tools = False
        elif self._text:
            # Texts of two messages must not run into each other; the line end goes to the one that becomes a chunk.
            if isinstance(content[0], str) and not self._text.endswith("\n"):
                self._text += "\n"
            self._cut()
        self._add(key, content)

    def answer(self, run: Sequence[Any], *, called: bool) -> None:
        engine, template = self._engine, self._engine.template
        broken = (c["args"] for m in run for c in m.invalid_tool_calls)  # as the model wrote them
        text = "\n".join(filter(None, (*map(text_of, run), *broken)))
        functions = [(c["id"], {"name": c["name"], "arguments": c["args"]}) for m in run for c in m.tool_calls]
        calls = [{"id": i, "type": "function", "function": function} for i, function in functions]
        keys = [message_key(m) for m in run]
        query, self._text = self.query(), ""
        ids: Sequence[int] = ()
        with suppress(BudgetExceeded):  # longer than the engine: counted all the same, and refused where it is placed
            if template is None or template.plain:
                if calls:
                    template_of(engine).answer(text, calls)  # raises with the reason
                ids = engine.encode_exchange(query, engine.text_ids(text)).token_ids
            else:
                header, closing = template.turns("assistant")
                if called:
                    opening = template.tool_turn().opening
                    if opening.startswith(closing) and is_plain_text(engine, opening.removeprefix(closing)):
                        self._text = opening.removeprefix(closing)
                    else:
                        closing = opening
                if calls:
                    _check_spelled(engine, template.answer("", [PROBE_CALL]))
                text = template.answer(text, calls)
                front = (*engine.text_ids(query), *engine.template_ids(header))
                ids = (*front, *engine.text_ids(text), *engine.template_ids(closing))
        label = f"{query.strip()} {text.strip()}".strip()
        chunk = Chunk.tokens(ids, label=label) if ids else Chunk.text(f"{query}{text}", label=label)
        self.pieces.append((keys[0] if len(keys) == 1 else digest("messages", keys), chunk))
        self._key, self._in_tools = "", called

    def result(self, message: BaseMessage, *, first: bool) -> None:
        if not first:
            turn = template_of(self._engine).tool_turn()
            after_tail = turn.between.removeprefix(turn.tail)
            plain = all(is_plain_text(self._engine, t) for t in (turn.tail, after_tail))
            if plain and turn.between.startswith(turn.tail):
                self._text += turn.tail
                self._cut()
                self._text = after_tail
            else:
                self._cut(turn.between)
        self._add(message_key(message), parts(message.content, self._cache, self._folder))

    def query(self) -> str:
        """The text that ends the open turn."""
        if not self._in_tools:
            return self._text
        tail = template_of(self._engine).tool_turn().tail
        if not is_plain_text(self._engine, tail):
            raise UnsupportedModel("the chat template ends tool results with special tokens, which a query cannot hold")
        return self._text + tail

    @property
    def open_without_text(self) -> bool:
        """True if the open turn is a picture or an empty tool result, which can be answered without further text."""
        return self._in_tools or (not self._text and bool(self.pieces) and bool(self.pieces[-1][1].media))

    def end(self) -> None:
        """Turn the remaining text into a chunk."""
        self._text = self.query()
        self._cut()

    def _add(self, key: str, content: Iterable[str | Chunk]) -> None:
        self._key = key
        for part in content:
            if isinstance(part, str):
                self._text += part
                continue
            if self._text:  # directly before the media, as `Chunk.image` places its ``text``
                joined_parts = (TextPart(text=self._text), *part.parts)
                part = part.model_copy(update={"parts": joined_parts, "label": self._text.strip()})
            self.pieces.append((key, part))
            self._text = ""

    def _cut(self, glue: str = "") -> None:
        """Turn the open text into a chunk, followed by ``glue``, a piece of the template."""
        chunk_parts: list[TextPart | TokensPart] = [TextPart(text=self._text)] if self._text else []
        if glue:
            chunk_parts.append(TokensPart(ids=self._engine.template_ids(glue)))
        if chunk_parts:
            self.pieces.append((self._key, Chunk(parts=tuple(chunk_parts), label=self._text.strip())))
        self._text = ""


def _check_spelled(engine: Engine, text: str) -> None:
    if not is_plain_text(engine, text):
        raise UnsupportedModel(
            "the chat template writes tools with special tokens, which system prompts and answers cannot hold"
        )


def parts(
    content: Any, cache: LRUCache[Chunk] | None = None, folder: str | Path | None = None
) -> Iterator[str | Chunk]:
    """Yield the texts and media (a bare chunk each) of a message's content, in order.

    Args:
        cache: chunks of media that came as data, keyed by that data, without their pixels, which are in the engine's
            store; new ones are added, each with the weight 1.
        folder: folder of the files that a block may name; None: files are refused, as a message may come from anybody.

    Raises ValueError for a block of another kind, one that would have to be downloaded or names another file; BadMedia for
    one that cannot be decoded.
    Cost: decoding every image and video that is not in ``cache``.
    """
    blocks: Iterable[Any] = [content] if isinstance(content, str | dict) else content
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        text = block["text"] if kind in ("text", "text-plain") and isinstance(block.get("text"), str) else block
        if isinstance(text, str):
            yield from [text] if text else []
        elif kind in ("image", "image_url", "video", "video_url"):
            key = None if cache is None else block_key(block)
            chunk = cache.get(key) if cache is not None and key is not None else None
            if chunk is None:
                media = _media(block, kind.removesuffix("_url"), folder)
                sampling = {k: block[k] for k in ("start", "end", "fps", "frames") if block.get(k) is not None}
                chunk = Chunk.image(media) if kind.startswith("image") else Chunk.video(media, **sampling)
                # Files may change.
                if cache is not None and key is not None and not isinstance(media, str | Path | list):
                    cache.put(key, chunk.light(), 1)
            yield chunk
        else:
            raise ValueError(f"a content block must be text, an image or a video, got {block!r:.120}")


def text_of(message: BaseMessage) -> str:
    """Return the text of a system or AI message, without tool calls and thinking. Raises ValueError for media, undecoded."""
    content: Any = message.content
    blocks = [content] if isinstance(content, str | dict) else content
    visible = [b for b in blocks if not (isinstance(b, dict) and b.get("type") in _CALLS | _THINKING)]
    for block in visible:
        if isinstance(block, dict) and (kind := str(block.get("type")).removesuffix("_url")) in ("image", "video"):
            author = "a SystemMessage" if isinstance(message, SystemMessage) else "an AIMessage"
            raise ValueError(
                f"{author} must hold text, got {'an' if kind == 'image' else 'a'} {kind}; put it into a HumanMessage"
            )
    return "".join(str(part) for part in parts(visible))


def identity(content: Any) -> Any:
    """Return a message's content for `digest`: without LangChain's generated ids; pictures in memory by their pixels."""
    if isinstance(content, dict):
        return {str(k): identity(v) for k, v in content.items() if k not in ("id", "index")}
    if isinstance(content, list | tuple):
        return [identity(item) for item in content]
    if content is None or isinstance(content, str | int | float | bytes):
        return content
    return str(content) if isinstance(content, Path) else pixels_digest(as_rgb(content)[None])


def block_key(block: dict[str, Any]) -> str | None:
    """Return the key that identifies ``block``, pictures in memory by their pixels; None if it holds something else."""
    try:
        return digest("block", identity(block))
    except (TypeError, ValueError):
        return None


def _media(block: dict[str, Any], kind: str, folder: str | Path | None) -> Any:
    """Return the argument for `Chunk.image`: a path, bytes, or the picture itself (for a video: a path, bytes, or frames)."""
    fields: Any = block
    for name in (f"{kind}_url", "source"):
        if (inner := block.get(name)) is not None:
            fields = inner if isinstance(inner, dict) else {"url": inner}
    for name in (kind, "path", "base64", "data", "url"):
        source = fields.get(name)
        if name in ("base64", "data") and isinstance(source, str):
            return _decode_base64(source, kind)
        if isinstance(source, list | tuple):
            return [_load(item, kind, folder) for item in source]
        if source is not None:
            return _load(Path(source) if name == "path" else source, kind, folder)
    remedy = "; put the picture itself there: this window or its store has not got it" if "chunk" in block else ""
    raise ValueError(f"an {kind} block must have base64, data, path or a url, got {block!r:.120}{remedy}")


def _load(source: Any, kind: str, folder: str | Path | None) -> Any:
    """Return the file or the bytes that a path or a ``file:`` or ``data:`` url names; pictures and bytes unchanged."""
    if not isinstance(source, str | Path):
        return source
    scheme = urlparse(source).scheme if isinstance(source, str) else ""
    if scheme == "data":
        head, comma, data = str(source).partition(",")
        if not comma:
            raise BadMedia(f"a data url must be data:<type>;base64,<data>, got {head[:40]!r}")
        return _decode_base64(unquote(data), kind) if head.lower().endswith(";base64") else unquote_to_bytes(data)
    if scheme in ("http", "https"):
        raise ValueError(f"an {kind} must be given as data, got {source!r}; download it first: nothing is fetched")
    if scheme not in ("", "file"):
        raise ValueError(f"an {kind} url must be a data: or file: url, got {str(source)[:80]!r}")
    if folder is None:
        raise ValueError(
            f"an {kind} must be given as data, got the file {str(source)!r}; "
            "set allowed_local_media_path to the folder whose files messages may name"
        )
    path = url2pathname(urlparse(str(source)).path) if scheme else source
    target = Path(path).resolve()  # with links resolved
    if not target.is_relative_to(Path(folder).resolve()):
        raise ValueError(f"a file must lie in allowed_local_media_path {str(folder)!r}, got {str(path)!r}")
    return target


def _decode_base64(data: str, kind: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise BadMedia(f"an {kind} must be valid base64, got {data[:20]!r}...: {error}") from error
