"""Redis stores on a server for tests."""

from __future__ import annotations

from typing import Any

from ctxwin.store.redis import RedisStore
from store.redis_server import Server

LARGE = 1 << 30


def twin(store: RedisStore, server: Server, **options: Any) -> RedisStore:
    """A second store on the same keys, as another process would open it."""
    other = RedisStore(server.url, options.pop("max_bytes", store.max_bytes), **options)
    other._enter(store._values.removesuffix("value:"))
    return other
