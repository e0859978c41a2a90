"""What a plain request says of the window behind it, and what is said of that window in its answer.

The gateway makes an `Asked` of every request to one of `ROUTES`; the engine's side finds it in `ASKED` and fills it; the answer
gets a header (`HEADER`), and its ``usage`` an entry ``ctxwin``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Send

from ctxwin.fidelity import Fidelity
from ctxwin.serve.compaction import Compacted, line_of
from ctxwin.serve.specs import checked

ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
HEADER = "x-ctxwin-windows"
"""Of a request: ``auto`` or ``off``. Of an answer: ``auto``, or ``off`` and why."""
SESSION = "x-session-id"
_NAMES = ("prompt_cache_key", "conversation", "user")
_MOST_NAME = 512


@dataclass
class Asked:
    """One plain request.

    Attributes:
        tenant: whose it is.
        name: what its client calls the conversation; "" for nothing.
        fidelity: how its window is served; None is the server's default.
        off: why it passes untouched; "" where a window stands behind it.
        usage: what its answers report, once it is known.
        reports: further entries of its answers, by name.
        compacted: the summary that took the place of what stood in front.
    """

    tenant: str
    name: str = ""
    fidelity: Fidelity | None = None
    off: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    reports: dict[str, Any] = field(default_factory=dict)
    compacted: Compacted | None = None


ASKED: ContextVar[Asked | None] = ContextVar("ctxwin_asked", default=None)
"""The request that is being answered; None where no window may stand behind it."""


def mode_of(headers: Headers, data: Any, default: str) -> str:
    """``auto`` or ``off``: whether a window may stand behind a request. ValueError for anything else."""
    given = data.get("ctxwin") if isinstance(data, dict) else None
    mode = (given.get("windows") if isinstance(given, dict) else None) or headers.get(HEADER) or default
    if mode not in ("auto", "off"):
        raise ValueError(f"windows must be auto or off, got {str(mode)[:60]!r}")
    return str(mode)


def asked_of(path: str, headers: Headers, data: Any, tenant: str, default: str) -> Asked | None:
    """What a request says; None where it is no request for a window.

    Takes our own fields (``ctxwin``) out of ``data``. Raises ValueError for a mode or a fidelity that there is not.
    """
    if path not in ROUTES or not isinstance(data, dict):
        return None
    mode, given = mode_of(headers, data, default), data.pop("ctxwin", None)
    given = {} if given is None else given
    if not isinstance(given, dict) or given.keys() - {"windows", "fidelity"}:
        raise ValueError("ctxwin must be an object with windows (auto or off) and fidelity; leave out what else it has")
    fidelity = given.get("fidelity")
    made = Asked(tenant, fidelity=None if fidelity is None else checked(Fidelity.model_validate, fidelity))
    if mode == "off":
        return None
    made.name = conversation_name(headers, data)
    if _names_media(data):
        made.off = "media are named by the client"
    return made


def conversation_name(headers: Headers, data: Mapping[str, Any]) -> str:
    """The conversation's name: the kind of name is part of it, so that a user is no session."""
    conversation = data.get("conversation")
    said = {**data, "conversation": conversation.get("id") if isinstance(conversation, dict) else conversation}
    names = [("session", headers.get(SESSION)), *((name, said.get(name)) for name in _NAMES)]
    for kind, name in names:
        if isinstance(name, str) and name:
            return f"{kind}:{name[:_MOST_NAME]}"
    return ""


def _names_media(data: Any) -> bool:
    """Whether a part of a request names its medium: under one name there may be other content each time."""
    waiting = [data.get("messages"), data.get("input")] if isinstance(data, dict) else []
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            if value.get("uuid") is not None:
                return True
            waiting += [value.get("content"), value.get("output")]
    return False


class Reported:
    """An ASGI ``send`` that adds to an answer what `Asked` has to say: a header, and entries of its JSON or its events."""

    def __init__(self, send: Send, asked: Asked) -> None:
        self._send = send
        self._asked = asked
        self._start: Message | None = None  # of a JSON body, which is sent when it is whole
        self._events = False
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            off = self._asked.off
            headers[HEADER] = f"off; {off}" if off else "auto"
            kind = headers.get("content-type", "")
            self._events = "event-stream" in kind
            if "json" in kind:
                self._start = message
                return
        elif message["type"] == "http.response.body" and (self._events or self._start is not None):
            more = message.get("more_body", False)
            self._body += message.get("body", b"")
            if self._start is not None:
                if more:
                    return
                self._body = self._with_reports(self._body)
                MutableHeaders(raw=self._start["headers"])["content-length"] = str(len(self._body))
                await self._send(self._start)
                ready, self._body, self._start = self._body, b"", None
            else:
                cut = (
                    self._body.rfind(b"\n\n") + 2 if more and b"\n\n" in self._body else 0 if more else len(self._body)
                )
                whole, self._body = self._body[:cut], self._body[cut:]
                ready = b"".join(self._events_of(frame) for frame in _frames(whole))
            message = {**message, "body": ready}
        await self._send(message)

    def _events_of(self, frame: bytes) -> bytes:
        """One event of a stream as the client gets it, with those of a compaction block around it."""
        compacted = self._asked.compacted
        at = frame.find(b"data: {")
        if at < 0 or not (compacted or b'"usage"' in frame):
            return frame
        end = frame.find(b"\n", at)
        end = len(frame) if end < 0 else end
        if compacted is None:
            return frame[:at] + b"data: " + self._with_reports(frame[at + 6 : end]) + frame[end:]
        try:
            event = json.loads(frame[at + 6 : end])
        except ValueError:
            return frame
        return b"".join(line_of(self._reported(one)) for one in compacted.events(event))

    def _with_reports(self, body: bytes) -> bytes:
        asked = self._asked
        if not asked.usage and not asked.reports and asked.compacted is None:
            return body
        try:
            data = json.loads(body)
        except ValueError:
            return body
        if not isinstance(data, dict):
            return body
        if asked.compacted is not None and not self._events:
            asked.compacted.told(data)
        return json.dumps(self._reported(data), ensure_ascii=False, separators=(",", ":")).encode()

    def _reported(self, data: dict[str, Any]) -> dict[str, Any]:
        for holder in (data, data.get("response"), data.get("message")):
            if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
                if self._asked.usage:
                    holder["usage"]["ctxwin"] = self._asked.usage
                holder.update(self._asked.reports)
                break
        return data


def _frames(events: bytes) -> list[bytes]:
    """The events of a stream, each with the empty line behind it."""
    parts = events.split(b"\n\n")
    return [part + b"\n\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
