"""`ctxwin view --serve`: the page of a run that is going on; new lines of its trace arrive as server-sent events."""

import sys
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore, Event
from urllib.parse import parse_qs, urlsplit

from ctxwin.view.page import LIMIT, page
from ctxwin.view.trace import read_trace

POLL_S = 0.25
"""Seconds between two polls of the file."""
_KEEPALIVE_S = 10.0
_CHUNK = 8 << 20  # bytes read at once; a line is far shorter
_MAX_FOLLOWERS = 32  # pages that are followed at once
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ViewServer(ThreadingHTTPServer):
    """Serves one trace, read-only: ``/`` is the page, ``/events`` the lines written after it. Nothing else is served.

    Args:
        trace: path of the trace; it must exist.
        host: address to listen on.
        port: 0 takes a free one; see `url`.
        limit: most operations shown.

    Raises:
        ValueError: ``trace`` is no trace, or the port is out of range.
        OSError: the trace cannot be read, or the address cannot be listened on; the message names it.
    """

    daemon_threads = True

    def __init__(self, trace: str | Path, host: str = "127.0.0.1", port: int = 8765, *, limit: int = LIMIT) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"port must be between 0 and 65535 (0 takes a free one), got {port}")
        read_trace(trace)
        self.trace, self.limit = Path(trace), limit
        self.stopping = Event()
        self.followers = BoundedSemaphore(_MAX_FOLLOWERS)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            remedy = "take another --port, or --port 0 for a free one"
            raise OSError(f"cannot serve at {host}:{port}: {error.strerror}; {remedy}") from error

    @property
    def url(self) -> str:
        """URL of the page."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/"

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach it."""
        return self.server_address[0] in _LOOPBACK

    def handle_error(self, request: object, client_address: object) -> None:
        """Print errors as usual, except for a browser that has disconnected."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def server_close(self) -> None:
        """End the event streams, and stop listening."""
        self.stopping.set()
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        if not self._local():
            self._send(HTTPStatus.MISDIRECTED_REQUEST, "this page is served to this machine only\n")
            return
        path = urlsplit(self.path).path
        if path == "/":
            self._page()
        elif path == "/events":
            self._events()
        else:
            self._send(HTTPStatus.NOT_FOUND, "only / is served here\n")

    do_HEAD = do_GET  # noqa: N815 - the name http.server looks for

    def _local(self) -> bool:
        """Return True if the request names a loopback host, or the server is not on one (against DNS rebinding)."""
        if not self.server.loopback:
            return True
        return urlsplit(f"//{self.headers.get('Host', '')}").hostname in _LOOPBACK

    def _page(self) -> None:
        try:
            recording = read_trace(self.server.trace)
        except (OSError, ValueError) as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n")
            return
        html = page(recording, self.server.trace.name, limit=self.server.limit, live=f"/events?from={recording.size}")
        self._send(HTTPStatus.OK, html, "text/html; charset=utf-8")

    def _events(self) -> None:
        offset = parse_qs(urlsplit(self.path).query).get("from", [""])[0]
        begin = self.headers.get("Last-Event-ID") or offset  # the header is sent by a browser that reconnects
        if not begin.isascii() or not begin.isdigit():
            self._send(HTTPStatus.BAD_REQUEST, f"from must be an offset in bytes, got {begin!r}\n")
            return
        if not self.server.trace.is_file():
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "the trace is gone\n")
            return
        if not self.server.followers.acquire(blocking=False):
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{_MAX_FOLLOWERS} pages are followed already; close one\n")
            return
        try:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            if self.command != "HEAD":
                for text in messages(self.server.trace, int(begin), self.server.stopping):
                    self.wfile.write(text)
                    self.wfile.flush()
        except OSError:
            self.close_connection = True  # the page was closed
        finally:
            self.server.followers.release()

    def _send(self, status: HTTPStatus, body: str, kind: str = "text/plain; charset=utf-8") -> None:
        raw = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """Keep requests off the terminal."""


def messages(trace: Path, offset: int, stopping: Event) -> Iterator[bytes]:
    """Yield server-sent events for the lines after ``offset``: a ``line`` event each, and ``reset`` if the file was replaced.

    Ends when ``stopping`` is set.
    """
    header = _header(trace)
    quiet = time.monotonic()
    yield b": follows the trace\n\n"
    while not stopping.is_set():
        try:
            size = trace.stat().st_size
            if size < offset or _header(trace) != header:
                yield b"event: reset\ndata: the trace was replaced\n\n"
                return
            fresh = b""
            if size > offset:
                with trace.open("rb") as file:
                    file.seek(offset)
                    fresh = file.read(_CHUNK)
        except FileNotFoundError:
            fresh = b""
        for line in fresh[: fresh.rfind(b"\n") + 1].splitlines(keepends=True):
            offset += len(line)
            yield b"event: line\nid: %d\ndata: %s\n\n" % (offset, line.strip())
            quiet = time.monotonic()
        if time.monotonic() - quiet > _KEEPALIVE_S:
            quiet = time.monotonic()
            yield b": still here\n\n"
        if len(fresh) < _CHUNK:
            stopping.wait(POLL_S)


def _header(trace: Path) -> bytes:
    with trace.open("rb") as file:
        return file.readline(4096)
