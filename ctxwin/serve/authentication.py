"""Who asks: the tenant of a request by its API key, and what is served without one."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Scope

from ctxwin.serve.endpoints import is_ours
from ctxwin.serve.errors import Unauthorized
from ctxwin.serve.service import Service

_OPEN = ("/health", "/ping", "/version")
_METRICS = "/metrics"


def authenticate(service: Service, scope: Scope, path: str) -> str | None:
    """The tenant that asks; "" is the unnamed one, of the server's own keys or of a server without any.

    None is nobody, at one of the few endpoints that answer without a key.

    Raises:
        Unauthorized: once there is any key, a key is needed for everything else.
    """
    tenant = service.keys.tenant(Headers(scope=scope).get("authorization"))
    if tenant is None and (is_ours(path) or not _is_open(service, scope, path)):
        raise Unauthorized("the API key must be one this server knows; send it as Authorization: Bearer KEY")
    return tenant


def _is_open(service: Service, scope: Scope, path: str) -> bool:
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return False
    metrics = path == _METRICS or path.startswith(_METRICS + "/")
    return path in _OPEN or (metrics and not service.private_metrics)
