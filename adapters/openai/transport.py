"""Calls to our routes through an official client, with the server's errors as ctxwin's."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

from openai import APIError, APIStatusError, AsyncOpenAI, AsyncStream, OpenAI, Stream

from ctxwin.serve.errors import from_body

JSON = dict[str, Any]


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


def get(client: OpenAI, path: str) -> JSON:
    with our_errors():
        return cast(JSON, client.get(path, cast_to=cast(Any, object)))


def delete(client: OpenAI, path: str) -> JSON:
    with our_errors():
        return cast(JSON, client.delete(path, cast_to=cast(Any, object)))


def post(client: OpenAI, path: str, body: Mapping[str, Any]) -> JSON:
    """Posts JSON. A retry after a broken connection carries the same Idempotency-Key, so that it is done once."""
    with our_errors():
        return cast(JSON, client.post(path, cast_to=cast(Any, object), body=dict(body), options=_options()))


def post_files(
    client: OpenAI, path: str, fields: Mapping[str, str], files: Mapping[str, tuple[str, bytes, str]]
) -> JSON:
    """Posts a multipart body."""
    options: Any = {"headers": {"Content-Type": "multipart/form-data"}}
    with our_errors():
        made = client.post(path, cast_to=cast(Any, object), body=dict(fields), files=dict(files), options=options)
    return cast(JSON, made)


def stream(client: OpenAI, path: str, body: Mapping[str, Any]) -> Stream[Any]:
    """Posts JSON and gives the server-sent events of the answer."""
    with our_errors():
        made = client.post(
            path, cast_to=cast(Any, object), body=dict(body), options=_options(), stream=True, stream_cls=Stream[Any]
        )
    return made


async def astream(client: AsyncOpenAI, path: str, body: Mapping[str, Any]) -> AsyncStream[Any]:
    with our_errors():
        made = await client.post(
            path, cast_to=cast(Any, object), body=dict(body), options=_options(), stream=True,
            stream_cls=AsyncStream[Any],
        )  # fmt: skip
    return made


@asynccontextmanager
async def asynchronous(client: OpenAI, given: AsyncOpenAI | None) -> AsyncIterator[AsyncOpenAI]:
    """``given``, or a client for the running loop that is set up as ``client`` is."""
    if given is not None:
        yield given
        return
    made = AsyncOpenAI(
        api_key=client.api_key, base_url=client.base_url, timeout=client.timeout, max_retries=client.max_retries,
        default_headers=client._custom_headers, default_query=client._custom_query,
    )  # fmt: skip
    async with made:
        yield made


def missing(error: Exception) -> bool:
    """Whether a route is not there: another server than ``ctxwin serve``."""
    return isinstance(error, APIStatusError) and error.status_code == 404


def _options() -> Any:
    return {"headers": {"Idempotency-Key": uuid.uuid4().hex}}
