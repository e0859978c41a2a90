"""Window options of a plain request, and the report about its window in the answer.

The gateway reads the `RequestOptions` of every request to one of `ROUTES` and puts them into its ASGI scope. vLLM's server passes
only headers to the engine, so a header of the request carries a key to its options (`PendingRequests`); this server's client of
the engine looks them up and records the usage. The answer gets a header (`HEADER`), and its ``usage`` an entry ``ctxwin``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from ctxwin.fidelity import Fidelity
from ctxwin.validation import validate
from ctxwin_server.compaction import Compaction, encode_event
from ctxwin_server.prediction import Prediction
from ctxwin_server.prefill import Ahead
from ctxwin_server.prompt_options import AS_SENT, PromptOptions

ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
REQUEST_OPTIONS = "ctxwin.request_options"
"""Key of a request's `RequestOptions` in its ASGI scope; absent if it may not use a window."""
HEADER = "x-ctxwin-windows"
"""Of a request: ``auto`` or ``off``. Of an answer: ``auto``, or ``off`` and the reason."""
SESSION = "x-session-id"
_NAMES = ("prompt_cache_key", "conversation", "user")
_MOST_NAME = 512
_CARRIER, _MEMBER = "tracestate", "ctxwin="
_PROMPT = tuple(PromptOptions.__dataclass_fields__)
"""Fields of a request's ``ctxwin``, and as ``x-ctxwin-lazy-drops`` its headers."""
_FIELDS = ("windows", "fidelity", *_PROMPT)
EDIT_FIELDS = ("context_management", "compaction")
"""Fields of a request that have its history edited."""


@dataclass
class RequestOptions:
    """Window options of one plain request, and its results.

    Attributes:
        tenant: the tenant that sent it.
        name: the client's name of the conversation; "" for none.
        fidelity: of its window; None is the server's default.
        off: why it is served without a window; "" if it has one.
        usage: reported in its answers, once known.
        reports: further entries of its answers, by name.
        compaction: the summary that replaced earlier turns.
        prompt: how its prompt may differ from it, and if the next one is computed ahead.
        ahead: what it computes itself, where it is such a prompt; next_prompt: the one to compute once it is answered.
        prefilled: tokens of its own prompt that were computed ahead.
        rewrites: how the prompt may differ from what was sent, by kind (``kept``, ``late``), as ``usage`` says it.
        resend: receives the request as it came; None unless the prompt differs.
        refused: it was refused with that prompt, which is not answered: it is served again as it came.
    """

    tenant: str
    name: str = ""
    fidelity: Fidelity | None = None
    off: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    reports: dict[str, Any] = field(default_factory=dict)
    compaction: Compaction | None = None
    prompt: PromptOptions = AS_SENT
    ahead: Ahead | None = None
    next_prompt: Prediction | None = None
    prefilled: int = 0
    rewrites: dict[str, dict[str, Any]] = field(default_factory=dict)
    resend: Receive | None = None
    refused: bool = False

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

    def read(self, headers: Mapping[str, str] | None) -> tuple[RequestOptions | None, dict[str, str] | None]:
        """Return the options of a request with these tracing headers, and the headers without the key; None where absent."""
        key, rest = _split_tracestate((headers or {}).get(_CARRIER, ""))
        others = {name: value for name, value in {**(headers or {}), _CARRIER: rest}.items() if value}
        return self._asked.get(key), others or None


def _split_tracestate(state: str) -> tuple[str, str]:
    """Split a ``tracestate`` into our key and the rest."""
    members = [member.strip() for member in state.split(",")]
    keys = [member.removeprefix(_MEMBER) for member in members if member.startswith(_MEMBER)]
    return keys[0] if keys else "", ",".join(m for m in members if m and not m.startswith(_MEMBER))


def window_mode(headers: Headers, data: Any, default: str) -> str:
    """Return ``auto`` or ``off``: whether a request may use a window. Raises ValueError for anything else."""
    extension = data.get("ctxwin") if isinstance(data, dict) else None
    mode = (extension.get("windows") if isinstance(extension, dict) else None) or headers.get(HEADER) or default
    if mode not in ("auto", "off"):
        raise ValueError(f"windows must be auto or off, got {str(mode)[:60]!r}")
    return str(mode)


def read_options(
    path: str, headers: Headers, data: Any, tenant: str, default: str, prompt: PromptOptions = AS_SENT
) -> RequestOptions | None:
    """Read the options of a request; None if it uses neither a window nor anything else of ours.

    Removes our own field (``ctxwin``) from ``data``. Raises ValueError for an unknown mode or fidelity.

    Args:
        default, prompt: of requests that say nothing.
    """
    if path not in ROUTES or not isinstance(data, dict):
        return None
    mode, extension = window_mode(headers, data, default), data.pop("ctxwin", None)
    extension = {} if extension is None else extension
    if not isinstance(extension, dict) or extension.keys() - _FIELDS:
        raise ValueError(f"ctxwin must be an object with {', '.join(_FIELDS)}; leave out what else it has")
    fidelity = extension.get("fidelity")
    options = RequestOptions(tenant, fidelity=None if fidelity is None else validate(Fidelity.model_validate, fidelity))
    if options.fidelity is not None and options.fidelity.audit:
        raise ValueError(
            f"audit must be 0 behind a chat, whose answers are not audited, got {options.fidelity.audit}; omit it, or ask a "
            "window (POST /v1/windows)"
        )
    said = {name: extension.get(name) or headers.get(f"x-ctxwin-{name.replace('_', '-')}") for name in _PROMPT}
    options.prompt = prompt.replace({name: str(value) for name, value in said.items() if value is not None})
    own = bool(options.prompt) or said["lazy_drops"] is not None
    own = own or any(data.get(name) is not None for name in EDIT_FIELDS)
    if mode == "off" and not own:
        return None
    if mode == "off":
        options.off = "windows are off"  # edits of the request are applied without windows, too
    options.name = conversation_name(headers, data)
    if options.off:
        return options
    if _has_named_media(data):
        options.off = "media are named by the client"
    elif data.get("use_beam_search"):
        options.off = "beam search asks the engine anew for every token"
    elif data.get("background"):
        options.off = "the answer outlives its request"
    return options


def conversation_name(headers: Headers, data: Mapping[str, Any]) -> str:
    """Return the conversation's name, prefixed with its kind, so that a user never equals a session."""
    conversation = data.get("conversation")
    fields = {**data, "conversation": conversation.get("id") if isinstance(conversation, dict) else conversation}
    names = [("session", headers.get(SESSION)), *((name, fields.get(name)) for name in _NAMES)]
    for kind, name in names:
        if isinstance(name, str) and name:
            return f"{kind}:{name[:_MOST_NAME]}"
    return ""


def _has_named_media(data: Any) -> bool:
    """Return whether a request names media by ``uuid``: the content under a name may change."""
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
                ready = b"".join(self._events_of(frame) for frame in _frames(complete + end))
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
            event = json.loads(frame[at + 6 : end])
        except ValueError:
            return frame
        return b"".join(encode_event(self._add_report(one)) for one in compaction.events(event))

    def _with_reports(self, body: bytes) -> bytes:
        options = self._asked
        if not (options.usage or options.reports or options.compaction or options.rewrites or options.prefilled):
            return body
        try:
            data = json.loads(body)
        except ValueError:
            return body
        if not isinstance(data, dict):
            return body
        if options.compaction is not None and not self._events:
            options.compaction.add_to(data)
        return json.dumps(self._add_report(data), ensure_ascii=False, separators=(",", ":")).encode()

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


def _frames(events: bytes) -> list[bytes]:
    """Split a stream into events, each with its trailing empty line."""
    parts = events.split(b"\n\n")
    return [part + b"\n\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
