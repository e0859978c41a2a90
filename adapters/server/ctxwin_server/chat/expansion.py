"""Expansion of chats that name chunks into plain chats that hold the texts and pictures of those chunks.

vLLM's own route answers them, with a window behind them unless the request or the server says otherwise.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ctxwin.chunk import Chunk, MediaPart, TextPart
from ctxwin.errors import ChunkUnavailable
from ctxwin.media import packed_pictures
from ctxwin.window.serialization import REFERENCE
from ctxwin_client.errors import TooLarge
from ctxwin_server.protocol.limits import Allowance
from ctxwin_server.registry.uploads import Uploads


def expand(data: dict[str, Any], uploads: Uploads, max_text: int) -> None:
    """Replace references to chunks by the chunks' content.

    Args:
        max_text: characters that the chunks may have together; their pictures share one request's allowance.

    Raises:
        UnknownUpload, ChunkUnavailable: a chunk is missing. ValueError: a chunk that no plain chat can hold. TooLarge.
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
    """Remaining allowance for the content of a request's chunks."""

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
            kind = f"{part.media} media" if isinstance(part, MediaPart) else "token ids"
            content = "a message" if chunk.role else kind
            raise ValueError(
                f"chunks of a chat must hold texts and pictures, got {content}; place it in a window (/v1/windows), or upload "
                "its parts"
            )
