"""Where KV, patches, embeddings and sources are kept: bytes by key, in memory, on disk, in Redis, in Mooncake, or in tiers."""

import hmac
import os
import re
from importlib.metadata import entry_points
from pathlib import Path

from ctxwin.hashing import digest
from ctxwin.store.base import Store, StoreStats

__all__ = ["Store", "StoreStats", "open_store", "parse_bytes"]

STORE_KEY = "CTXWIN_STORE_KEY"  # holds the key of shared stores where none is passed
_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = _DECIMAL | {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SUPPORTED = "'memory:', 'disk:PATH', 'redis://HOST:PORT/DB', 'mooncake://MASTER:PORT' or 'tiered:memory:,disk:PATH'"
_GROUP = "ctxwin.stores"  # entry points of other distributions' stores, each named like its kind in an address


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


def open_store(
    url: str,
    *,
    max_bytes: int | str | None = None,
    ttl: float | None = None,
    tenant: str = "",
    key: str | bytes | None = None,
) -> Store:
    """Open a store.

    Args:
        url: ``memory:`` (this process), ``disk:PATH`` (a folder that processes share), ``redis://HOST:PORT/DB`` (a server
            that machines share; ``rediss://`` for TLS), ``mooncake://MASTER:PORT`` (the memory of many machines), a kind that
            an installed distribution adds, or ``tiered:`` followed by these from fast to durable, separated by commas.
        max_bytes: limit such as ``"50GB"``; by default 2 GiB in memory and in Redis, 50 GB on disk. With ``tiered:`` it
            limits the last tier, and the ones above it take their defaults where those are smaller.
        ttl: seconds after its last put at which a value becomes a miss; None keeps it.
        tenant: each tenant has its own key space, its own limit and, on disk, its own folder below ``PATH``, so no
            tenant sees, evicts or times another one's keys. "" is a tenant like any other.
        key: at least 16 bytes that all who share the store hold; None takes the environment's `STORE_KEY`, where that is
            set. Records on disk and in Redis are then bound to it, to the tenant and to their own key by a keyed code that
            every read checks: whoever writes without it can only cause misses. Without a key a checksum finds damage, but
            whoever can write to the store is believed.

    Raises:
        ValueError: an unknown kind of store, a bad limit or a short key.
        MissingExtra: ``redis:`` without redis-py.
        OSError: a folder that cannot be made or written to, a server that cannot be reached.
    """
    if not isinstance(url, str):
        raise ValueError(f"a store must be {_SUPPORTED}, got {url!r}")
    if not isinstance(tenant, str):
        raise TypeError(f"tenant must be a str, got {type(tenant).__name__}")
    check_address(url)
    limit = None if max_bytes is None else parse_bytes(max_bytes)
    raw = key if key is not None else os.environ.get(STORE_KEY) or None
    # Seals a tenant's records, so that another tenant's are foreign to it.
    secret = None if raw is None else hmac.digest(_key_bytes(raw), digest("store", tenant).encode(), "sha256")
    names = tiers_of(url)
    limits = [min(limit, _default(name)) if limit else None for name in names[:-1]] + [limit]
    stores = [_open(name, size, ttl, tenant, secret) for name, size in zip(names, limits, strict=True)]
    store = stores[0]
    if len(stores) > 1:
        from ctxwin.store.tiered import TieredStore

        store = TieredStore(stores)
    store.archive_secret = None if raw is None else archive_secret(raw)
    return store


def tiers_of(url: str) -> list[str]:
    """Return the stores that a ``tiered:`` store consists of, or the one that it is."""
    # A comma may stand in a path; only one in front of a kind of store separates.
    kind, _, rest = url.partition(":")
    return [name for name in re.split(r",(?=[a-z]+:)", rest) if name] if kind == "tiered" else [url]


def check_address(url: str) -> None:
    """Raise ValueError if ``url`` is no address for `open_store`, OSError if it names a file as a folder. Opens nothing."""
    names = tiers_of(url)
    if url.startswith("tiered:") and (len(names) < 2 or any(name.startswith("tiered:") for name in names)):
        raise ValueError(f"a tiered store must be like 'tiered:memory:,disk:PATH', got {url!r}")
    for name in names:
        kind, colon, rest = name.partition(":")
        if kind == "disk" and os.path.expanduser(rest).startswith("~"):  # noqa: PTH111 (Path's raises RuntimeError)
            raise ValueError(f"a store's folder must be of a user that this machine has, got {rest!r}")
        if kind == "disk" and rest and Path(rest).expanduser().is_file():
            raise NotADirectoryError(f"a store on disk must be a folder, got the file {rest!r}")
        remote = kind in ("redis", "rediss", "mooncake") and rest.startswith("//")
        ours = remote or (kind == "disk" and rest) or (kind == "memory" and colon and not rest)
        if not ours and not (rest and entry_points(group=_GROUP, name=kind)):
            raise ValueError(f"a store must be {_SUPPORTED}, or of a kind that a distribution adds, got {name!r}")


def archive_secret(key: str | bytes) -> bytes:
    """The secret that a store opened with ``key`` seals archives with; the same for all tenants, which archives pass between."""
    return hmac.digest(_key_bytes(key), digest("archive").encode(), "sha256")


def _key_bytes(key: str | bytes) -> bytes:
    raw = key.encode() if isinstance(key, str) else key
    if not isinstance(raw, bytes):
        raise TypeError(f"a store key must be a str or bytes, got {type(key).__name__}")
    if len(raw) < 16:
        raise ValueError(f"a store key must have at least 16 bytes, got {len(raw)}; make one with openssl rand -hex 32")
    return raw


def _default(url: str) -> int:
    return 50 * 10**9 if url.startswith("disk:") else 2 << 30


def _open(url: str, limit: int | None, ttl: float | None, tenant: str, secret: bytes | None) -> Store:
    kind, _, rest = url.partition(":")
    size = limit or _default(url)
    if kind == "memory":
        from ctxwin.store.memory import MemoryStore

        return MemoryStore(size, ttl)
    if kind == "disk":
        from ctxwin.store.disk import DiskStore

        return DiskStore(Path(rest).expanduser() / digest("tenant", tenant), size, ttl, secret=secret)
    if kind in ("redis", "rediss"):
        from ctxwin.store.redis import RedisStore

        return RedisStore(url, size, ttl, tenant, secret=secret)
    if kind == "mooncake":
        from ctxwin.store.mooncake import MooncakeStore

        return MooncakeStore(url, size, ttl, tenant, secret=secret)
    point, *_ = entry_points(group=_GROUP, name=kind)
    store: Store = point.load()(url, size, ttl, tenant, secret=secret)
    return store
