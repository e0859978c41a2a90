"""The Lua that keeps a tenant's index in Redis; each script runs as a whole or not at all.

Three keys beside the values: ``used`` (sorted set: key by last use), ``sizes`` (hash: bytes by key) and ``expires`` (sorted set:
key by time, ms). Two fields of ``sizes`` count for the whole: their names hold a blank, which no key may. All names share a hash
tag, so that they stay in one slot.
"""

from __future__ import annotations

from typing import Final

COMMON: Final = """
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
TOUCH: Final = """
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
PUT: Final = """
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
