"""Where KV, patches, vision embeddings and sources are kept: bytes by key, in memory, on disk, in Redis, or in tiers."""

from __future__ import annotations

import re
from pathlib import Path

from ctxwin.hashing import digest
from ctxwin.store.base import Store, StoreStats

__all__ = ["Store", "StoreStats", "open_store", "parse_bytes"]

_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip
_SUPPORTED = "'memory:', 'disk:PATH', 'redis://HOST:PORT/DB' or 'tiered:memory:,disk:PATH'"


def parse_bytes(size: int | str) -> int:
    """Bytes of ``size``: an int, or a str like ``"50GB"`` (10^9) or ``"2GiB"`` (2^30); ValueError otherwise."""
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ValueError(f"a size must be an int or a str like '50GB', got {size!r}")
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise ValueError(f"a size must be a number with a unit of B, KB, MB, GB, TB, KiB ... TiB, got {size!r}")
        size = int(float(match[1]) * unit)
    if size <= 0:
        raise ValueError(f"a size must be positive, got {size}")
    return size


def open_store(url: str, *, max_bytes: int | str | None = None, ttl: float | None = None, tenant: str = "") -> Store:
    """Opens a store.

    Args:
        url: ``memory:`` (this process), ``disk:PATH`` (a folder that processes share), ``redis://HOST:PORT/DB`` (a server
            that machines share; ``rediss://`` for TLS), or ``tiered:`` followed by these from fast to durable, separated
            by commas.
        max_bytes: limit such as ``"50GB"``; by default 2 GiB in memory and in Redis, 50 GB on disk. With ``tiered:`` it
            limits the last tier, and the ones above it take their defaults where those are smaller.
        ttl: seconds after its last put at which a value becomes a miss; None keeps it.
        tenant: each tenant has its own key space, its own limit and, on disk, its own folder below ``PATH``, so no
            tenant sees, evicts or times another one's keys. "" is a tenant like any other.

    Raises:
        ValueError: an unknown kind of store or a bad limit.
        MissingExtra: ``redis:`` without redis-py.
        OSError: a folder that cannot be made or written to, a server that cannot be reached.
    """
    if not isinstance(url, str):
        raise ValueError(f"a store must be {_SUPPORTED}, got {url!r}")
    limit = None if max_bytes is None else parse_bytes(max_bytes)
    kind, _, rest = url.partition(":")
    if kind == "tiered":
        from ctxwin.store.tiered import TieredStore

        # A comma may stand in a path; only one in front of a kind of store separates.
        names = [name for name in re.split(r",(?=[a-z]+:)", rest) if name]
        if len(names) < 2 or any(name.startswith("tiered:") for name in names):
            raise ValueError(f"a tiered store must be like 'tiered:memory:,disk:PATH', got {url!r}")
        limits = [min(limit, _default(name)) if limit else None for name in names[:-1]] + [limit]
        return TieredStore([_open(name, size, ttl, tenant) for name, size in zip(names, limits, strict=True)])
    return _open(url, limit, ttl, tenant)


def _default(url: str) -> int:
    return 50 * 10**9 if url.startswith("disk:") else 2 << 30


def _open(url: str, limit: int | None, ttl: float | None, tenant: str) -> Store:
    kind, colon, rest = url.partition(":")
    size = limit or _default(url)
    if kind == "memory" and colon and not rest:
        from ctxwin.store.memory import MemoryStore

        return MemoryStore(size, ttl)
    if kind == "disk" and colon and rest:
        from ctxwin.store.disk import DiskStore

        return DiskStore(Path(rest).expanduser() / digest("tenant", tenant), size, ttl)
    if kind in ("redis", "rediss") and rest.startswith("//"):
        from ctxwin.store.redis import RedisStore

        return RedisStore(url, size, ttl, tenant)
    raise ValueError(f"a store must be {_SUPPORTED}, got {url!r}")
