"""LangChain content blocks to text and media.

Blocks come in several dialects: plain strings, v1 standard blocks, v0 ``source_type`` blocks, OpenAI's ``image_url``,
Anthropic's ``source``, Qwen's ``image``. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlparse
from urllib.request import url2pathname

from ctxwin.chunk import Chunk
from ctxwin.errors import BadMedia
from ctxwin.hashing import digest
from ctxwin.media import as_rgb, decode_video, pixels_digest
from ctxwin.store.recent import Recent

# What an AI message carries beside its text: calls are in `AIMessage.tool_calls`, thinking is not shown again.
_CALLS = {"tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "input_json_delta", "function_call"}
_THINKING = {"reasoning", "reasoning_content", "thinking", "redacted_thinking"}


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
            key = None if seen is None else _key(block)
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


def _key(block: dict[str, Any]) -> str | None:
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
