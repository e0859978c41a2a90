"""Lua scripts of `ctxwin.store.redis`, which the server runs without interleaving other commands.

KEYS of every script are the index, in the order of `INDEX`; ARGV[1] is what stands in front of a value's name.
"""

from __future__ import annotations

from typing import Final

INDEX: Final = ("used", "sizes", "expires", "tokens", "holders")

COMMON: Final = """
local used, sizes, expires, tokens, holders = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
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
  redis.call('HINCRBY', sizes, TOTAL, 0 - size)  -- not -size: minus zero is no integer to Redis
  redis.call('ZREM', used, key)
  redis.call('ZREM', expires, key)
  redis.call('HDEL', tokens, key)
  return size
end

local function use(key)
  redis.call('ZADD', used, redis.call('HINCRBY', sizes, CLOCK, 1), key)
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

local function hold(holder, now, ms)
  redis.call('PEXPIRE', holder, ms)
  redis.call('ZADD', holders, now + ms, holder)
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
redis.call('SADD', ARGV[3], ARGV[2])
hold(ARGV[3], now, ARGV[4])
return 1
"""

# ARGV: values, holder, ms. Renews the leases of a holder.
RENEW: Final = """
hold(ARGV[2], expire(), ARGV[3])
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

# KEYS[6]: the value under a passing name and with a short time to live, taken off last. ARGV: values, key, bytes, limit, ttl in
# ms (0: none), token (0: not fenced), mark of a retired one. Returns {1 stored | 0 refused | -1 another's, evictions}.
PUT: Final = """
local passing, key, token = KEYS[6], ARGV[2], tonumber(ARGV[6])
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
  local leased, kept = {}, size
  redis.call('ZREMRANGEBYSCORE', holders, '-inf', now)
  for _, holder in ipairs(redis.call('ZRANGE', holders, 0, -1)) do
    for _, held in ipairs(redis.call('SMEMBERS', holder)) do
      if held ~= key and not leased[held] then kept = kept + tonumber(redis.call('HGET', sizes, held) or 0) end
      leased[held] = true
    end
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
