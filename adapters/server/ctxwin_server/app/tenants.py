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

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ctxwin.store import parse_bytes
from ctxwin.validation import validate
from ctxwin_chats.bodies import Body


def is_key(text: Any) -> bool:
    """Return True for a text that a client can send as its key: printable ASCII without spaces."""
    return isinstance(text, str) and re.fullmatch("[!-~]+", text) is not None


def _check_keys(keys: Any) -> Any:
    """Refuse what is no list of keys, in words that repeat none of them."""
    if not isinstance(keys, list) or not keys or not all(map(is_key, keys)):
        raise ValueError("keys must be a list of texts in printable ASCII without spaces, as a header has them")
    return keys


class Tenant(Body):
    """One tenant.

    Attributes:
        name: part of its keys in the store and of its prefix-cache salts; stays the same for as long as its data should.
        keys: API keys that are this tenant's.
        max_bytes: quota of its store; max_windows: of its open windows; max_concurrency: of its requests that run at once.
        requests_per_minute, bytes_per_minute: of its requests and their bodies; None is no limit.
    """

    name: str = Field(min_length=1, max_length=200)
    keys: Annotated[list[str], BeforeValidator(_check_keys)]
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
    try:
        text = path.read_text(encoding="utf-8-sig")
        data: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the tenants file {str(path)!r} must be TOML (or JSON as *.json) in UTF-8: {error}") from None
    rows = data.get("tenant", []) if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"the tenants file {str(path)!r} must have a table [[tenant]] for each tenant, got another form"
        )
    prefix = f"the tenants file {str(path)!r} is malformed: "
    tenants: list[Tenant] = validate(_File.model_validate, data, prefix).tenant
    names = [t.name for t in tenants]
    keys = [key for t in tenants for key in t.keys]
    for kind, values in (("name", names), ("key", keys)):
        if len(set(values)) < len(values):
            raise ValueError(f"every {kind} in {str(path)!r} must be one tenant's, got one twice")
    for tenant in tenants:
        sizes = [size for size in (tenant.max_bytes, tenant.bytes_per_minute) if size is not None]
        try:
            [*map(parse_bytes, sizes)]
        except ValueError as error:
            raise ValueError(f"{prefix}{tenant.name}: {error}") from None
    return tenants
