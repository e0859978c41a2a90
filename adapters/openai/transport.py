"""Calls to our routes through an official client, and chunks on their way to a server.

Errors that the server sends are raised as ctxwin's. Chunks are uploaded once by content, then named by id.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from openai import APIError, AsyncOpenAI, AsyncStream, OpenAI, Stream

from ctxwin.chunk import Chunk, MediaPart, TextPart
from ctxwin.errors import ChunkUnavailable
from ctxwin.media import png
from ctxwin.serve.errors import UnknownUpload, from_body
from ctxwin.serve.specs import REFERENCE
from ctxwin.store.recent import Recent

_MOST_KNOWN = 65536
_known: WeakKeyDictionary[OpenAI, Recent[None]] = WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def our_errors() -> Iterator[None]:
    """Raises ctxwin's error where the server sent one; others (keys, connections) stay the official client's."""
    try:
        yield
    except APIError as error:
        ours = from_body(error.body)
        if ours is None:
            raise
        raise ours from error


@our_errors()
def get(client: OpenAI, path: str) -> Any:
    """The JSON at ``path``."""
    return client.get(path, cast_to=object, options={"headers": _session(path)})


@our_errors()
def delete(client: OpenAI, path: str) -> Any:
    """Deletes what is at ``path``; returns the JSON that the server answers."""
    return client.delete(path, cast_to=object, options={"headers": _session(path)})


@our_errors()
def post(client: OpenAI, path: str, body: Mapping[str, Any]) -> Any:
    """Posts JSON. A retry after a broken connection carries the same Idempotency-Key, so that it is done once."""
    return client.post(path, **_json(path, body))


@our_errors()
def post_files(
    client: OpenAI, path: str, fields: Mapping[str, str], files: Mapping[str, tuple[str, bytes, str]]
) -> Any:
    """Posts a multipart body; a retry is done once, as with `post`."""
    options: Any = {"headers": {"Content-Type": "multipart/form-data", "Idempotency-Key": uuid.uuid4().hex}}
    return client.post(path, cast_to=object, body=dict(fields), files=dict(files), options=options)


@our_errors()
def stream(client: OpenAI, path: str, body: Mapping[str, Any]) -> Stream[Any]:
    """Posts JSON and gives the server-sent events of the answer."""
    return client.post(path, **_json(path, body), stream=True, stream_cls=Stream[Any])


async def astream(client: AsyncOpenAI, path: str, body: Mapping[str, Any]) -> AsyncStream[Any]:
    """`stream` for async code."""
    with our_errors():
        return await client.post(path, **_json(path, body), stream=True, stream_cls=AsyncStream[Any])


@asynccontextmanager
async def asynchronous(client: OpenAI, given: AsyncOpenAI | None) -> AsyncIterator[AsyncOpenAI]:
    """``given``, or a client for the running loop that is set up as ``client`` is."""
    if given is not None:
        yield given
        return
    options: dict[str, Any] = {n: getattr(client, n) for n in ("api_key", "base_url", "timeout", "max_retries")}
    options |= {"default_headers": client._custom_headers, "default_query": client._custom_query}
    async with AsyncOpenAI(**options) as made:
        yield made


def named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a question as JSON: libraries go by name."""
    libraries = options.get("libraries")
    names = {} if libraries is None else {"libraries": [getattr(one, "name", one) for one in libraries]}
    return {**options, **names}


def _json(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"Idempotency-Key": uuid.uuid4().hex, **_session(path)}
    return {"cast_to": object, "body": dict(body), "options": {"headers": headers}}


def _session(path: str) -> dict[str, str]:
    """What balancers keep on one server: a window's requests."""
    first, _, rest = path.removeprefix("/").partition("/")
    return {"x-session-id": rest.partition("/")[0]} if first == "windows" and rest else {}


def chunk_part(chunk: Chunk | str) -> Any:
    """A content part that names an uploaded chunk, for the messages of ``client.chat.completions.create``."""
    return {"type": REFERENCE, "chunk": chunk if isinstance(chunk, str) else chunk.id}


def upload(client: OpenAI, chunk: Chunk) -> str:
    """Uploads a chunk and returns its id. Idempotent: media that the server still has are not sent again.

    Pixels travel as PNG, so the server sees exactly the same; paths stay here.

    Raises:
        ChunkUnavailable: neither this process nor the server has its pixels. BadMedia, UnsupportedModel: see
            `Window.append`. TooLarge: beyond the server's ``--max-upload-bytes``.

    Cost: one short request where the server has it, else the upload and one run of the server's vision tower.
    """
    if not chunk.media:
        post(client, "/chunks", _described(chunk, {}))
    else:
        try:
            get(client, f"/chunks/{chunk.id}")
        except UnknownUpload:
            files: dict[str, tuple[str, bytes, str]] = {}
            fields = {"chunk": json.dumps(_described(chunk, files))}
            post_files(client, "/chunks", fields, files)
    known_by(client).put(chunk.id, None, 1)
    return chunk.id


def reference(chunk: Chunk) -> dict[str, Any]:
    """How an uploaded chunk stands in a window's request, with what is not part of its id."""
    return {"type": REFERENCE, "chunk": chunk.id, **_metadata(chunk)}


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
    return {**turn, "content": content, "as_frames": chunk.as_frames, "id": chunk.id, **_metadata(chunk)}


def _metadata(chunk: Chunk) -> dict[str, Any]:
    return {name: getattr(chunk, name) for name in ("keep_source", "label", "pin", "priority")}


def _medium(chunk: Chunk, part: MediaPart, files: dict[str, tuple[str, bytes, str]]) -> dict[str, Any]:
    frames = chunk.pixels(part)
    if frames is None:
        raise ChunkUnavailable(
            f"the pixels of chunk {chunk.id} must be in memory or in the file they came from to be uploaded; make it again"
        )
    names = []
    for frame in frames:
        name = f"medium-{len(files)}"
        files[name] = (f"{name}.png", png(frame), "image/png")
        names.append({"file": name})
    if part.media == "image":
        return {"type": "image", "image": names[0]}
    return {"type": "video", "frames": names, "fps": part.fps}


def known_by(client: OpenAI) -> Recent[None]:
    """Ids of the chunks that ``client`` has uploaded; the server may have dropped some since."""
    with _lock:
        return _known.setdefault(client, Recent(_MOST_KNOWN))
