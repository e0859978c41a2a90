"""Chunks on their way to a server: uploaded once by content, then named by id."""

from __future__ import annotations

import io
import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ctxwin.adapters.openai import transport
from ctxwin.chunk import Chunk, MediaPart, TextPart
from ctxwin.errors import ChunkUnavailable
from ctxwin.serve.errors import UnknownUpload
from ctxwin.serve.specs import REFERENCE

if TYPE_CHECKING:
    import numpy as np
    from openai import OpenAI

_MOST_KNOWN = 65536
_known: WeakKeyDictionary[OpenAI, OrderedDict[str, None]] = WeakKeyDictionary()
_lock = threading.Lock()


def chunk_part(chunk: Chunk | str) -> Any:
    """A content part that names an uploaded chunk, for the messages of ``client.chat.completions.create``."""
    return {"type": REFERENCE, "chunk": chunk if isinstance(chunk, str) else chunk.id}


def upload(client: OpenAI, chunk: Chunk) -> str:
    """Uploads a chunk and returns its id. Idempotent: media that the server has now are not sent again.

    Pixels travel as PNG, so the server sees exactly them; paths stay here.

    Raises:
        ChunkUnavailable: neither this process nor the server has its pixels. BadMedia, UnsupportedModel: see
            `Window.append`. TooLarge: beyond the server's ``--max-upload-bytes``.

    Cost: one short request where the server has it, else the upload and one run of the server's vision tower.
    """
    if not chunk.media:
        transport.post(client, "/chunks", _described(chunk, {}))
    elif not _is_there(client, chunk.id):
        files: dict[str, tuple[str, bytes, str]] = {}
        fields = {"chunk": json.dumps(_described(chunk, files))}
        transport.post_files(client, "/chunks", fields, files)
    _remember(client, chunk.id)
    return chunk.id


def upload_once(client: OpenAI, chunk: Chunk) -> None:
    """`upload` without asking again what this client has uploaded: for callers that do so where it is unknown after all."""
    if not _is_known(client, chunk.id):
        upload(client, chunk)


def forget_known(client: OpenAI, chunk_id: str) -> None:
    """The server has it no more: the next `upload_once` sends it."""
    with _lock:
        _known.get(client, OrderedDict()).pop(chunk_id, None)


def reference(chunk: Chunk) -> dict[str, Any]:
    """How an uploaded chunk stands in a window's request, with what is not part of its id."""
    part: dict[str, Any] = {"type": REFERENCE, "chunk": chunk.id, "keep_source": chunk.keep_source}
    return part | {"label": chunk.label, "pin": chunk.pin, "priority": chunk.priority}


def _described(chunk: Chunk, files: dict[str, tuple[str, bytes, str]]) -> dict[str, Any]:
    """The chunk as `ctxwin.serve.specs` takes it; its pixels go to ``files``."""
    content: list[dict[str, Any]] = []
    for part in chunk.parts:
        if isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
        elif isinstance(part, MediaPart):
            content.append(_medium(chunk, part, files))
        else:
            content.append({"type": "tokens", "ids": list(part.ids)})
    turn = {"type": "parts"} if chunk.role is None else {"type": "message", "role": chunk.role}
    return {
        **turn, "content": content, "as_frames": chunk.as_frames, "id": chunk.id, "keep_source": chunk.keep_source,
        "label": chunk.label, "pin": chunk.pin, "priority": chunk.priority,
    }  # fmt: skip


def _medium(chunk: Chunk, part: MediaPart, files: dict[str, tuple[str, bytes, str]]) -> dict[str, Any]:
    frames = chunk.pixels(part)
    if frames is None:
        raise ChunkUnavailable(
            f"the pixels of chunk {chunk.id} must be in memory or in the file they came from to be uploaded; make it again"
        )
    names = []
    for frame in frames:
        name = f"medium-{len(files)}"
        files[name] = (f"{name}.png", _png(frame), "image/png")
        names.append({"file": name})
    if part.media == "image":
        return {"type": "image", "image": names[0]}
    return {"type": "video", "frames": names, "fps": part.fps}


def _png(frame: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _is_there(client: OpenAI, chunk_id: str) -> bool:
    try:
        transport.get(client, f"/chunks/{chunk_id}")
    except UnknownUpload:
        return False
    return True


def _is_known(client: OpenAI, chunk_id: str) -> bool:
    with _lock:
        return chunk_id in _known.get(client, {})


def _remember(client: OpenAI, chunk_id: str) -> None:
    with _lock:
        known = _known.setdefault(client, OrderedDict())
        known[chunk_id] = None
        if len(known) > _MOST_KNOWN:
            known.popitem(last=False)
