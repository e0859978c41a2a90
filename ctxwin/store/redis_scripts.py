"""Lua scripts of `ctxwin.store.redis`, which the server runs without interleaving other commands.

KEYS of every script are the index, in the order of `INDEX`; ARGV[1] is what stands in front of a value's name.
"""

import hashlib
from functools import cache
from typing import Final

INDEX: Final = ("used", "sizes", "expires", "tokens", "holders", "leases")

COMMON: Final = """
local used, sizes, expires, tokens, holders, leases = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local values = ARGV[1]
local TOTAL, CLOCK, LEASED, REAPED = ' total', ' clock', 2 ^ 52, 1000

local function account(key, size)
  local old = tonumber(redis.call('HGET', sizes, key) or 0)
  redis.call('HSET', sizes, key, size)
  redis.call('HINCRBY', sizes, TOTAL, size - old)
end

local function drop(key)
  local size = tonumber(redis.call('HGET', sizes, key) or 0)
  redis.call('UNLINK', values .. key)
  redis.call('HDEL', sizes, key)
  redis.call('HINCRBY', sizes, TOTAL, 0 - size)  -- not -size: minus zero is no integer to Redis
  redis.call('ZREM', used, key)
  redis.call('ZREM', expires, key)
  redis.call('HDEL', tokens, key)
  return size
end

local function use(key)
  local score = redis.call('HINCRBY', sizes, CLOCK, 1)
  if redis.call('HEXISTS', leases, key) == 1 then score = score + LEASED end
  redis.call('ZADD', used, score, key)
end

local function touch(key)
  local size = redis.call('STRLEN', values .. key)
  if size == 0 then drop(key) return false end
  account(key, size)
  use(key)
  return true
end

local function expire()
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  for _, key in ipairs(redis.call('ZRANGEBYSCORE', expires, '-inf', now)) do drop(key) end
  return now
end

local function lease(holder, key)
  local added = redis.call('SADD', holder, key)
  if added == 1 or redis.call('HEXISTS', leases, key) == 0 then redis.call('HINCRBY', leases, key, 1) end
  return touch(key)
end

local function end_lease(key)
  if redis.call('HINCRBY', leases, key, -1) > 0 then return end
  redis.call('HDEL', leases, key)
  if redis.call('ZSCORE', used, key) then use(key) end
end

local function end_leases(holder, most)
  for _, key in ipairs(redis.call('SPOP', holder, most)) do end_lease(key) end
end

-- Ends leases of a process that ended without giving them back, so many at a time.
local function reap(now)
  local dead = redis.call('ZRANGEBYSCORE', holders, '-inf', now, 'LIMIT', 0, 1)[1]
  if not dead then return end
  end_leases(dead, REAPED)
  if redis.call('EXISTS', dead) == 0 then redis.call('ZREM', holders, dead) end
end
"""

# ARGV: values, key. Returns 1 where it is held, which then counts as a use. The index mends itself: a value that Redis
# dropped leaves it, one whose entry was lost comes back into it.
TOUCH: Final = """
expire()
if touch(ARGV[2]) then return 1 end
return 0
"""

# ARGV: values, key, holder, ms. Returns 1 where it is held, and leased now.
LEASE: Final = """
local now = expire()
if not touch(ARGV[2]) then return 0 end
lease(ARGV[3], ARGV[2])
redis.call('ZADD', holders, now + ARGV[4], ARGV[3])
return 1
"""

# ARGV: values, holder, keys. Ends leases of a holder.
RELEASE: Final = """
for i = 3, #ARGV do
  if redis.call('SREM', ARGV[2], ARGV[i]) == 1 then end_lease(ARGV[i]) end
end
return 1
"""

# ARGV: values, holder, ms. Renews the leases of a holder, and returns how many there are.
RENEW: Final = """
local now = expire()
redis.call('ZADD', holders, now + ARGV[3], ARGV[2])
reap(now)
return redis.call('SCARD', ARGV[2])
"""

# ARGV: values, holder, keys. Makes these the leases of a holder; what is not stored is leased from its next put on.
RESTORE: Final = """
end_leases(ARGV[2], redis.call('SCARD', ARGV[2]))
for i = 3, #ARGV do lease(ARGV[2], ARGV[i]) end
return 1
"""

# ARGV: values, key. Returns {new token, value}, or 0.
CLAIM: Final = """
expire()
if not touch(ARGV[2]) then return 0 end
return {redis.call('HINCRBY', tokens, ARGV[2], 1), redis.call('GET', values .. ARGV[2])}
"""

# ARGV: values, key, mark, ms. Returns 1 where there was one. The mark keeps a former owner from bringing it back.
RETIRE: Final = """
expire()
local held = redis.call('EXISTS', values .. ARGV[2])
drop(ARGV[2])
redis.call('SET', ARGV[3], '', 'PX', ARGV[4])
return held
"""

# ARGV: values, name, value, ms. Returns the value that stands there now.
HOLD: Final = """
local standing = redis.call('GET', ARGV[2]) or ARGV[3]
if standing == ARGV[3] then redis.call('SET', ARGV[2], standing, 'PX', ARGV[4]) end
return standing
"""

# KEYS[7]: the value under a passing name and with a short time to live, taken off last. ARGV: values, key, bytes, limit, ttl in
# ms (0: none), token (0: not fenced), mark of a retired one. Returns {1 stored | 0 refused | -1 another's, evictions}.
PUT: Final = """
local passing, key, token = KEYS[7], ARGV[2], tonumber(ARGV[6])
local size, limit, ttl = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = expire()
local evicted = 0
if token > 0 and (tonumber(redis.call('HGET', tokens, key) or 0) > token or redis.call('EXISTS', ARGV[7]) == 1) then
  redis.call('UNLINK', passing)
  return {-1, 0}
end
local total = tonumber(redis.call('HGET', sizes, TOTAL) or 0)
local excess = total - tonumber(redis.call('HGET', sizes, key) or 0) + size - limit
if excess > 0 then
  reap(now)
  local victims, at = {}, 0
  while excess > 0 do
    local victim = redis.call('ZRANGE', used, at, at)[1]
    if not victim or victim ~= key and redis.call('HEXISTS', leases, victim) == 1 then  -- leased ones come last
      redis.call('UNLINK', passing)
      return {0, 0}
    end
    if victim ~= key then
      victims[#victims + 1] = victim
      excess = excess - tonumber(redis.call('HGET', sizes, victim) or 0)
    end
    at = at + 1
  end
  for _, victim in ipairs(victims) do drop(victim) end
  evicted = #victims
end
redis.call('RENAME', passing, values .. key)
account(key, size)
use(key)
if token > 0 then redis.call('HSET', tokens, key, token) end
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
DELETE: Final = """
expire()
local held = redis.call('EXISTS', values .. ARGV[2])
drop(ARGV[2])
return held
"""

# ARGV: values, key, its last bytes. Deletes exactly what was read: another process may have replaced it meanwhile.
REJECT: Final = """
local name = values .. ARGV[2]
if redis.call('TYPE', name).ok == 'string' and redis.call('GETRANGE', name, -32, -1) ~= ARGV[3] then return 0 end
drop(ARGV[2])
return 1
"""

LIST: Final = """
expire()
return redis.call('ZRANGE', used, 0, -1)
"""

STATS: Final = """
expire()
return {redis.call('ZCARD', used), tonumber(redis.call('HGET', sizes, TOTAL) or 0)}
"""

ALL: Final = (TOUCH, LEASE, RELEASE, RENEW, RESTORE, CLAIM, RETIRE, HOLD, PUT, DELETE, REJECT, LIST, STATS)


@cache
def sha(script: str) -> str:
    """Return the name under which a server knows one of the scripts, once it is loaded."""
    return hashlib.sha1((COMMON + script).encode(), usedforsecurity=False).hexdigest()
