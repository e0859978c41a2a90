"""LangChain messages to a window's system prompt, chunks and query.

A window's chunks live in one open user turn. System messages at the front are the system prompt. A run of human messages is
one user turn: its media and texts are bare chunks, and its last text is what a question asks. An AI message behind it
makes that question an exchange, in the form `Window.remember` gives it, so that the KV of an answered question is found
again. What a chat template writes around tool calls and their results is read off the template.

System prompt, chunks and query, tokenised one after the other, are the chat template's own rendering of the conversation,
with consecutive messages of one author joined to one turn.

Content blocks come in several dialects: plain strings, v1 standard blocks, v0 ``source_type`` blocks, OpenAI's ``image_url``,
Anthropic's ``source``, Qwen's ``image``. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
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
from ctxwin.errors import BadMedia, UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.media import as_rgb, decode_video, pixels_digest
from ctxwin.store.recent import Recent
from ctxwin.window.toolcalls import spelled, template_of

_CHAT_ROLES = ("ai", "assistant", "developer", "human", "system", "user")
_PROBE_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
# What an AI message carries beside its text: calls are in `AIMessage.tool_calls`, thinking is not shown again.
_CALLS = {"tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "input_json_delta", "function_call"}
_THINKING = {"reasoning", "reasoning_content", "thinking", "redacted_thinking"}


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


def parts(content: Any, seen: Recent[Chunk] | None = None, folder: str | Path | None = None) -> Iterator[str | Chunk]:
    """Text and media (a bare chunk each) of a message's content, in order.

    Args:
        seen: media that came as data, by that data, without their pixels, which are in the engine's store; new ones are
            added, each with the weight 1.
        folder: where the files that a block names must lie; None: files are refused, as a message may come from anybody.

    Raises ValueError for a block of another kind, one that would have to be downloaded or names another file; BadMedia for
    one that cannot be decoded.
    Cost: decoding every image and video that was not ``seen``.
    """
    blocks: Iterable[Any] = [content] if isinstance(content, str | dict) else content
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        text = block["text"] if kind in ("text", "text-plain") and isinstance(block.get("text"), str) else block
        if isinstance(text, str):
            yield from [text] if text else []
        elif kind in ("image", "image_url", "video", "video_url"):
            key = None if seen is None else block_key(block)
            chunk = seen.get(key) if seen is not None and key is not None else None
            if chunk is None:
                media = _media(block, kind.removesuffix("_url"), folder)
                chunk = Chunk.image(media) if kind.startswith("image") else _video(block, media)
                if seen is not None and key is not None and isinstance(media, bytes):  # a file may change
                    seen.put(key, chunk.light(), 1)
            yield chunk
        else:
            raise ValueError(f"a content block must be text, an image or a video, got {_short(block)}")


def text_of(content: Any) -> str:
    """The text of an AI message, without its tool calls and its thinking. Raises ValueError for media."""
    blocks = [content] if isinstance(content, str | dict) else content
    shown = list(parts([b for b in blocks if not (isinstance(b, dict) and b.get("type") in _CALLS | _THINKING)]))
    if any(isinstance(part, Chunk) for part in shown):
        raise ValueError("an AI message must hold text, got an image or a video; put it into a HumanMessage")
    return "".join(str(part) for part in shown)


def identity(content: Any) -> Any:
    """A message's content as `digest` takes it: without the ids LangChain generates; pictures in memory by their pixels."""
    if isinstance(content, dict):
        return {str(k): identity(v) for k, v in content.items() if k not in ("id", "index")}
    if isinstance(content, list | tuple):
        return [identity(item) for item in content]
    if content is None or isinstance(content, str | int | float | bytes):
        return content
    return str(content) if isinstance(content, Path) else pixels_digest(as_rgb(content)[None])


def block_key(block: dict[str, Any]) -> str | None:
    """What ``block`` is recognised by; None where it holds an object."""
    try:
        return digest("block", json.dumps(block, sort_keys=True))
    except TypeError:
        return None


def _media(block: dict[str, Any], kind: str, folder: str | Path | None) -> Any:
    """What `Chunk.image` takes: a path, bytes, or the picture itself (for a video: a path, bytes, or frames)."""
    held: Any = block
    for name in (f"{kind}_url", "source"):
        if (inner := block.get(name)) is not None:
            held = inner if isinstance(inner, dict) else {"url": inner}
    for name in (kind, "path", "base64", "data", "url"):
        given = held.get(name)
        if name in ("base64", "data") and isinstance(given, str):
            return _decoded(given, kind)
        if isinstance(given, list | tuple):
            return [_found(item, kind, folder) for item in given]
        if given is not None:
            return _found(Path(given) if name == "path" else given, kind, folder)
    raise ValueError(f"an {kind} block must have base64, data, path or a url, got {_short(block)}")


def _found(given: Any, kind: str, folder: str | Path | None) -> Any:
    """The file or the bytes that a path or a ``file:`` or ``data:`` url names; pictures and bytes as they are."""
    if not isinstance(given, str | Path):
        return given
    scheme = urlparse(given).scheme if isinstance(given, str) else ""
    if scheme == "data":
        head, comma, data = str(given).partition(",")
        if not comma:
            raise BadMedia(f"a data url must be data:<type>;base64,<data>, got {head[:40]!r}")
        return _decoded(unquote(data), kind) if head.endswith(";base64") else unquote_to_bytes(data)
    if scheme in ("http", "https"):
        raise ValueError(
            f"an {kind} must be given as data, got {given!r}; download it first, nothing is fetched silently"
        )
    if scheme not in ("", "file"):
        raise ValueError(f"an {kind} url must be a data: or file: url, got {str(given)[:80]!r}")
    if folder is None:
        raise ValueError(
            f"an {kind} must be given as data, got the file {str(given)!r}; "
            "set allowed_local_media_path to the folder whose files messages may name"
        )
    path = url2pathname(urlparse(str(given)).path) if scheme else given
    found = Path(path).resolve()  # where it really lies, behind links
    if not found.is_relative_to(Path(folder).resolve()):
        raise ValueError(f"a file must lie in allowed_local_media_path {str(folder)!r}, got {str(path)!r}")
    return found


def _decoded(data: str, kind: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise BadMedia(f"an {kind} must be valid base64, got {data[:20]!r}...: {error}") from error


def _video(block: dict[str, Any], media: Any) -> Chunk:
    sampling = {k: block[k] for k in ("start", "end", "fps", "frames") if block.get(k) is not None}
    if not isinstance(media, bytes):
        return Chunk.video(media, **sampling)
    with tempfile.TemporaryDirectory() as folder:  # OpenCV reads files only
        path = Path(folder, "video")
        path.write_bytes(media)
        pixels, rate = decode_video(path, **sampling)
    return Chunk.video(list(pixels), fps=rate)


def _short(block: Any) -> str:
    shown = repr(block)
    return shown if len(shown) <= 120 else shown[:120] + "..."
