"""Connections are bounded before anybody knows whose they are: endless headers, silence, and answers that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import Request
from fastapi.responses import StreamingResponse

from adapters.server.app.test_authentication import status
from adapters.server.calls import call, wait_for
from adapters.server.serving import Server, serving
from ctxwin_client import LiveStream, RemoteWindow
from ctxwin_server.http.connections import ConnectionLimits, bound_connections
from ctxwin_server.protocol.limits import Limits

SHORT = ConnectionLimits(header_bytes=8 << 10, headers=20, header_s=0.5, body_s=0.5, unread_s=0.5, connections=40)
REQUEST = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def answer(connection: socket.socket) -> bytes:
    """All that a server says until it ends the connection."""
    said = b""
    with contextlib.suppress(OSError):
        while part := connection.recv(65536):
            said += part
    return said


@pytest.fixture(scope="module")
def short() -> Iterator[Server]:
    with serving(api_keys=["only"], connections=SHORT) as server:

        @server.app.get("/endless")
        async def endless() -> StreamingResponse:
            async def parts() -> Any:
                try:
                    while True:
                        yield b"x" * 65536
                        await asyncio.sleep(0)
                finally:
                    server.passed.append("ended")

            return StreamingResponse(parts())

        @server.app.post("/read")
        async def read(request: Request) -> int:
            return len(await request.body())

        yield server


def sent(server: Server, *parts: bytes) -> tuple[int, bytes]:
    """How many bytes a server took until it ended the connection, and what it said."""
    with connect(server) as connection:
        taken = 0
        with contextlib.suppress(OSError):
            for part in parts:
                connection.sendall(part)
                taken += len(part)
        return taken, answer(connection)


ENDLESS = [b"a" * 4096] * 4096  # 16 MB
CHUNKED = b"POST /read HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer only\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "begun",
    [
        [REQUEST + b"X-Endless: "],
        [REQUEST, b"X-Name"],
        [b"GET /"],
        [b"GET /health?"],
        [REQUEST + b"Connection: keep-alive\r\n\r\n" + REQUEST + b"X: "],  # of the second request
        [CHUNKED + b"1;extension="],
        [CHUNKED + b"1\r\nx\r\n0\r\nTrailer: "],
        [CHUNKED + (b"1\r\nx\r\n" * 64) + b"0\r\nTrailer: "],
    ],
    ids=["value", "name", "path", "query", "second", "extension", "trailer", "behind-small-chunks"],
)
def test_an_endless_header_is_not_taken(short: Server, begun: list[bytes]) -> None:
    taken, said = sent(short, *begun, *ENDLESS)
    assert taken < 16 << 20
    assert b" 431 " in said or said == b"" or b" 200 " in said.partition(b"\r\n")[0]
    assert status(short, "GET", "/health") == 200


def test_headers_are_counted(short: Server) -> None:
    assert b" 431 " in sent(short, REQUEST + b"A: b\r\n" * 30)[1]
    assert b" 431 " in sent(short, REQUEST + (b"A: " + b"b" * 2000 + b"\r\n") * 5)[1]
    assert b" 200 " not in sent(short, REQUEST, *[b"A: b\r\n"] * 100_000)[1]
    assert b" 200 " in sent(short, REQUEST + b"A: b\r\n" * 18 + b"Connection: close\r\n\r\n")[1]


def test_large_bodies_in_the_smallest_chunks_are_taken(short: Server) -> None:
    body = b"1\r\nx\r\n" * 50_000 + b"0\r\nConnection: close\r\n\r\n"
    closing = CHUNKED.replace(b"Host: x", b"Host: x\r\nConnection: close")
    assert sent(short, closing + body)[1].endswith(b"50000")
    length = closing.replace(b"Transfer-Encoding: chunked", b"Content-Length: 1000000")
    assert sent(short, length + b"x" * 1_000_000)[1].endswith(b"1000000")


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"\r\n",
        REQUEST,
        REQUEST + b"Connection: keep-alive\r\n\r\n\r\n",  # uvicorn waits for ever for the request behind an empty line
        b"POST /read HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer only\r\nContent-Length: 100\r\n\r\nhalf",
        CHUNKED + b"1\r\n",
    ],
)
def test_a_client_that_falls_silent_is_left(short: Server, begun: bytes) -> None:
    with connect(short) as connection:
        connection.sendall(begun)
        if b"keep-alive" in begun:
            assert connection.recv(65536)
            connection.sendall(b"\r\n")
        answer(connection)  # which ends


def test_headers_by_drops_are_late(short: Server) -> None:
    """Each byte begins no wait of its own."""
    with connect(short) as connection, pytest.raises(OSError):
        connection.sendall(REQUEST + b"X: ")
        for _ in range(600):
            connection.sendall(b"a")
            time.sleep(0.05)


def test_an_answer_that_nobody_reads_ends(short: Server) -> None:
    before = len(short.passed)
    with connect(short) as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer only\r\n\r\n")
        assert connection.recv(1)
        wait_for(lambda: len(short.passed) > before)


def test_an_answer_that_is_read_slowly_goes_on(short: Server) -> None:
    before = len(short.passed)
    with connect(short) as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer only\r\n\r\n")
        for _ in range(15):
            for _ in range(200):
                assert connection.recv(65536)
            time.sleep(0.1)
        assert len(short.passed) == before
    wait_for(lambda: len(short.passed) > before)


def test_a_socket_outlives_the_time_for_headers(short: Server) -> None:
    client = short.client("only")
    with RemoteWindow(client, "You watch a camera.", 400) as window, LiveStream(client, window.id) as live:
        for _ in range(3):
            live.push(np.zeros((8, 8, 3), dtype=np.uint8))
            time.sleep(2 * SHORT.header_s)
            live.settle()
        assert len(live.state.placed) == 3


def test_one_peer_does_not_hold_all_connections(short: Server) -> None:
    """As many as there are, and all of them silent: others are answered, and the silent ones are left."""
    with contextlib.ExitStack() as stack:
        for _ in range(120):
            stack.enter_context(contextlib.closing(connect(short)))
        wait_for(lambda: len(short.protocol.all.open) <= SHORT.connections)
    wait_for(lambda: status(short, "GET", "/health") == 200)


def test_another_peer_takes_the_place_of_a_silent_connection() -> None:
    with serving(connections=ConnectionLimits(connections=6)) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(contextlib.closing(connect(server))) for _ in range(6)]
        wait_for(lambda: len(server.protocol.all.open) == 6)
        host, port = server.url.removeprefix("http://").split(":")
        other = socket.create_connection((host, int(port)), timeout=30, source_address=("127.0.0.2", 0))
        with contextlib.closing(other):
            other.sendall(REQUEST + b"Connection: close\r\n\r\n")
            assert b" 200 " in answer(other)
        assert silent[0].recv(1) == b""  # the oldest


def test_requests_of_a_tenant_are_counted_while_their_bodies_come() -> None:
    with serving(Limits(threads=2, max_waiting=3), api_keys=["only"]) as server, contextlib.ExitStack() as stack:
        body = b"POST /v1/windows HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer only\r\nContent-Length: 100\r\n\r\n{"
        for _ in range(5):
            stack.enter_context(contextlib.closing(connect(server))).sendall(body)
        key = {"authorization": "Bearer only"}
        wait_for(lambda: call(server, "/v1/windows", {"system_prompt": "h"}, **key)[0] == 429)
        assert status(server, "GET", "/health") == 200
        stack.close()
        wait_for(lambda: call(server, "/v1/windows", {"system_prompt": "h"}, **key)[0] == 200)


def test_vllms_server_is_bounded_with_what_its_arguments_say_less() -> None:
    for given, wanted in (((4 << 20, 256), (64 << 10, 128)), ((1000, 10), (1000, 10)), ((None, None), (64 << 10, 128))):
        config = SimpleNamespace(h11_max_incomplete_event_size=given[0], h11_max_header_count=given[1])
        app: Any = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(config=config)))
        bound_connections(app)
        made = config.http_protocol_class.limits
        assert (made.header_bytes, made.headers) == wanted
