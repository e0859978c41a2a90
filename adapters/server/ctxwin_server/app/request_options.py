"""Options of a plain request on its way through the server, and the report about its window in the answer.

The gateway reads the `RequestOptions` of every chat (`ctxwin_chats.options`) and puts them into its ASGI scope. vLLM's server
passes only headers to the engine, so a header of the request carries a key to its options (`PendingRequests`); this server's
client of the engine looks them up and records the usage. The answer gets a header (`HEADER`), and its ``usage`` an entry
``ctxwin``.
"""

import asyncio
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from ctxwin_chats.compaction import Compaction, encode_event
from ctxwin_chats.options import HEADER, ChatOptions
from ctxwin_chats.prediction import Prediction
from ctxwin_chats.prefill import Ahead
from ctxwin_server.app.accounts import decode_json, encode_body

REQUEST_OPTIONS = "ctxwin.request_options"
"""Key of a request's `RequestOptions` in its ASGI scope; absent if it may not use a window."""
_CARRIER, _MEMBER = "tracestate", "ctxwin="
_FRAME = re.compile(rb".*?\n\n|.+", re.DOTALL)
"""An event of a stream, with its trailing empty line if it has one."""


@dataclass
class RequestOptions(ChatOptions):
    """Options of one plain request, and its results.

    Attributes:
        tenant: the tenant that sent it.
        usage: reported in its answers, once known.
        reports: further entries of its answers, by name.
        compaction: the summary that replaced earlier turns.
        ahead: what it computes itself, where it is such a prompt; next_prompt: the one to compute once it is answered.
        prefilled: tokens of its own prompt that were computed ahead.
        rewrites: how the prompt may differ from what was sent, by kind (``kept``, ``late``), as ``usage`` says it.
        resend: receives the request as it came; None unless the prompt differs.
        refused: it was refused with that prompt, which is not answered: it is served again as it came.
        answered: set once its answer is sent.
        counted: it stands in the metrics as served without its window.
    """

    tenant: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    reports: dict[str, Any] = field(default_factory=dict)
    compaction: Compaction | None = None
    ahead: Ahead | None = None
    next_prompt: Prediction | None = None
    prefilled: int = 0
    rewrites: dict[str, dict[str, Any]] = field(default_factory=dict)
    resend: Receive | None = None
    refused: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    counted: bool = False

    def refuse(self, status: int) -> bool:
        """Return whether an answer with this status may be due to how its prompt differs, and mark it as refused then."""
        self.refused = self.resend is not None and status in (400, 413, 422)
        return self.refused


class PendingRequests:
    """Requests that are being answered with windows, by the key that each carries through vLLM's server.

    The key is in the header ``tracestate``, which exists for additions of vendors: servers pass it to the engine on every
    route, and it changes neither body nor id. Only clients' requests carry a key.
    """

    def __init__(self) -> None:
        self._asked: dict[str, RequestOptions] = {}

    def __len__(self) -> int:
        return len(self._asked)

    @contextmanager
    def carry(self, options: RequestOptions, scope: Scope) -> Iterator[None]:
        """Register a request's options within the block, and add their key to the headers of ``scope``."""
        key = secrets.token_hex(16)
        headers = Headers(scope=scope)
        _, rest = _split_tracestate(",".join(headers.getlist(_CARRIER)))
        headers_left = [(name, value) for name, value in headers.raw if name.lower() != _CARRIER.encode()]
        state = f"{_MEMBER}{key},{rest}".rstrip(",")
        scope["headers"] = [*headers_left, (_CARRIER.encode(), state.encode("latin-1"))]
        self._asked[key] = options
        try:
            yield
        finally:
            del self._asked[key]
            options.answered.set()

    def read(self, headers: Mapping[str, str] | None) -> tuple[RequestOptions | None, dict[str, str] | None]:
        """Return the options of a request with these tracing headers, and the headers without the key; None where absent."""
        key, rest = _split_tracestate((headers or {}).get(_CARRIER, ""))
        others = {name: value for name, value in {**(headers or {}), _CARRIER: rest}.items() if value}
        return self._asked.get(key), others or None


def _split_tracestate(state: str) -> tuple[str, str]:
    members = [member.strip() for member in state.split(",")]
    keys = [member.removeprefix(_MEMBER) for member in members if member.startswith(_MEMBER)]
    return keys[0] if keys else "", ",".join(m for m in members if m and not m.startswith(_MEMBER))


class ReportingSend:
    """ASGI ``send`` that adds the report of `RequestOptions` to an answer: a header, and entries of its JSON or events."""

    def __init__(self, send: Send, options: RequestOptions) -> None:
        self._send = send
        self._asked = options
        self._start: Message | None = None  # of a JSON body, which is sent once complete
        self._events = False
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if self._asked.refused:
            return
        if message["type"] == "http.response.start":
            if self._asked.refuse(message["status"]):
                return
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            off = self._asked.off
            headers[HEADER] = f"off; {off}" if off else "auto"
            kind = headers.get("content-type", "")
            self._events = "event-stream" in kind
            if "json" in kind:
                self._start = message
                return
        elif message["type"] == "http.response.body" and (self._events or self._start is not None):
            has_more = message.get("more_body", False)
            self._body += message.get("body", b"")
            if self._start is not None:
                if has_more:
                    return
                self._body = self._with_reports(self._body)
                MutableHeaders(raw=self._start["headers"])["content-length"] = str(len(self._body))
                await self._send(self._start)
                ready, self._body, self._start = self._body, b"", None
            else:
                complete, end, rest = self._body.rpartition(b"\n\n") if has_more else (self._body, b"", b"")
                self._body = rest
                ready = b"".join(map(self._events_of, _FRAME.findall(complete + end)))
            message = {**message, "body": ready}
        await self._send(message)

    def _events_of(self, frame: bytes) -> bytes:
        """Return one event of a stream as the client gets it, with the events of a compaction block."""
        compaction = self._asked.compaction
        at = frame.find(b"data: {")
        if at < 0 or not (compaction or b'"usage"' in frame):
            return frame
        end = frame.find(b"\n", at)
        end = len(frame) if end < 0 else end
        if compaction is None:
            return frame[:at] + b"data: " + self._with_reports(frame[at + 6 : end]) + frame[end:]
        try:
            event = decode_json(frame[at + 6 : end])
        except ValueError:
            return frame
        return b"".join(encode_event(self._add_report(one)) for one in compaction.events(event))

    def _with_reports(self, body: bytes) -> bytes:
        options = self._asked
        if not (options.usage or options.reports or options.compaction or options.rewrites or options.prefilled):
            return body
        try:
            data = decode_json(body)
        except ValueError:
            return body
        if not isinstance(data, dict):
            return body
        if options.compaction is not None and not self._events:
            options.compaction.add_to(data)
        return encode_body(self._add_report(data))

    def _add_report(self, data: dict[str, Any]) -> dict[str, Any]:
        usage = {**self._asked.usage, **self._asked.rewrites}
        if self._asked.prefilled:
            usage["prefilled_tokens"] = self._asked.prefilled
        for holder in (data, data.get("response"), data.get("message")):
            if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
                if usage:
                    holder["usage"]["ctxwin"] = usage
                holder.update(self._asked.reports)
                break
        return data
