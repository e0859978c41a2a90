"""LangChain content blocks to text and media.

Blocks come in several dialects (plain strings, v1 standard blocks, v0 ``source_type`` blocks, OpenAI's ``image_url``,
Anthropic's ``source``); each says the same few things. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import json
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlparse
from urllib.request import url2pathname

from ctxwin.chunk import Chunk
from ctxwin.errors import BadMedia
from ctxwin.hashing import digest
from ctxwin.media import as_rgb, decode_video, pixels_digest

_SAMPLING = ("start", "end", "fps", "frames")
# What an AI message carries beside its text: calls are in `AIMessage.tool_calls`, thinking is not shown again.
_NOT_SHOWN = {
    "tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "input_json_delta", "function_call",
    "reasoning", "reasoning_content", "thinking", "redacted_thinking",
}  # fmt: skip


class Seen:
    """Chunks of pictures and videos that came as data, by that data: it need not be decoded again at every call.

    They hold no pixels: those are in the engine's store. Thread-safe; the least recently used of ``size`` go.
    """

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._chunks: OrderedDict[str, Chunk] = OrderedDict()
        self._lock = threading.Lock()

    def key(self, block: dict[str, Any]) -> str | None:
        """What ``block`` is known by; None where it holds an object."""
        try:
            return digest("block", json.dumps(block, sort_keys=True))
        except TypeError:
            return None

    def get(self, key: str) -> Chunk | None:
        with self._lock:
            if key in self._chunks:
                self._chunks.move_to_end(key)
            return self._chunks.get(key)

    def put(self, key: str, chunk: Chunk) -> None:
        with self._lock:
            self._chunks[key] = chunk.light()
            while len(self._chunks) > self._size:
                self._chunks.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._chunks.clear()


def parts(content: Any, seen: Seen | None = None, folder: str | Path | None = None) -> Iterator[str | Chunk]:
    """Text and media (a bare chunk each) of a message's content, in order.

    Files that a block names must lie in ``folder``; None: there are none, as a message may come from anybody.

    Raises ValueError for a block that is none of them, would have to be downloaded or names another file, BadMedia for an
    undecodable one.
    Cost: decoding every image and video that was not ``seen``.
    """
    for block in [content] if isinstance(content, str | dict) else content:
        if isinstance(block, str):
            yield from [block] if block else []
            continue
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("text", "text-plain") and isinstance(block.get("text"), str):
            yield from [block["text"]] if block["text"] else []
        elif kind in ("image", "image_url", "video", "video_url"):
            key = None if seen is None else seen.key(block)
            chunk = None if seen is None or key is None else seen.get(key)
            if chunk is None:
                media = _media(block, "image" if kind.startswith("image") else "video", folder)
                chunk = Chunk.image(media) if kind.startswith("image") else _video(block, media)
                if seen is not None and key is not None and isinstance(media, bytes):  # a file may change
                    seen.put(key, chunk)
            yield chunk
        else:
            raise ValueError(f"a content block must be text, an image or a video, got {_short(block)}")


def text_of(content: Any) -> str:
    """The text of an AI message: its tool calls and its thinking left out. Raises ValueError for media."""
    blocks = [content] if isinstance(content, str | dict) else content
    shown = list(parts([b for b in blocks if not (isinstance(b, dict) and b.get("type") in _NOT_SHOWN)]))
    if any(isinstance(part, Chunk) for part in shown):
        raise ValueError("an AI message must hold text, got an image or a video; put it into a HumanMessage")
    return "".join(str(part) for part in shown)


def identity(content: Any) -> Any:
    """A message's content as `digest` takes it: without the ids LangChain makes up, pictures in memory by their pixels."""
    if isinstance(content, dict):
        return {str(k): identity(v) for k, v in content.items() if k not in ("id", "index")}
    if isinstance(content, list | tuple):
        return [identity(item) for item in content]
    if content is None or isinstance(content, str | int | float | bytes):
        return content
    return str(content) if isinstance(content, Path) else pixels_digest(as_rgb(content)[None])


def _media(block: dict[str, Any], kind: str, folder: str | Path | None) -> Any:
    """What `Chunk.image` takes: a path, bytes, or the picture itself (for a video: a path, bytes, or frames)."""
    held: Any = block
    for name in (f"{kind}_url", "source"):
        inner = block.get(name)
        if isinstance(inner, str):
            return _fetched(inner, kind, folder)
        if isinstance(inner, dict):
            held = inner
    if held.get(kind) is not None:
        made = [_named(item, kind, folder) for item in _listed(held[kind])]
        return made if isinstance(held[kind], list | tuple) else made[0]
    if held.get("path") is not None:
        return _local(held["path"], kind, folder)
    for name in ("base64", "data"):
        data = held.get(name)
        if isinstance(data, bytes):
            return data
        if isinstance(data, str):
            return _decoded(data, kind)
    if isinstance(held.get("url"), str):
        return _fetched(held["url"], kind, folder)
    raise ValueError(f"an {kind} block must have base64, data, path or a url, got {_short(block)}")


def _listed(media: Any) -> Sequence[Any]:
    return media if isinstance(media, list | tuple) else [media]


def _named(media: Any, kind: str, folder: str | Path | None) -> Any:
    """A picture or frame that may be a path or a url, as Qwen's message format has it."""
    if isinstance(media, str) and urlparse(media).scheme:
        return _fetched(media, kind, folder)
    return _local(media, kind, folder) if isinstance(media, str | Path) else media


def _local(path: str | Path, kind: str, folder: str | Path | None) -> Path:
    """A file that messages may name; links are followed before it is looked at where it lies."""
    if folder is None:
        raise ValueError(
            f"an {kind} must be given as data, got the file {str(path)!r}; "
            "set allowed_local_media_path to the folder whose files messages may name"
        )
    found = Path(path).resolve()
    if not found.is_relative_to(Path(folder).resolve()):
        raise ValueError(f"a file must lie in allowed_local_media_path {str(folder)!r}, got {str(path)!r}")
    return found


def _fetched(url: str, kind: str, folder: str | Path | None) -> Path | bytes:
    """The file or the bytes behind a ``file:`` or ``data:`` url."""
    scheme = urlparse(url).scheme
    if scheme == "data":
        head, found, data = url.partition(",")
        if not found:
            raise BadMedia(f"a data url must be data:<type>;base64,<data>, got {url[:40]!r}")
        return _decoded(unquote(data), kind) if head.endswith(";base64") else unquote_to_bytes(data)
    if scheme == "file":
        return _local(url2pathname(urlparse(url).path), kind, folder)
    if scheme in ("http", "https"):
        raise ValueError(
            f"an {kind} must be given as data, got {url!r}; download it first, nothing is fetched silently"
        )
    raise ValueError(f"an {kind} url must be a data: or file: url, got {url[:80]!r}; use path for a local file")


def _decoded(data: str, kind: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise BadMedia(f"an {kind} must be valid base64, got {data[:20]!r}...: {error}") from error


def _video(block: dict[str, Any], media: Any) -> Chunk:
    sampling = {k: block[k] for k in _SAMPLING if block.get(k) is not None}
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
