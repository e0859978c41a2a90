"""Authentication: the tenant of a request by its API key, and the endpoints that are served without one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import Scope

from ctxwin_client.errors import Unauthorized
from ctxwin_server.app.endpoints import READY, is_ours
from ctxwin_server.app.tenants import Tenant

OPEN = (READY, "/health", "/ping", "/version")
_METRICS = "/metrics"


@dataclass(frozen=True)
class Keys:
    """API keys, hashed, with the tenant each belongs to; "" is the unnamed tenant of the server's own keys.

    Attributes:
        tenants: whether there are tenants; a key is then required.
    """

    by_hash: Mapping[bytes, str] = field(default_factory=dict)
    tenants: bool = False

    @classmethod
    def of(cls, server_keys: Sequence[str], tenants: Sequence[Tenant]) -> Keys:
        """Return a table of ``server_keys`` and those of ``tenants``; raise ValueError if a key is both."""
        table = {_hash(key): "" for key in server_keys}
        for tenant in tenants:
            for key in tenant.keys:
                if table.setdefault(_hash(key), tenant.name) != tenant.name:
                    raise ValueError(f"a key of tenant {tenant.name!r} is the server's own --api-key, too; remove it")
        return cls(table, bool(tenants))

    def tenant(self, authorization: str | None) -> str | None:
        """Return the tenant of an Authorization header; None for an unknown key. Compares in constant time."""
        if not self.by_hash:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        match, key_hash = None, _hash(key)
        for known_hash, tenant in self.by_hash.items():
            if hmac.compare_digest(known_hash, key_hash):
                match = tenant
        return match


@dataclass(frozen=True)
class Authentication:
    """The keys of one server.

    Attributes:
        keys: of everything, by tenant; metrics_keys: of ``/metrics`` alone.
        private_metrics: whether ``/metrics`` needs a key where there are keys.
    """

    keys: Keys
    metrics_keys: Keys
    private_metrics: bool

    @property
    def metrics_open(self) -> bool:
        """True if ``/metrics`` needs no key."""
        return not (self.private_metrics and self.keys.by_hash) and not self.metrics_keys.by_hash

    def authenticate(self, scope: Scope, path: str) -> str | None:
        """Return the tenant of a request; "" is the unnamed one, of the server's own keys or of a server without any.

        None: the request has no key and goes to one of the few endpoints that need none.

        Raises:
            Unauthorized: the key is missing or unknown, and the server has keys.
        """
        authorization = Headers(scope=scope).get("authorization")
        tenant = self.keys.tenant(authorization)
        is_metrics = path == _METRICS or path.startswith(_METRICS + "/")
        if is_metrics and self.metrics_keys.by_hash:  # tenants' keys do not open it: it shows all tenants
            if self.metrics_keys.tenant(authorization) is None and not (self.keys.by_hash and tenant == ""):
                raise Unauthorized("/metrics needs its own key (--metrics-key-file), as Authorization: Bearer KEY")
            return ""
        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        is_open = is_read and (path in OPEN or (is_metrics and not self.private_metrics))
        if tenant is None and (is_ours(path) or not is_open):
            raise Unauthorized("the API key must be one this server knows; send it as Authorization: Bearer KEY")
        return tenant


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8")).digest()
