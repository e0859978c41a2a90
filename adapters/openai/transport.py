"""Calls to our routes through an official client, with the server's errors as ctxwin's."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from openai import APIError, AsyncOpenAI, AsyncStream, OpenAI, Stream

from ctxwin.serve.errors import from_body


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
    return client.get(path, cast_to=object)


@our_errors()
def delete(client: OpenAI, path: str) -> Any:
    """Deletes what is at ``path``; returns the JSON that the server answers."""
    return client.delete(path, cast_to=object)


@our_errors()
def post(client: OpenAI, path: str, body: Mapping[str, Any]) -> Any:
    """Posts JSON. A retry after a broken connection carries the same Idempotency-Key, so that it is done once."""
    return client.post(path, **_json(body))


@our_errors()
def post_files(
    client: OpenAI, path: str, fields: Mapping[str, str], files: Mapping[str, tuple[str, bytes, str]]
) -> Any:
    """Posts a multipart body."""
    options: Any = {"headers": {"Content-Type": "multipart/form-data"}}
    return client.post(path, cast_to=object, body=dict(fields), files=dict(files), options=options)


@our_errors()
def stream(client: OpenAI, path: str, body: Mapping[str, Any]) -> Stream[Any]:
    """Posts JSON and gives the server-sent events of the answer."""
    return client.post(path, **_json(body), stream=True, stream_cls=Stream[Any])


async def astream(client: AsyncOpenAI, path: str, body: Mapping[str, Any]) -> AsyncStream[Any]:
    """`stream` for async code."""
    with our_errors():
        return await client.post(path, **_json(body), stream=True, stream_cls=AsyncStream[Any])


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


def _json(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"cast_to": object, "body": dict(body), "options": {"headers": {"Idempotency-Key": uuid.uuid4().hex}}}
