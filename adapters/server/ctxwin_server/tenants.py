"""Tenants and their API keys, read from a file.

```toml
[[tenant]]
name = "acme"
keys = ["sk-acme-1", "sk-acme-2"]
max_bytes = "20GB"     # of the tenant's own store; default: the server's --store-bytes
max_windows = 64       # default: the server's --max-windows
max_concurrency = 16   # requests that run at once; default: the server's --max-concurrency
requests_per_minute = 600
bytes_per_minute = "1GB"  # of the bodies of its requests
```

The same as JSON: ``{"tenant": [{"name": ..., "keys": [...]}]}``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ctxwin.store import parse_bytes
from ctxwin.validation import validate
from ctxwin_server.schemas import Body


class Tenant(Body):
    """One tenant.

    Attributes:
        name: part of its keys in the store and of its prefix-cache salts; stays the same for as long as its data should.
        keys: API keys that are this tenant's.
        max_bytes: quota of its store; max_windows: of its open windows; max_concurrency: of its requests that run at once.
        requests_per_minute, bytes_per_minute: of its requests and their bodies; None is no limit.
    """

    name: str = Field(min_length=1, max_length=200)
    keys: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)
    max_bytes: int | str | None = None
    max_windows: Annotated[int, Field(gt=0)] | None = None
    max_concurrency: Annotated[int, Field(gt=0)] | None = None
    requests_per_minute: Annotated[int, Field(gt=0)] | None = None
    bytes_per_minute: int | str | None = None


class _File(Body):
    tenant: list[Tenant] = Field(min_length=1)


def load_tenants(path: str | Path) -> list[Tenant]:
    """Read the tenants of a TOML or JSON file. Raises ValueError, which names the fault, and OSError."""
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    try:
        data: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"the tenants file {str(path)!r} must be TOML (or JSON as *.json): {error}") from None
    tenants: list[Tenant] = validate(_File.model_validate, data).tenant
    names = [t.name for t in tenants]
    keys = [key for t in tenants for key in t.keys]
    for kind, values in (("name", names), ("key", keys)):
        if len(set(values)) < len(values):
            raise ValueError(f"every {kind} in {str(path)!r} must be one tenant's, got one twice")
    for tenant in tenants:
        for size in (tenant.max_bytes, tenant.bytes_per_minute):
            if size is not None:
                parse_bytes(size)
    return tenants


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


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8")).digest()
