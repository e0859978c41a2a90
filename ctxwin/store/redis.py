"""A store in a Redis server, shared by processes and machines.

A value is one string: a sealed record (`ctxwin.store.codec.Seal`), so that whatever else stands there is a miss. The index
changes in the same transaction as the value, by Lua scripts that run as a whole or not at all. redis-py is imported when
a store is opened.

The index has three keys: ``used`` (sorted set: key by last use), ``sizes`` (hash: bytes by key) and ``expires`` (sorted
set: key by time, ms). Two fields of ``sizes`` count for the whole: their names hold a blank, which no key may. All names
share a hash tag, so that they stay in one slot.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from ctxwin.errors import StoreCorrupt
from ctxwin.extras import optional_imports
from ctxwin.hashing import digest
from ctxwin.store.base import Store, StoreStats, Tally, check_key, check_limits, check_value
from ctxwin.store.codec import ForeignRecordError, Seal

log = logging.getLogger(__name__)

_LARGEST: Final = 512 << 20  # of a Redis string
_UNINDEXED_MS: Final = 60_000
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0

_COMMON: Final = """
local used, sizes, expires = KEYS[1], KEYS[2], KEYS[3]
local values = ARGV[1]
local TOTAL, CLOCK = ' total', ' clock'

local function account(key, size)
  local old = tonumber(redis.call('HGET', sizes, key) or 0)
  redis.call('HSET', sizes, key, size)
  redis.call('HINCRBY', sizes, TOTAL, size - old)
end

local function drop(key)
  local size = tonumber(redis.call('HGET', sizes, key) or 0)
  redis.call('UNLINK', values .. key)
  redis.call('HDEL', sizes, key)
  redis.call('HINCRBY', sizes, TOTAL, -size)
  redis.call('ZREM', used, key)
  redis.call('ZREM', expires, key)
  return size
end

local function use(key)
  redis.call('ZADD', used, redis.call('HINCRBY', sizes, CLOCK, 1), key)
end

local function expire()
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  for _, key in ipairs(redis.call('ZRANGEBYSCORE', expires, '-inf', now)) do drop(key) end
  return now
end
"""

# ARGV: values, key. Returns 1 where it is held, which then counts as a use. The index mends itself: a value that Redis
# dropped leaves it, one whose entry was lost comes back into it.
_TOUCH: Final = """
expire()
local key = ARGV[2]
local size = redis.call('STRLEN', values .. key)
if size == 0 then drop(key) return 0 end
account(key, size)
use(key)
return 1
"""

# KEYS[4]: the value under a passing name and with a short time to live, taken off last. ARGV: values, key, bytes, limit, ttl in
# ms (0: none), leased keys. Returns {1 stored | 0 refused, evictions}.
_PUT: Final = """
local passing, key = KEYS[4], ARGV[2]
local size, limit, ttl = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = expire()
local evicted = 0
local total = tonumber(redis.call('HGET', sizes, TOTAL) or 0)
local excess = total - tonumber(redis.call('HGET', sizes, key) or 0) + size - limit
if excess > 0 then
  local leased, kept = {}, size
  for i = 6, #ARGV do
    leased[ARGV[i]] = true
    if ARGV[i] ~= key then kept = kept + tonumber(redis.call('HGET', sizes, ARGV[i]) or 0) end
  end
  if kept > limit then
    redis.call('UNLINK', passing)
    return {0, 0}
  end
  local at = 0
  while excess > 0 do
    local victim = redis.call('ZRANGE', used, at, at)[1]
    if not victim then break end
    if leased[victim] or victim == key then
      at = at + 1
    else
      excess = excess - drop(victim)
      evicted = evicted + 1
    end
  end
end
redis.call('RENAME', passing, values .. key)
account(key, size)
use(key)
if ttl > 0 then
  redis.call('PEXPIRE', values .. key, ttl)
  redis.call('ZADD', expires, now + ttl, key)
else
  redis.call('ZREM', expires, key)
  redis.call('PERSIST', values .. key)
end
return {1, evicted}
"""

# ARGV: values, key. Returns 1 where there was one.
_DELETE: Final = """
expire()
local held = redis.call('EXISTS', values .. ARGV[2])
drop(ARGV[2])
return held
"""

# ARGV: values, key, its last bytes. Deletes exactly what was read: another process may have replaced it meanwhile.
_REJECT: Final = """
local name = values .. ARGV[2]
if redis.call('TYPE', name).ok == 'string' and redis.call('GETRANGE', name, -32, -1) ~= ARGV[3] then return 0 end
drop(ARGV[2])
return 1
"""

_LIST: Final = """
expire()
return redis.call('ZRANGE', used, 0, -1)
"""

_STATS: Final = """
expire()
return {redis.call('ZCARD', used), tonumber(redis.call('HGET', sizes, TOTAL) or 0)}
"""


class RedisStore(Store):
    """Blobs in a Redis server (6 or newer); safe for threads, and for processes and machines that share it.

    Args:
        url: ``redis://[user:password@]host[:port][/db]``, ``rediss://`` for TLS.
        max_bytes: limit on the blobs' bytes of this tenant; the least recently used leave first, leased ones stay. Leave the
            server's ``maxmemory-policy`` at ``noeviction``: whatever it evicts by itself is a miss here.
        ttl: seconds after its last `put` at which a value becomes a miss; None keeps it.
        tenant: has its own key space; "" is a tenant like any other.
        secret: seals the records with a keyed code (`codec.Seal`); None with a checksum.
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

    Every call is a round trip. Put a ``memory:`` tier in front for what is read often. A blob of
    over 512 MiB is refused: Redis takes no more.
    """

    def __init__(
        self,
        url: str,
        max_bytes: int = 2 << 30,
        ttl: float | None = None,
        tenant: str = "",
        timeout: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        secret: bytes | None = None,
    ) -> None:
        check_limits(max_bytes, ttl)
        self.name = _checked(url)
        self.max_bytes = max_bytes
        self.ttl = ttl
        self.failures = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._seal = Seal(secret)
        self._tally = Tally()
        self._pause = self._wake = 0.0
        space = f"ctxwin:{{{digest('tenant', tenant)}}}:"
        self._values = space + "value:"
        self._index = [space + name for name in ("used", "sizes", "expires")]
        self._passing = space + "passing:"
        with optional_imports():
            import redis  # type: ignore[import-not-found, unused-ignore]
            from redis.backoff import NoBackoff  # type: ignore[import-not-found, unused-ignore]
            from redis.retry import Retry  # type: ignore[import-not-found, unused-ignore]
        self._errors = (redis.RedisError, OSError)
        self._gone = (redis.ConnectionError, redis.TimeoutError, OSError)
        self._refused = redis.ResponseError
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

    def get(self, key: str) -> bytes | None:
        """The value, or None. Cost: one round trip, one SHA-256 (about 1 GB/s), one copy."""
        value = self._read(check_key(key))
        self._tally.count("misses" if value is None else "hits")
        return value

    def _read(self, key: str) -> bytes | None:
        def both(client: Any) -> Any:
            with client.pipeline(transaction=True) as pipe:
                pipe.get(self._values + key)
                self._eval(pipe, _TOUCH, key)
                return pipe.execute(raise_on_error=False)

        got = self._try("read", key, both)
        if got is None:
            return None
        blob, touched = got
        try:
            if isinstance(blob, self._refused) and str(blob).startswith("WRONGTYPE"):
                raise StoreCorrupt("it is not a string")
            if isinstance(blob, Exception) or isinstance(touched, Exception):
                self._failed("read", key, blob if isinstance(blob, Exception) else touched)
            return None if blob is None or isinstance(blob, Exception) else self._seal.open(key, blob)
        except ForeignRecordError as error:
            self._tally.count("foreign")
            log.warning("stored blob %s in %s is not read, and stays: %s", key, self.name, error)
        except StoreCorrupt as error:
            self._tally.count("corrupt")
            log.warning("stored blob %s in %s is corrupt and was deleted: %s", key, self.name, error)
            tail = blob[-32:] if isinstance(blob, bytes) else b""
            self._try("delete", key, lambda client: self._eval(client, _REJECT, key, tail))
        return None

    def contains(self, key: str) -> bool:
        """Whether `get` would find a value; counts as a use. The blob is not read."""
        check_key(key)
        return bool(self._try("look for", key, lambda client: self._eval(client, _TOUCH, key)))

    def list(self, prefix: str = "") -> Iterator[str]:
        """A sorted snapshot of the keys; empty where the server cannot be reached."""
        found = self._try("list", "its keys", lambda client: self._eval(client, _LIST)) or []
        return iter(sorted(key for key in (raw.decode("ascii", "replace") for raw in found) if key.startswith(prefix)))

    def put(self, key: str, value: bytes) -> bool:
        """Stores ``value``; False where it cannot fit beside what is leased here, or the server does not take it.

        Cost: one SHA-256, one copy, a round trip with the value and the leased keys.
        """
        check_key(key)
        check_value(value)
        self._check_open()
        head, code = self._seal.close(key, value)
        blob = b"".join((head, value, code))
        if len(blob) > min(self.max_bytes, _LARGEST):
            return False
        passing = self._passing + secrets.token_hex(16)
        ttl = 0 if self.ttl is None else max(1, round(self.ttl * 1000))
        arguments = (key, len(blob), self.max_bytes, ttl, *sorted(self._tally.leased()))

        def both(client: Any) -> Any:
            """Value and index in one transaction; the value arrives under a passing name, so that a refusal changes nothing."""
            with client.pipeline(transaction=True) as pipe:
                # A script that fails half-way is not undone: what no index knows must go by itself.
                pipe.set(passing, blob, px=_UNINDEXED_MS)
                pipe.eval(_COMMON + _PUT, 4, *self._index, passing, self._values, *arguments)
                return pipe.execute()[1]

        stored, evicted = self._try("write", key, both) or (0, 0)
        self._tally.count("evictions", evicted)
        self._tally.count("puts", stored)
        return bool(stored)

    def delete(self, key: str) -> bool:
        """Removes ``key``, leased or not; False where there was none."""
        check_key(key)
        held = bool(self._try("delete", key, lambda client: self._eval(client, _DELETE, key)))
        if held:
            self._tally.drop(key)
        return held

    def lease(self, key: str) -> bool:
        """Protects ``key`` from this process's evictions; another process only sees it as recently used."""
        check_key(key)
        self._tally.lease(key)  # first, so that no thread evicts it while the server is asked
        held = False
        try:
            held = self.contains(key)
        finally:
            if not held:
                self.release(key)
        return held

    def release(self, key: str) -> None:
        self._tally.release(key)

    def stats(self) -> StoreStats:
        """Counters of this process; items and bytes of the tenant, 0 where the server cannot be reached."""
        items, size = self._try("read", "its index", lambda client: self._eval(client, _STATS)) or (0, 0)
        return self._tally.stats(items, size)

    def verify(self) -> tuple[int, int]:
        """Reads every blob; (good, corrupt), values that are gone included. Corrupt ones are deleted, foreign ones stay.

        Cost: a read of the tenant's whole store. What the server does not answer counts as neither.
        """
        good = corrupt = 0
        for key in self.list():
            passed_over = self.failures + self._tally["foreign"]
            if self._read(key) is not None:
                good += 1
            elif self.failures + self._tally["foreign"] == passed_over:
                corrupt += 1
        return good, corrupt

    def close(self) -> None:
        """Closes the connections; idempotent. Later calls raise ValueError."""
        if not self._closed:
            self._closed = True
            self._client.close()

    def _eval(self, client: Any, script: str, *arguments: Any) -> Any:
        return client.eval(_COMMON + script, 3, *self._index, self._values, *arguments)

    def _try(self, what: str, key: str, call: Callable[[Any], Any]) -> Any:
        """What ``call`` returns; None where the server does not answer, refuses, or is being left alone."""
        self._check_open()
        with self._lock:
            if self._clock() < self._wake:
                self.failures += 1
                return None
        try:
            result = call(self._client)
        except self._errors as error:
            self._failed(what, key, error)
            return None
        with self._lock:
            self._pause = self._wake = 0.0
        return result

    def _failed(self, what: str, key: str, error: BaseException) -> None:
        with self._lock:
            self.failures += 1
            if isinstance(error, self._gone):
                self._pause = min(max(2 * self._pause, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                self._wake = self._clock() + self._pause
        log.warning("store %s could not %s %s: %s: %s", self.name, what, key, type(error).__name__, error)


def _checked(url: str) -> str:
    """``url`` without its login, for messages; ValueError where it is no address of a Redis database."""
    wanted = "a redis store must be redis://[user:password@]host[:port][/db] (rediss:// for TLS)"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{wanted}, got one that cannot be read: {error}") from None
    name = f"{parts.scheme}://{parts.hostname or ''}:{6379 if port is None else port}/{parts.path.strip('/') or 0}"
    database = parts.path.removeprefix("/")
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{wanted}, got {name!r}{' with options' if parts.query or parts.fragment else ''}")
    if database and not (database.isascii() and database.isdigit()):
        raise ValueError(f"{wanted} with a number as db, got {name!r}")
    return name
