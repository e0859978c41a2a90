"""A store in a Mooncake cluster (kvcache-ai/Mooncake): the memory of many machines, over TCP or RDMA.

A value is one sealed record (`ctxwin.store.codec.Seal`), checked on every read. Mooncake has neither listing nor limits for
each user, so what this process put is indexed here: its limit, its order of eviction and `list` go by that. Everybody's
values can be read. Mooncake itself evicts at its high-water mark, leased or not, and loses what lay on a machine that left.
All of that are misses.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ctxwin.extras import optional_imports
from ctxwin.hashing import digest
from ctxwin.store.base import StoreStats, check_key, check_value
from ctxwin.store.sealed import SealedStore

log = logging.getLogger(__name__)

_BUFFER_BYTES = 64 << 20
_SHARE = 1.25  # of what may be put, what is contributed: Mooncake begins to evict at nine tenths
_OPTIONS = {"protocol": "tcp", "devices": "", "host": "127.0.0.1", "metadata": "P2PHANDSHAKE"}


@dataclass
class _Put:
    size: int
    sum: bytes
    expires: float | None


class MooncakeStore(SealedStore):
    """Blobs in a Mooncake cluster; safe for threads, and for processes and machines that share it.

    Args:
        url: ``mooncake://MASTER:PORT[?host=THIS-HOST&protocol=rdma&devices=mlx5_0&metadata=...]``; ``host`` is the address at
            which the others reach this machine.
        max_bytes: of what this process has put; the least recently used leave first, leased ones stay. A quarter more
            of this machine's memory goes into the cluster.
        ttl: seconds after its last `put` here at which a value is removed; None keeps it. Others see it until then, and until
            this process looks.
        tenant: has its own key space.
        secret: seals the records with a keyed code; None with a checksum.

    Attributes:
        failures: calls that the cluster refused or failed; each is a miss or a refused put.

    Raises:
        ValueError: a bad address or limit. MissingExtra: Mooncake is not installed.
        OSError: the master cannot be reached.

    Fenced records are fenced within this process only: windows need a registry in Redis beside it.
    """

    def __init__(
        self,
        url: str,
        max_bytes: int = 2 << 30,
        ttl: float | None = None,
        tenant: str = "",
        secret: bytes | None = None,
    ) -> None:
        super().__init__(max_bytes, ttl, secret)
        master, options = _checked(url)
        self.name = f"mooncake://{master}"
        self._lock = threading.RLock()
        self._space = digest("tenant", tenant) + "/"
        self._put: OrderedDict[str, _Put] = OrderedDict()
        self._bytes = 0
        os.environ.setdefault("GLOG_minloglevel", "2")  # it writes a line for every miss
        with optional_imports():
            try:
                from mooncake.store import MooncakeDistributedStore
            except ImportError as error:
                if "libibverbs" in str(error):
                    raise OSError(f"mooncake needs libibverbs.so.1: install Debian's libibverbs1 ({error})") from None
                raise
        self._client: Any = MooncakeDistributedStore()
        segment = int(_SHARE * max_bytes) + _BUFFER_BYTES
        host, metadata, protocol, devices = (options[name] for name in ("host", "metadata", "protocol", "devices"))
        answer = self._client.setup(host, metadata, segment, _BUFFER_BYTES, protocol, devices, master)
        if answer != 0:
            raise OSError(
                f"the store {self.name} cannot be reached (Mooncake's error {answer}); start mooncake_master there, or check "
                "the address"
            )

    def _read(self, key: str, *, use: bool = False) -> bytes | None:
        self._check_open()
        self._expire()
        blob = self._client.get(self._space + key)
        if not blob:
            self._lost(key)
            return None
        value = self._open(key, blob)
        if value is not None:
            self._use(key)
        return value

    def put(self, key: str, value: bytes) -> bool:
        """Store ``value``; False where it cannot fit beside what is leased here, or the cluster has no room."""
        check_key(key)
        check_value(value)
        self._check_open()
        head, code = self._seal.close(key, value)
        blob = b"".join((head, value, code))
        with self._lock:
            self._expire()
            old = self._put.get(key)
            excess = self._bytes - (old.size if old else 0) + len(blob) - self.max_bytes
            victims = []
            for victim in self._put if excess > 0 else ():
                if victim != key and not self._tally.holds(victim):
                    victims.append(victim)
                    excess -= self._put[victim].size
                    if excess <= 0:
                        break
            if excess > 0:
                return False
            for victim in victims:
                self._remove(victim)
                self._tally.count("evictions")
            # Mooncake has no value while one is replaced, and the same one is put again and again.
            same = old is not None and old.sum == code and self._client.is_exist(self._space + key) == 1
            if not same and (answer := self._client.upsert(self._space + key, blob)):
                self.failures += 1
                log.warning("store %s could not write %s: Mooncake's error %d", self.name, key, answer)
                return False
            self._lost(key, drop=False)
            self._put[key] = _Put(len(blob), code, None if self.ttl is None else time.monotonic() + self.ttl)
            self._bytes += len(blob)
            self._tally.count("puts")
            return True

    def delete(self, key: str) -> bool:
        """Remove ``key`` for everybody, leased or not; False where there was none."""
        self._check_open()
        self._expire()
        with self._lock:
            return self._remove(check_key(key))

    def contains(self, key: str) -> bool:
        """Return True if `get` would find a value; counts as a use. The blob is not read."""
        self._check_open()
        self._expire()
        there = bool(self._client.is_exist(self._space + check_key(key)) == 1)
        if there:
            self._use(key)
        else:
            self._lost(key)
        return there

    def list(self, prefix: str = "") -> Iterator[str]:
        """A sorted snapshot of the keys that this process has put and that are still there."""
        self._check_open()
        self._expire()
        with self._lock:
            mine = sorted(key for key in self._put if key.startswith(prefix))
        there = self._client.batch_is_exist([self._space + key for key in mine]) if mine else []
        return iter([key for key, answer in zip(mine, there, strict=True) if answer == 1])

    def lease(self, key: str) -> bool:
        """Protect ``key`` from this process's evictions; Mooncake's own do not know of it."""
        with self._lock:
            if not self.contains(key):
                return False
            self._tally.lease(key)
            return True

    def release(self, key: str) -> None:
        self._tally.release(key)

    def stats(self) -> StoreStats:
        """Counters of this process, and what it has put."""
        self._expire()
        with self._lock:
            return self._tally.stats(len(self._put), self._bytes)

    def close(self) -> None:
        """Leave the cluster, which loses what lay on this machine; idempotent. Later calls raise ValueError."""
        if not self._closed:
            self._closed = True
            self._client.close()

    def _use(self, key: str) -> None:
        with self._lock:
            if key in self._put:
                self._put.move_to_end(key)

    def _remove(self, key: str, record: Any = None) -> bool:
        removed = bool(self._client.remove(self._space + key, True) == 0)
        self._lost(key)
        return removed

    def _lost(self, key: str, *, drop: bool = True) -> None:
        with self._lock:
            put = self._put.pop(key, None)
            self._bytes -= put.size if put else 0
            if drop:
                self._tally.drop(key)

    def _expire(self) -> None:
        if self.ttl is None:
            return
        now = time.monotonic()
        with self._lock:
            for key in [k for k, put in self._put.items() if put.expires is not None and put.expires <= now]:
                self._remove(key)


def _checked(url: str) -> tuple[str, dict[str, str]]:
    """The master's address and the options; ValueError where ``url`` names no cluster."""
    expected = "a mooncake store must be mooncake://MASTER:PORT[?host=...&protocol=tcp|rdma&devices=...&metadata=...]"
    try:
        parts = urlsplit(url)
        port = parts.port
        options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query), keep_blank_values=True))
    except ValueError as error:
        raise ValueError(f"{expected}, got one that cannot be read: {error}") from None
    unknown = ", ".join(sorted(set(options) - set(_OPTIONS)))
    if not parts.hostname or port is None or parts.path.strip("/") or parts.username or unknown:
        raise ValueError(f"{expected}, got {url[:80]!r}{f' with {unknown}' if unknown else ''}")
    return f"{parts.hostname}:{port}", {**_OPTIONS, **options}
