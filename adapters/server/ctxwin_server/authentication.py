"""Authentication: the tenant of a request by its API key, and the endpoints that are served without one."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Scope

from ctxwin_client.errors import Unauthorized
from ctxwin_server.endpoints import READY, is_ours
from ctxwin_server.service import Service

OPEN = (READY, "/health", "/ping", "/version")
_METRICS = "/metrics"


def authenticate(service: Service, scope: Scope, path: str) -> str | None:
    """Return the tenant of a request; "" is the unnamed one, of the server's own keys or of a server without any.

    None: the request has no key and goes to one of the few endpoints that need none.

    Raises:
        Unauthorized: the key is missing or unknown, and the server has keys.
    """
    authorization = Headers(scope=scope).get("authorization")
    tenant = service.keys.tenant(authorization)
    if _is_metrics(path) and service.metrics_keys.by_hash:  # tenants' keys do not open it: it shows all tenants
        if service.metrics_keys.tenant(authorization) is None and not (service.keys.by_hash and tenant == ""):
            raise Unauthorized("/metrics needs its own key (--metrics-key-file), as Authorization: Bearer KEY")
        return ""
    if tenant is None and (is_ours(path) or not _is_open(service, scope, path)):
        raise Unauthorized("the API key must be one this server knows; send it as Authorization: Bearer KEY")
    return tenant


def _is_open(service: Service, scope: Scope, path: str) -> bool:
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return False
    return path in OPEN or (_is_metrics(path) and not service.private_metrics)


def _is_metrics(path: str) -> bool:
    return path == _METRICS or path.startswith(_METRICS + "/")
