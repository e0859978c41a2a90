"""Bounds of one connection: bytes and time of its headers, idle time in a body, time that an answer stays unread.

They hold before authentication, since the key is one of the headers. uvicorn's own protocol on httptools has no such bounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_log = logging.getLogger("ctxwin.serve")
_FRAMING = 8
"""Bytes of chunk sizes for each byte of a chunked body that a client may send in the smallest chunks."""

_REFUSED_S = 0.5
"""Seconds until a refused connection is closed; closed at once, it would be reopened at once."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds of one server's connections.

    Attributes:
        header_bytes: of request line and headers together, and of what frames and follows a body.
        headers: of one request, trailers included.
        header_s: seconds from a connection's start, or from a request's first byte, to the end of its headers.
        body_s: seconds that a body may stand still.
        unread_s: seconds in which a client must read what was written to it (64 KiB at most) before more is.
        connections: at once; half of them for each peer while the other half is wanted.
    """

    header_bytes: int = 64 << 10
    headers: int = 128
    header_s: float = 20.0
    body_s: float = 60.0
    unread_s: float = 60.0
    connections: int = 4096


class _HeadersRefused(Exception):
    """Raised within the parser, to stop it."""


class _Connections:
    """The connections of one server, the oldest first."""

    def __init__(self) -> None:
        self.open: dict[BoundedProtocol, str] = {}
        self.by_peer: Counter[str] = Counter()

    def add(self, protocol: BoundedProtocol, peer: str, most: int) -> BoundedProtocol | None:
        """Count a connection; return the one to close where there are too many.

        That is the oldest idle one of the peer with the most connections, otherwise the new one.
        """
        self.open[protocol] = peer
        self.by_peer[peer] += 1
        if len(self.open) <= most:
            return None
        busiest, peer_connections = self.by_peer.most_common(1)[0]
        if peer == busiest and peer_connections > most // 2:
            return protocol
        return next((other for other, owner in self.open.items() if owner == busiest and other.waits), protocol)

    def remove(self, protocol: BoundedProtocol) -> None:
        if (peer := self.open.pop(protocol, None)) is not None:
            self.by_peer[peer] -= 1
            if not self.by_peer[peer]:
                del self.by_peer[peer]


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol within `limits`.

    A request with too many or too large headers gets 431 and is not parsed further. A connection whose request does not arrive
    in time, or whose answer is not read in time, is closed.
    """

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    all: ClassVar[_Connections] = _Connections()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_body = self._refused = False
        self._begun = self._overhead = self._count = self._taken = 0
        self._heard = self.loop.time()
        self._unread: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._await_header()
        displaced = self.all.add(self, self.client[0] if self.client else "", self.limits.connections)
        if displaced is not None:
            displaced.transport.abort()

    @property
    def waits(self) -> bool:
        """True while no request of this connection is in progress."""
        return not self._in_body and (self.cycle is None or self.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._leave()
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        self._taken = 0
        begun = self._begun
        super().data_received(data)
        if self.transport.get_protocol() is not self:  # a socket now, for which no header is awaited
            return
        if self._begun != begun and self._begun > 1:
            self._overhead = 0  # what of it is another request's is less than one read
        else:
            self._overhead = max(0, self._overhead + len(data) - self._taken)
        if self.transport.is_closing():
            return
        if self._overhead > self.limits.header_bytes:
            self._refuse()
        elif self.waits and not self._reads_header:  # bytes that start no request, for which uvicorn waits forever
            self._await_header()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun += 1
        self._overhead = self._count = 0
        if not self._reads_header:
            self._await_header()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count += 1
        if self._count > self.limits.headers:
            self._refused = True
            raise _HeadersRefused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._reads_header, self._in_body = False, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._taken += (1 + _FRAMING) * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._overhead = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._refused:
            self._refuse()
        else:
            super().send_400_response(msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.limits.unread_s, self._end, "did not read its answer")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._flush()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._flush()

    def _flush(self) -> None:
        """Abort a closing connection whose client does not read the rest; closing alone would wait for it."""
        if self.transport.is_closing() and self._unread is None:
            self._unread = self.loop.call_later(self.limits.unread_s, self._end, "did not read the end of its answer")

    def _refuse(self) -> None:
        limits = self.limits
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # in the middle of an answer there is nothing to say
            return
        message = f"headers must be at most {limits.headers} of {limits.header_bytes} bytes together; send fewer"
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(message), message.encode())
        )
        self.flow.pause_reading()
        self.loop.call_later(_REFUSED_S, self._close)

    def _close(self) -> None:
        self.transport.close()
        self._flush()

    def _await_header(self) -> None:
        self._reads_header, self._since = True, self.loop.time()
        self._arm(self.limits.header_s)

    def _arm(self, seconds: float) -> None:
        if self._watch is None:
            self._watch = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Close a connection whose headers or next body bytes are late; otherwise check again later."""
        self._watch = None
        now, limits = self.loop.time(), self.limits
        if self._reads_header:
            remaining, failure = self._since + limits.header_s - now, "did not send its headers"
        elif self._in_body and not self.flow.read_paused:
            remaining, failure = self._heard + limits.body_s - now, "did not send its body"
        elif self._in_body:
            remaining, failure = limits.body_s, ""  # it is the server that does not read yet
        else:
            return  # until the next request begins
        if remaining <= 0:
            self._end(failure)
        else:
            self._arm(remaining)

    def _end(self, failure: str) -> None:
        self._unread = None
        _log.debug("a connection from %s %s in time", self.client, failure)
        self.transport.abort()

    def _leave(self) -> None:
        self.all.remove(self)
        for timer in (self._watch, self._unread):
            if timer is not None:
                timer.cancel()
        self._watch = self._unread = None


def bounded_protocol(limits: ConnectionLimits | None = None) -> type[BoundedProtocol]:
    """Return the protocol class of one server, which counts its connections together."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits or ConnectionLimits(), "all": _Connections()})


def bound_connections(app: Starlette) -> None:
    """Bound the connections of the server in the state of vLLM's app. Call it before the server listens.

    Lower limits of headers among the server's own arguments take precedence.
    """
    server: Any = getattr(app.state, "server", None)
    if server is None:
        return  # requests come from elsewhere than a socket
    config, ours = server.config, ConnectionLimits()
    size = getattr(config, "h11_max_incomplete_event_size", None) or ours.header_bytes
    count = getattr(config, "h11_max_header_count", None) or ours.headers
    lower = ConnectionLimits(header_bytes=min(ours.header_bytes, size), headers=min(ours.headers, count))
    config.http_protocol_class = bounded_protocol(lower)
