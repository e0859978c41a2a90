"""A store in a Redis server, shared by processes and machines.

A value is one string: a sealed record (`ctxwin.store.codec.Seal`), so that whatever else stands there is a miss. The index
changes in the same transaction as the value, by a Lua script, `redis.lua`, whose commands run as a whole or not at all. redis-py
is imported when a store is opened.

The index: ``used`` (sorted set: key by last use), ``sizes`` (hash: bytes by key), ``expires`` (sorted set: key by time,
ms), ``tokens`` (hash: fencing token by key), ``holders`` (sorted set: who holds leases, by the time in ms at which they end;
each has a set of keys of its own) and ``leases`` (hash: their number by key). A leased key stands behind all others in
``used``, so that a put into a full store meets only what may leave. Two fields of ``sizes`` count for the whole: their names
hold a blank, which no key may. All names share a hash tag, so that they stay in one slot. Every time is the server's, so
machines' clocks may differ.
"""

import hashlib
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ctxwin.errors import StaleOwner, StoreCorrupt, StoreUnavailable
from ctxwin.extras import optional_imports
from ctxwin.hashing import digest
from ctxwin.store.base import NOBODYS, StoreStats, check_key, check_value
from ctxwin.store.sealed import SealedStore

log = logging.getLogger(__name__)

_INDEX: Final = ("used", "sizes", "expires", "tokens", "holders", "leases")
_SCRIPT: Final = Path(__file__).with_name("redis.lua").read_bytes()
_SHA: Final = hashlib.sha1(_SCRIPT, usedforsecurity=False).hexdigest()  # by which a server knows it once it is loaded
_LARGEST: Final = 512 << 20  # of a Redis string
_UNINDEXED_MS: Final = 60_000
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
LEASE_S: Final = 60.0  # leases outlive a process that ended without giving them back by this; renewed thrice as often
_RETIRED_MS: Final = 3_600_000


class RedisStore(SealedStore):
    """Blobs in a Redis server (6 or newer); safe for threads, and for processes and machines that share it.

    Args:
        url: ``redis://[user:password@]host[:port][/db]``, ``rediss://`` for TLS.
        max_bytes: limit on the blobs' bytes of this tenant; the least recently used leave first, leased ones stay. Leave the
            server's ``maxmemory-policy`` at ``noeviction``: whatever it evicts by itself is a miss here.
        ttl: seconds after its last `put` at which a value becomes a miss; None keeps it.
        tenant: has its own key space; "" is a tenant like any other.
        secret: seals the records with a keyed code (`codec.Seal`); None with a checksum.
        lease_s: seconds that leases outlive a process which was killed; every process on the store sees them until then.
        timeout: seconds to wait for a connection, and for each answer.
        clock: seconds that never go back; tests replace it.

    Attributes:
        failures: calls that the server did not answer or refused; each is a miss. Those made while it is left alone count,
            the others are logged, too.

    Raises:
        ValueError: a bad address or limit.
        MissingExtra: redis-py is not installed.
        OSError: the server cannot be reached or refuses the login. Later failures never raise: a put returns False, a get is
            a miss. After one the server is left alone for half a second, then a second, at most 30, and tried again.

    Every call but `release` is a round trip. Put a ``memory:`` tier in front for what is read often. A blob of
    over 512 MiB is refused: Redis takes no more.
    """

    shared = True

    def __init__(
        self,
        url: str,
        max_bytes: int = 2 << 30,
        ttl: float | None = None,
        tenant: str = "",
        timeout: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        secret: bytes | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        super().__init__(max_bytes, ttl, secret)
        self.name = _check_url(url)
        self._clock = clock
        self._lock = threading.Lock()
        self._pause = self._wake = 0.0
        self._lease_ms = round(lease_s * 1000)
        self._leasing = threading.Lock()  # of the keys leased here, and of what the server knows of them
        self._released: set[str] = set()
        self._renewal: threading.Event | None = None
        self._enter(f"ctxwin:{{{digest('tenant', tenant)}}}:")
        with optional_imports():
            import redis  # type: ignore[import-not-found, unused-ignore]
            from redis.backoff import NoBackoff  # type: ignore[import-not-found, unused-ignore]
            from redis.retry import Retry  # type: ignore[import-not-found, unused-ignore]
        self._errors = (redis.RedisError, OSError)
        self._gone = (redis.ConnectionError, redis.TimeoutError, OSError)
        self._refused, self._no_script = redis.ResponseError, redis.exceptions.NoScriptError
        # One try: the pool opens connections that went stale again, and a server that hangs must not be waited for twice.
        self._client: Any = redis.Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0)
        )
        try:
            self._client.ping()
        except self._errors as error:
            self._client.close()
            raise OSError(
                f"the store {self.name} cannot be reached ({error}); start the server, or check its address and login"
            ) from None
        try:
            info = self._client.info("memory")
        except self._errors:  # a login that may not ask
            info = {}
        policy = str(info.get("maxmemory_policy", "noeviction"))
        self.evicts = int(info.get("maxmemory", 0)) > 0 and policy.startswith("allkeys")

    def _enter(self, space: str) -> None:
        names = ("value:", "passing:", "retired:", "held:")
        self._values, self._passing, self._retired, self._held = (space + name for name in names)
        self._index = [space + name for name in _INDEX]
        self._holder = f"{space}holder:{secrets.token_hex(16)}"

    def _read(self, key: str, *, use: bool = False) -> bytes | None:
        def both(client: Any) -> Any:
            with client.pipeline(transaction=True) as pipe:
                pipe.get(self._values + key)
                self._eval(pipe, "touch", key)
                got = pipe.execute(raise_on_error=False)
                if isinstance(got[1], self._no_script):
                    raise got[1]
                return got

        got = self._try("read", key, both)
        if got is None:
            return None
        blob, touched = got
        if isinstance(blob, self._refused) and str(blob).startswith("WRONGTYPE"):
            self._reject(key, blob, StoreCorrupt("it is not a string"))
        elif isinstance(blob, Exception) or isinstance(touched, Exception):
            self._log_failure("read", key, blob if isinstance(blob, Exception) else touched)
        return None if blob is None or isinstance(blob, Exception) else self._open(key, blob)

    def _remove(self, key: str, blob: Any) -> bool:
        tail = blob[-32:] if isinstance(blob, bytes) else b""
        return bool(self._try("delete", key, lambda client: self._eval(client, "reject", key, tail)))

    def contains(self, key: str) -> bool:
        """Return True if `get` would find a value; counts as a use. The blob is not read."""
        check_key(key)
        return bool(self._try("look for", key, lambda client: self._eval(client, "touch", key)))

    def reachable(self) -> bool:
        """Return True if the server answers; False without a request during the pause after a failure."""
        return not self._closed and bool(self._try("reach", "the server", lambda client: client.ping()))

    def list(self, prefix: str = "") -> Iterator[str]:
        """Iterate over a sorted snapshot of the keys; empty where the server cannot be reached."""
        raw_keys = self._try("list", "its keys", lambda client: self._eval(client, "list")) or []
        keys = (raw.decode("ascii", "replace") for raw in raw_keys)
        return iter(sorted(key for key in keys if key.startswith(prefix)))

    def put(self, key: str, value: bytes) -> bool:
        """Store ``value``; return False where it cannot fit beside all leased values, or the server refuses it.

        Cost: one SHA-256, one copy, a round trip with the value; two where leases were released since the last put.
        """
        return self._put(key, value) == 1

    def _put(self, key: str, value: bytes, token: int = 0) -> int | None:
        """Return 1: stored, 0: refused, -1: owned by another claimant; None where the server fails."""
        check_key(key)
        check_value(value)
        self._check_open()
        head, code = self._seal.close(key, value)
        blob = b"".join((head, value, code))
        if len(blob) > min(self.max_bytes, _LARGEST):
            return 0
        if self._released:
            with self._leasing:
                self._release_leases()
        passing = self._passing + secrets.token_hex(16)
        ttl = 0 if self.ttl is None else max(1, round(self.ttl * 1000))
        arguments = (key, len(blob), self.max_bytes, ttl, token, self._retired + key)

        def both(client: Any) -> Any:
            """Write value and index in one transaction; the value has a temporary name first, so a refusal changes nothing."""
            with client.pipeline(transaction=True) as pipe:
                # A script that fails half-way is not undone: a value without an index entry must expire.
                pipe.set(passing, blob, px=_UNINDEXED_MS)
                names = (*self._index, passing)
                pipe.evalsha(_SHA, len(names), *names, "put", self._values, *arguments)
                return pipe.execute()[1]

        stored, evicted = self._try("write", key, both) or (None, 0)
        self._tally.count("evictions", evicted)
        self._tally.count("puts", stored == 1)
        return stored

    def delete(self, key: str) -> bool:
        """Remove ``key``, leased or not; return False where there was none."""
        check_key(key)
        existed = bool(self._try("delete", key, lambda client: self._eval(client, "delete", key)))
        if existed:
            self._unlease(key)
        return existed

    def _unlease(self, key: str) -> None:
        with self._leasing:
            if self._tally.holds(key):
                self._tally.drop(key)
                self._released.add(key)

    def lease(self, key: str) -> bool:
        """Protect ``key`` from evictions by all users of the store, until its release or `lease_s` after this process ends."""
        arguments = (check_key(key), self._holder, self._lease_ms)
        with self._leasing:
            leased = bool(self._try("lease", key, lambda client: self._eval(client, "lease", *arguments)))
            if leased:
                self._tally.lease(key)
                self._released.discard(key)
                if self._renewal is None:
                    self._renewal = threading.Event()
                    which = (weakref.ref(self), self._renewal, self._lease_ms / 3000)
                    threading.Thread(target=_renew, args=which, name="ctxwin-leases", daemon=True).start()
        return leased

    def release(self, key: str) -> None:
        """Release one lease; the server learns of it with the next put or renewal."""
        with self._leasing:
            was_leased = self._tally.holds(key)
            self._tally.release(key)
            if was_leased and not self._tally.holds(key):
                self._released.add(key)

    def _release_leases(self) -> None:
        released = tuple(self._released)
        arguments = (self._holder, *released)
        if released and self._try("release", "leases", lambda client: self._eval(client, "release", *arguments)):
            self._released.difference_update(released)

    def renew(self) -> None:
        """Renew all leases of this process on the server for another `lease_s` seconds. O(1), unless the server lost some."""
        with self._leasing:
            if self._closed:
                return
            self._release_leases()
            arguments, leased = (self._holder, self._lease_ms), self._tally.leased() | self._released
            known = self._try("renew", "leases", lambda client: self._eval(client, "renew", *arguments))
            if known is not None and known != len(leased):
                restored = (self._holder, *self._tally.leased())
                self._try("restore", "leases", lambda client: self._eval(client, "restore", *restored))

    def claim(self, key: str) -> tuple[int, bytes] | None:
        """Take over a fenced record. Cost: a round trip with the value, as one script."""
        check_key(key)
        reply = self._answer(key, self._try("claim", key, lambda client: self._eval(client, "claim", key)))
        value = None if reply == 0 else self._open(key, reply[1])
        return None if value is None else (int(reply[0]), value)

    def commit(self, key: str, value: bytes, token: int) -> bool:
        """Write a fenced record as its owner. Cost: a `put`."""
        stored = self._answer(key, self._put(key, value, token))
        if stored < 0:
            raise StaleOwner(f"{key} must be written by its owner, got token {token}; claim it again")
        return bool(stored)

    def read(self, key: str) -> bytes | None:
        """Return the value of a fenced record. Cost: a round trip with the value."""
        (blob,) = self._answer(key, self._try("read", check_key(key), lambda client: [client.get(self._values + key)]))
        return None if blob is None else self._open(key, blob)

    def token(self, key: str) -> int:
        """Return the token of a fenced record's owner; 0 where there is none, above all others once retired. One round trip."""

        def read(client: Any) -> Any:
            with client.pipeline(transaction=False) as pipe:
                pipe.hget(self._index[_INDEX.index("tokens")], check_key(key))
                pipe.exists(self._values + key)
                pipe.exists(self._retired + key)
                return pipe.execute()

        token, there, retired = self._answer(key, self._try("read", key, read))
        return NOBODYS if retired else max(1, int(token or 0)) if there else 0

    def retire(self, key: str) -> bool:
        """Remove a fenced record; no former owner can restore it within the hour. Cost: a round trip."""
        arguments = (check_key(key), self._retired + key, _RETIRED_MS)
        reply = self._try("retire", key, lambda client: self._eval(client, "retire", *arguments))
        there = self._answer(key, reply)
        self._unlease(key)
        return bool(there)

    def hold(self, key: str, value: str, seconds: float) -> str:
        """Claim a name and return its current value, by the server's clock. Cost: a round trip."""
        arguments = (self._held + check_key(key), value, round(seconds * 1000))
        reply = self._answer(key, self._try("hold", key, lambda client: self._eval(client, "hold", *arguments)))
        return str(reply.decode())

    def _answer(self, key: str, reply: Any) -> Any:
        if reply is None:
            raise StoreUnavailable(
                f"the store {self.name} must answer before a window's version counts, and did not for {key}; try again, "
                "and look at its server"
            )
        return reply

    def stats(self) -> StoreStats:
        """Return this process's counters, and the tenant's items and bytes, 0 where the server cannot be reached."""
        items, size = self._try("read", "its index", lambda client: self._eval(client, "stats")) or (0, 0)
        return self._tally.stats(items, size)

    def close(self) -> None:
        """Close the connections. Idempotent; later calls raise ValueError."""
        if not self._closed:
            if self._renewal is not None:
                self._renewal.set()
                self._try("release", "leases", lambda client: self._eval(client, "restore", self._holder))
            self._closed = True
            self._client.close()

    def _eval(self, client: Any, command: str, *arguments: Any) -> Any:
        return client.evalsha(_SHA, len(_INDEX), *self._index, command, self._values, *arguments)

    def _try(self, action: str, key: str, call: Callable[[Any], Any]) -> Any:
        """Return ``call(client)``; None where the server does not answer or refuses, or during the pause after a failure."""
        self._check_open()
        with self._lock:
            if self._clock() < self._wake:
                self.failures += 1
                return None
        try:
            try:
                result = call(self._client)
            except self._no_script:  # a server that has just started; nothing but a passing value was written
                self._client.script_load(_SCRIPT)
                result = call(self._client)
        except self._errors as error:
            self._log_failure(action, key, error)
            return None
        with self._lock:
            self._pause = self._wake = 0.0
        return result

    def _log_failure(self, action: str, key: str, error: BaseException) -> None:
        with self._lock:
            self.failures += 1
            if isinstance(error, self._gone):
                self._pause = min(max(2 * self._pause, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                self._wake = self._clock() + self._pause
        log.warning("store %s could not %s %s: %s: %s", self.name, action, key, type(error).__name__, error)


def _renew(store: weakref.ref[RedisStore], stop: threading.Event, pause: float) -> None:
    while not stop.wait(pause):
        live_store = store()
        if live_store is None:
            return
        try:
            live_store.renew()
        except ValueError:  # closed meanwhile
            return
        del live_store


def _check_url(url: str) -> str:
    """Return ``url`` without its login, for messages; raise ValueError where it is no address of a Redis database."""
    expected = "a redis store must be redis://[user:password@]host[:port][/db] (rediss:// for TLS)"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{expected}, got one that cannot be read: {error}") from None
    name = f"{parts.scheme}://{parts.hostname or ''}:{6379 if port is None else port}/{parts.path.strip('/') or 0}"
    database = parts.path.removeprefix("/")
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{expected}, got {name!r}{' with options' if parts.query or parts.fragment else ''}")
    if database and not (database.isascii() and database.isdigit()):
        raise ValueError(f"{expected} with a number as db, got {name!r}")
    return name
