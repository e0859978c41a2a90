"""Calls to our routes through an official client, with ctxwin's own errors; uploads: once by content, then named by id."""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from typing import Any, cast
from weakref import WeakKeyDictionary

import httpx2
from openai import APIError, AsyncOpenAI, AsyncStream, OpenAI, Stream, _base_client

from ctxwin.chunk import Chunk, Part, TextPart, TokensPart
from ctxwin.errors import ChunkUnavailable, EngineFailed, UnsupportedModel
from ctxwin.media import png
from ctxwin.store.lru import LRUCache
from ctxwin.validation import as_list, check_json, check_unicode
from ctxwin.window.answer import Answer
from ctxwin.window.serialization import REFERENCE, answer_from
from ctxwin.window.stream import AsyncTextStream
from ctxwin_client.errors import UnknownUpload, from_body

Files = dict[str, tuple[str, bytes, str]]
ENDED_EARLY = "the server ended the answer before its end; ask again"
_MAX_UPLOADED, _METADATA = 65536, ("keep_source", "label", "pin", "priority")
_uploaded: WeakKeyDictionary[OpenAI, LRUCache[None]] = WeakKeyDictionary()


@contextmanager
def our_errors() -> Iterator[None]:
    """Raise ctxwin's error if the server sent one; others (keys, connections) stay the official client's."""
    try:
        yield
    except APIError as error:
        if (ctxwin_error := from_body(error.body)) is None:
            raise
        raise ctxwin_error from error
    except UnicodeEncodeError as error:
        check_unicode("text", error.object)


@our_errors()
def get(client: OpenAI, path: str, kind: Any = object) -> Any:
    """Return the JSON at ``path``, or the whole response (``httpx2.Response``)."""
    return client.get(path, cast_to=kind, options={"headers": _session(path)})


def fetch_output(client: OpenAI, reference: Mapping[str, Any]) -> Any:
    """Fetch the tensor that a reference in ``Answer.outputs`` names. Raises OutputGone once it has expired."""
    from ctxwin.engines.outputs import load_output  # which loads torch

    return load_output(get(client, reference["path"], httpx2.Response).content, reference)


@our_errors()
def delete(client: OpenAI, path: str) -> Any:
    """Delete the resource at ``path``; return the server's JSON."""
    return client.delete(path, cast_to=object, options={"headers": _session(path)})


@our_errors()
def post(client: OpenAI, path: str, body: Mapping[str, Any], files: Files | None = None) -> Any:
    """Post JSON, or a multipart body with ``files``; a retry carries the same Idempotency-Key, so that it takes effect once."""
    return client.post(path, **_request(path, body, files))


@our_errors()
def stream(client: OpenAI, path: str, body: Mapping[str, Any]) -> Stream[Any]:
    """Post JSON and return the server-sent events of the answer."""
    return client.post(path, **_request(path, body), stream=True, stream_cls=Stream[Any])


async def events(
    client: OpenAI, async_client: AsyncOpenAI | None, path: str, body: Mapping[str, Any]
) -> AsyncGenerator[dict[str, Any]]:
    """`stream` for async code, by ``async_client`` or by one for this call with the settings of ``client``."""
    async with AsyncExitStack() as stack:
        if async_client is None:
            if not isinstance(client._client, _base_client.SyncHttpxClientWrapper):
                raise ValueError("async_client must be given beside a client with its own http_client, got None")
            options: dict[str, Any] = {n: getattr(client, n) for n in ("base_url", "timeout", "max_retries")}
            options |= {"default_headers": client._custom_headers, "default_query": client._custom_query}
            options["api_key"] = lambda: asyncio.to_thread(client._refresh_api_key)
            async_client = await stack.enter_async_context(AsyncOpenAI(**options))
        with our_errors():
            replies = await async_client.post(path, **_request(path, body), stream=True, stream_cls=AsyncStream[Any])
            stack.push_async_callback(replies.close)  # the server stops when the connection closes
            async for event in replies:
                yield event


def stream_of(events: AsyncGenerator[dict[str, Any]]) -> AsyncTextStream:
    """Return the texts and the answer among the ``events`` of a question, which are closed with the stream."""

    async def ask(put: Callable[[str | Answer], None]) -> None:
        async with aclosing(events):
            async for event in events:
                put(answer_from(event["answer"]) if "answer" in event else event.get("text", ""))
        raise EngineFailed(ENDED_EARLY)  # nobody hears of it behind the answer

    return AsyncTextStream(ask)


async def answer_of(stream: AsyncTextStream) -> Answer:
    """Return the answer of a stream, once it is exhausted, and close it."""
    async with aclosing(stream):
        async for _ in stream:
            pass
    return cast("Answer", stream.answer)


def question(query: str, max_tokens: int, options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return a question with its options as JSON, with libraries by name; None leaves a default."""
    chosen = {name: value for name, value in options.items() if value is not None}
    if "libraries" in chosen:
        chosen["libraries"] = [getattr(x, "name", x) for x in as_list("libraries", chosen["libraries"], "a library")]
    return {"query": query, "max_tokens": max_tokens, **more, **chosen}


def _request(path: str, body: Mapping[str, Any], files: Files | None = None) -> dict[str, Any]:
    for name, value in body.items():
        check_json(name, value)
    headers = {"Idempotency-Key": uuid.uuid4().hex, **_session(path)}
    headers |= {"Content-Type": "multipart/form-data"} if files else {}
    return {"cast_to": object, "body": dict(body), "files": files, "options": {"headers": headers}}


def _session(path: str) -> dict[str, str]:
    """Return the header by which balancers keep a window's requests on one server. Raises ValueError for a path elsewhere."""
    if not {"", ".", ".."}.isdisjoint(path.split("/")[1:]):  # clients of HTTP resolve these
        raise ValueError(f"a name on a server must not be empty, '.' or '..', got {path!r}")
    collection, _, rest = path.removeprefix("/").partition("/")
    return {"x-session-id": rest.partition("/")[0]} if collection == "windows" and rest else {}


def chunk_part(chunk: Chunk | str) -> Any:
    """Return a content part that names an uploaded chunk, for the messages of ``client.chat.completions.create``."""
    return {"type": REFERENCE, "chunk": chunk if isinstance(chunk, str) else chunk.id}


def upload(client: OpenAI, chunk: Chunk) -> str:
    """Upload a chunk and return its id. Pixels that the server does not have are sent as PNG, paths never. Idempotent.

    Raises:
        ChunkUnavailable: neither this process nor the server has its pixels. BadMedia, UnsupportedModel: see
            `Window.append`. TooLarge: beyond the server's ``--max-upload-bytes``.

    Cost: one short request if the server has the media, else the upload and one run of the server's vision tower.
    """
    if any(part.media == "audio" for part in chunk.media):
        raise UnsupportedModel("a server takes no sound yet, got a chunk of it; use a window of open_engine")
    known: Any = None
    with suppress(UnknownUpload):
        known = chunk.media and get(client, f"/chunks/{chunk.id}")
    if not known:
        files: Files = {}  # gets the pixels; the form is that of `ctxwin_server.protocol.schemas`
        turn = {"type": "parts"} if chunk.role is None else {"type": "message", "role": chunk.role}
        body = {**turn, "content": [_part_to_json(chunk, part, files) for part in chunk.parts]}
        body |= {name: getattr(chunk, name) for name in ("as_frames", "id", *_METADATA)}
        post(client, "/chunks", {"chunk": json.dumps(body)} if files else body, files or None)
    uploaded_by(client).put(chunk.id, None, 1)
    return chunk.id


def reference(chunk: Chunk) -> dict[str, Any]:
    """Return an uploaded chunk as JSON for a window's request, with the metadata that is not part of its id."""
    return {"type": REFERENCE, "chunk": chunk.id, **{name: getattr(chunk, name) for name in _METADATA}}


def _part_to_json(chunk: Chunk, part: Part, files: Files) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, TokensPart):
        return {"type": "tokens", "ids": list(part.ids)}
    frames = chunk.pixels(part)
    if frames is None:
        raise ChunkUnavailable(f"the pixels of chunk {chunk.id} must be in memory or its file; create it again")
    named = {f"medium-{number}": png(frame) for number, frame in enumerate(frames, len(files))}
    files |= {name: (f"{name}.png", data, "image/png") for name, data in named.items()}
    references = [{"file": name} for name in named]
    if part.media == "image":
        return {"type": "image", "image": references[0]}
    return {"type": "video", "frames": references, "fps": part.fps}


def uploaded_by(client: OpenAI) -> LRUCache[None]:
    """Return the ids of the chunks that ``client`` has uploaded; the server may have dropped some since."""
    return _uploaded.setdefault(client, LRUCache(_MAX_UPLOADED))
