"""A chat that names chunks as the plain chat that it is: the texts and pictures of its chunks stand in it.

So it gets what only vLLM's own route gives, tools for example, and a window behind plain chats.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ctxwin.chunk import Chunk, MediaPart, TextPart
from ctxwin.errors import ChunkUnavailable
from ctxwin.media import packed_pictures
from ctxwin.serve.errors import TooLarge
from ctxwin.serve.limits import Allowance
from ctxwin.serve.specs import REFERENCE
from ctxwin.serve.uploads import Uploads


def needs_vllm(data: dict[str, Any]) -> bool:
    """Whether a chat that names chunks has tools, or calls of them, which only vLLM's own route serves."""
    if data.get("tools") or data.get("tool_choice") not in (None, "none"):
        return True
    messages = data.get("messages")
    turns = [turn for turn in (messages if isinstance(messages, list) else ()) if isinstance(turn, dict)]
    return any(turn.get("role") == "tool" or turn.get("tool_calls") for turn in turns)


def expand(data: dict[str, Any], uploads: Uploads, max_text: int) -> None:
    """Puts the content of chunks in the place of their names.

    Args:
        max_text: characters that the chunks may have together; their pictures share one request's allowance.

    Raises:
        UnknownUpload, ChunkUnavailable: it is not there. ValueError: a chunk that no plain chat can hold. TooLarge.
    """
    room = _Room(uploads.allowance(), max_text)
    for message in data["messages"]:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        parts: list[Any] = []
        for part in content:
            if isinstance(part, dict) and part.get("type") == REFERENCE:
                parts += _content(uploads.find(str(part.get("chunk"))), uploads, room)
            else:
                parts.append(part)
        message["content"] = parts


@dataclass
class _Room:
    """What the content of a request's chunks may still take."""

    pictures: Allowance
    text: int

    def take_text(self, text: str) -> None:
        self.text -= len(text)
        if self.text < 0:
            raise TooLarge("the chunks of a chat have more text than a request may have (--max-text); name fewer")


def _content(chunk: Chunk, uploads: Uploads, room: _Room) -> Iterator[dict[str, Any]]:
    for part in chunk.parts:
        if isinstance(part, TextPart) and chunk.role is None:
            room.take_text(part.text)
            yield {"type": "text", "text": part.text}
        elif isinstance(part, MediaPart) and chunk.role is None and (part.media == "image" or chunk.as_frames):
            frames, height, width = part.shape
            for _ in range(frames):
                room.pictures.take_picture(width, height)
            packed = uploads.engine.repo.get_source(f"source/{part.content}")
            if packed is None:
                raise ChunkUnavailable(f"the pixels of chunk {chunk.id} have left the store; upload it again")
            for picture in packed_pictures(packed):
                url = "data:image/png;base64," + base64.b64encode(picture).decode()
                yield {"type": "image_url", "image_url": {"url": url}}
        else:
            what = "a message" if chunk.role else f"{part.media} media" if isinstance(part, MediaPart) else "token ids"
            raise ValueError(
                f"chunks of a chat with tools or with a window behind it must hold texts and pictures, got {what}; "
                "leave the tools out and set windows to off, or upload its parts"
            )
