"""What stands in front of the OpenAI server's own routes: who asks, chats that name chunks, salts of tenants.

A plain ASGI middleware. Without tenants every request passes as it came, except a chat that names chunks, which takes our
route, and one for more log-probabilities than the server gives, which is refused. With tenants a plain request is bound to
its tenant's prefix-cache space, and what cannot be bound is refused.
"""

from __future__ import annotations

import base64
import hmac
import json
import logging
import math
import secrets
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ctxwin.hashing import digest
from ctxwin.serve.chat import names_chunks
from ctxwin.serve.errors import NotAllowed, TooLarge, to_body
from ctxwin.serve.service import Service
from ctxwin.serve.specs import REFERENCE

STATE = "ctxwin_service"
"""Where the service stands in the app's state."""
TENANT = "ctxwin.tenant"
"""Where the tenant's name stands in an ASGI scope."""
CHAT, OUR_CHAT = "/v1/chat/completions", "/v1/ctxwin/chat/completions"
OURS = ("/v1/chunks", "/v1/windows", OUR_CHAT)
SALTED = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages")
"""Routes whose bodies take a ``cache_salt``: what a named tenant may post to, beside ours and `_HARMLESS`."""
_HARMLESS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
_READ = (*SALTED, *_HARMLESS)
"""Routes whose bodies may name media."""
_OPEN = ("/health", "/ping", "/version", "/metrics", "/docs", "/openapi.json", "/redoc", "/load")
_TRANSFER = ("kv_transfer_params", "ec_transfer_params")
_SCORES = ("logprobs", "top_logprobs", "prompt_logprobs")
_MEDIA = (
    "image_url", "input_image", "image_embeds", "audio_url", "input_audio", "audio_embeds", "video_url", "video_embeds",
)  # fmt: skip
"""Types of content parts, each the key of its medium, too, but for OpenAI's ``input_image``."""
_SECRET = secrets.token_bytes(32)
"""Of this process: a mark that could be told from a tenant's name could be put into a file for vLLM to fetch."""
_log = logging.getLogger("ctxwin.serve")


class Gate:
    """The middleware. The service is looked up in the app's state (`ctxwin.serve.app.install` puts it there): a server
    that makes its middleware from a name, as vLLM's ``--middleware`` does, has no service yet."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            await self._app(scope, receive, send)
            return
        service: Service = getattr(scope["app"].state, STATE)
        keys = service.keys
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        tenant = keys.tenant(Headers(scope=scope).get("authorization"))
        ours = path.startswith(OURS)
        if tenant is None and (ours or (keys.tenants and not _is_open(scope, path))):
            await _refuse(scope, receive, send, 401, _UNAUTHORIZED)
            return
        scope[TENANT] = tenant
        try:
            if path == "/metrics":
                await service.run_briefly("", service.refresh_metrics)
            if tenant and scope["type"] == "websocket":
                raise NotAllowed(_UNSALTED.format(path))
            if tenant and not ours:
                _check_allowed(scope["method"], path)
            if tenant is not None and scope.get("method") == "POST" and path in _READ:
                receive = await _looked_at(service, scope, receive, path, tenant)
        except (NotAllowed, TooLarge, ValueError) as error:
            await _refuse(scope, receive, send, *to_body(error))
            return
        except RecursionError:
            await _refuse(
                scope, receive, send, *to_body(ValueError("the body must be JSON, got too many levels of it"))
            )
            return
        await self._app(scope, receive, send)


def _bound(service: Service, path: str) -> bool:
    return service.keys.tenants and path in _READ


async def _looked_at(service: Service, scope: Scope, receive: Receive, path: str, tenant: str) -> Receive:
    """A ``receive`` that gives the body again, bound to the tenant; the scope leads to our route where it must."""
    limit, bound = service.limits.max_upload_bytes, _bound(service, path)
    messages, body, whole = await _read(receive, limit)
    if not whole:
        if bound:
            raise TooLarge(f"a body must have at most {limit} bytes, got more; raise --max-upload-bytes")
        return _again(messages, receive)
    named = path == CHAT and REFERENCE.encode() in body
    if not (named or bound or b"logprob" in body):
        return _again(messages, receive)
    data = await service.run_briefly(tenant, _parsed, body)  # it may hold megabytes of pictures
    if not isinstance(data, dict):
        return _again(messages, receive)
    if named and names_chunks(data):
        scope["path"] = scope.get("root_path", "") + OUR_CHAT
        scope["raw_path"] = scope["path"].encode()
        return _again(messages, receive)
    _check_scores(data, service.limits.max_logprobs)
    if bound:
        salt = plain_salt(service.space(tenant).engine) if path in SALTED else None
        made = await service.run_briefly(tenant, _bound_body, data, tenant, salt)
        _resize(scope, len(made))
        messages = [{"type": "http.request", "body": made, "more_body": False}]
    return _again(messages, receive)


def _check_scores(data: dict[str, Any], most: int) -> None:
    """Raises ValueError for more log-probabilities than the server gives, -1 for all: vLLM itself has to refuse none, since
    windows need the whole vocabulary."""
    if most < 0:
        return
    for name in _SCORES:
        wanted = _number(data.get(name))
        if wanted is not None and not 0 <= wanted <= most:
            raise ValueError(f"{name} must be in 0..{most}, got {wanted:g}; raise --max-logprobs")
    ids = data.get("logprob_token_ids")
    if isinstance(ids, list) and len(ids) > most:
        raise ValueError(f"logprob_token_ids must be at most {most} tokens, got {len(ids)}; raise --max-logprobs")


def _number(value: Any) -> float | None:
    """What vLLM takes for a number, text that spells one included; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.inf if isinstance(value, int) else None


def plain_salt(engine: Any) -> str:
    """The prefix-cache salt of an engine's exact windows, which plain requests of its tenant share; "" is none."""
    salt = getattr(engine, "plain_salt", "")
    return salt if isinstance(salt, str) else ""


def _bound_body(data: dict[str, Any], tenant: str, salt: str | None) -> bytes:
    """A plain request as its tenant's own; ``salt`` None: it computes no KV."""
    if salt is not None:
        _bind(data, tenant, salt)
    if tenant:
        _rename(data.get("messages"), tenant)
        _rename(data.get("input"), tenant)
    return json.dumps(data).encode()


def _bind(data: dict[str, Any], tenant: str, salt: str) -> None:
    """Puts a plain request into its tenant's prefix-cache space."""
    arguments = data.get("vllm_xargs")
    for name in _TRANSFER:
        if data.get(name) is not None or (isinstance(arguments, dict) and name in arguments):
            raise NotAllowed(f"{name} is set by the server alone; leave it out")
    if data.get("previous_response_id") is not None and tenant:
        raise NotAllowed("previous_response_id is not served to tenants; send the earlier items again")
    if tenant and not (_number(data.get("priority")) or 0) >= 0:
        raise NotAllowed("priority must be at least 0 for tenants; lower ones would be served before everybody else's")
    if tenant and not salt:
        raise NotAllowed("this engine has no prefix-cache space of the tenant's own; use chunks and windows instead")
    given = data.get("cache_salt")
    if isinstance(given, str) and given:
        data["cache_salt"] = digest("salt of a request", tenant, given)
    elif salt and given is None:
        data["cache_salt"] = salt
    if tenant and data.get("request_id") is not None:  # the name of a response in what vLLM keeps of all tenants'
        data["request_id"] = _own("request of a tenant", tenant, data["request_id"])


def _rename(value: Any, tenant: str) -> None:
    """Media names of clients (``uuid``) are keys of caches that all tenants share: each tenant gets its own names."""
    if isinstance(value, list):
        for item in value:
            _rename(item, tenant)
    elif isinstance(value, dict):
        named = value.get("uuid")
        if named is None:  # its content is the key
            named = _content(value)
        if named is not None:
            value["uuid"] = _own("medium of a tenant", tenant, named)
        if value.get("type") == "image" and isinstance(value.get("source"), dict):
            _mark(value["source"], tenant)
        for key, item in value.items():
            # Media hold no parts; arguments of a call and schemas of a tool are text of the prompt.
            if key not in _MEDIA and (value.get("type"), key) not in (("tool_use", "input"), ("tool_addition", "tool")):
                _rename(item, tenant)


def _content(part: dict[str, Any]) -> Any:
    """The medium that a content part carries itself; what is fetched anew each time has to stay so, and is None."""
    kind = part.get("type")
    key = next((name for name in _MEDIA if name in part), "") if kind is None else kind
    if not isinstance(key, str) or key not in _MEDIA:
        return None
    medium = part.get("image_url" if key == "input_image" else key)
    if not key.endswith("_url") and key != "input_image":
        return medium
    url = medium.get("url") if isinstance(medium, dict) else medium
    return url if isinstance(url, str) and _is_data(url) else None


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def _mark(source: dict[str, Any], tenant: str) -> None:
    """Puts the tenant's mark behind a picture of ``/v1/messages``, which takes no name for it: the key is the file's bytes
    then, and no decoder reads on behind a picture's end."""
    key = "url" if source.get("type") == "url" else "data"
    given = source.get(key)
    if not isinstance(given, str) or (key == "url" and not _is_data(given)):
        return
    head, comma, data = given.partition(",") if key == "url" else ("", "", given)
    try:
        picture = base64.b64decode(data, validate=True)
    except ValueError:
        return  # the server says what is wrong with it
    mark = hmac.digest(_SECRET, tenant.encode(), "sha256")
    source[key] = head + comma + base64.b64encode(picture + mark).decode()


def _own(what: str, tenant: str, name: Any) -> str:
    """A tenant's own name for what it calls ``name``; whatever JSON that is, it is no name of another one's."""
    return digest(what, tenant, name if isinstance(name, str) else json.dumps(name))


_UNSALTED = "{} is not served to tenants, since it cannot be kept apart from other tenants' caches"


def _check_allowed(method: str, path: str) -> None:
    """Raises NotAllowed for what could reach another tenant's data or cached blocks."""
    reads = method in ("GET", "HEAD")
    if (reads and not path.startswith("/v1/responses/")) or path in SALTED or path in _HARMLESS:
        return
    raise NotAllowed(_UNSALTED.format(f"{method} {path}"))


def _is_open(scope: Scope, path: str) -> bool:
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and path.startswith(_OPEN)


async def _read(receive: Receive, limit: int) -> tuple[list[Message], bytes, bool]:
    """Messages of a body up to ``limit`` bytes, the bytes, and whether that is all of it."""
    messages: list[Message] = []
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            return messages, b"", False
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if not message.get("more_body", False):
            return messages, b"".join(parts), True
        if size > limit:
            return messages, b"", False


def _again(messages: list[Message], receive: Receive) -> Receive:
    left = list(reversed(messages))

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None  # the server says what is wrong with it


def _resize(scope: Scope, size: int) -> None:
    kept = [(k, v) for k, v in scope["headers"] if k.lower() not in (b"content-length", b"transfer-encoding")]
    scope["headers"] = [*kept, (b"content-length", str(size).encode())]


_UNAUTHORIZED = {
    "error": {
        "message": "the API key must be one this server knows; send it as Authorization: Bearer KEY",
        "type": "authentication_error", "param": None, "code": "invalid_api_key",
    }
}  # fmt: skip


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, body: dict[str, Any]) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": body["error"]["message"][:100]})
        return
    await JSONResponse(body, status_code=status)(scope, receive, send)
