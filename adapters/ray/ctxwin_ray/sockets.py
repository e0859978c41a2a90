"""WebSockets in a fleet: a replica listens on its node, and the front connects to it for each client.

Ray's calls carry answers one way, so the messages of a socket take a connection of their own. A replica serves WebSockets alone
there, and only those that know its secret, which it tells by a call.

Between front and replica neither takes what the other side does not. Ray's proxy, through which clients reach the front, queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

RECONNECT = 1012
"""Close code of a socket whose replica has ended ("service restart"): connect again, and another replica takes over."""
_SECRET, _CLIENT = b"x-ctxwin-fleet", b"x-ctxwin-fleet-client"
"""Headers with the replica's secret, and with the client's address."""
_OPEN_S, _CLOSE_S = 60.0, 5.0
_HANDSHAKE = tuple(f"sec-websocket-{name}".encode() for name in ("key", "version", "extensions", "protocol"))


@dataclass(frozen=True)
class Address:
    """Where a replica listens, and the ``secret`` that it asks for."""

    host: str
    port: int
    secret: str = field(repr=False)


class _Server(uvicorn.Server):
    """A server in another one's process, whose signals are not its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def listening(app: Any, host: str, most_bytes: int) -> AsyncIterator[Address]:
    """Serve the WebSockets of ``app`` on a free port of ``host`` within the block; they are closed with `RECONNECT` at its end.

    Args:
        most_bytes: of a message.
    """
    secret = secrets.token_urlsafe(32)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        """Pass WebSockets of the fleet on, as the client's, to the server's app."""
        if scope["type"] != "websocket":
            await Response(status_code=404)(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not secrets.compare_digest(headers.get(_SECRET, b""), secret.encode()):
            await send({"type": "websocket.close", "code": 1008})
            return
        others = [(name, value) for name, value in scope["headers"] if name not in (_SECRET, _CLIENT)]
        host, _, port = headers.get(_CLIENT, b"").decode("latin-1").rpartition(" ")
        client = (host, int(port)) if host else None
        await app({**scope, "headers": others, "client": client, "app": app, "state": {}}, receive, send)

    sock = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    config = uvicorn.Config(
        guarded, ws="websockets-sansio", ws_max_size=most_bytes, lifespan="off", log_config=None, access_log=False,
        timeout_graceful_shutdown=int(_CLOSE_S),
    )  # fmt: skip
    server = _Server(config)
    task = asyncio.create_task(server.serve([sock]))
    try:
        yield Address(host, sock.getsockname()[1], secret)
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
        sock.close()


async def relay(client: WebSocket, address: Address, headers: Sequence[tuple[bytes, bytes]], most_bytes: int) -> None:
    """Connect a client's socket to its replica, and pass messages on both ways until one of the two closes.

    A message is read from one side once the other has taken the one before. Close codes are passed on; where the replica ends
    without one, the client gets `RECONNECT`. A replica's refusal is the client's answer.

    Raises OSError, TimeoutError: the replica cannot be reached.
    """
    query = client.scope["query_string"].decode("latin-1")
    host = f"[{address.host}]" if ":" in address.host else address.host
    path = client.scope.get("raw_path", client.scope["path"].encode()).decode("latin-1")
    url = f"ws://{host}:{address.port}{path}" + (f"?{query}" if query else "")
    ours = [(_SECRET, address.secret.encode())]
    if client.client is not None:
        ours.append((_CLIENT, f"{client.client.host} {client.client.port}".encode()))
    theirs = [header for header in headers if header[0].lower() not in (*_HANDSHAKE, _SECRET, _CLIENT)]
    sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in (*theirs, *ours)]
    try:
        replica = await connect(
            url, additional_headers=sent, max_size=most_bytes, compression=None,
            open_timeout=_OPEN_S, close_timeout=_CLOSE_S, ping_interval=None, proxy=None, max_queue=1, user_agent_header=None,
        )  # fmt: skip
    except InvalidStatus as error:
        refused = error.response
        await client.send_denial_response(
            Response(bytes(refused.body or b""), refused.status_code, media_type=refused.headers.get("content-type"))
        )
        return
    async with replica:
        await client.accept()
        ways = asyncio.create_task(_pass_up(client, replica)), asyncio.create_task(_pass_down(replica, client))
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)


async def _pass_up(client: WebSocket, replica: ClientConnection) -> None:
    """Pass on what the client sends until it leaves."""
    with contextlib.suppress(ConnectionClosed):
        while (message := await client.receive())["type"] == "websocket.receive":
            data = message.get("bytes")
            await replica.send(message["text"] if data is None else data)
        code = message.get("code") or 1000
        await replica.close(code if _is_sendable(code) else 1001, message.get("reason") or "")


async def _pass_down(replica: ClientConnection, client: WebSocket) -> None:
    """Pass on what the replica sends, and how it closes."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the client has left
        try:
            while True:
                data = await replica.recv()
                await (client.send_text(data) if isinstance(data, str) else client.send_bytes(data))
        except ConnectionClosed as closed:
            code, reason = (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (RECONNECT, "")
            if not closed.rcvd:
                reason = "the replica of this window has ended; connect again"
            await client.close(code if _is_sendable(code) else 1000, reason)


def _is_sendable(code: int) -> bool:
    """Return whether a close frame may hold a code: others say that there was none."""
    return 1000 <= code < 5000 and code not in (1004, 1005, 1006, 1015)
