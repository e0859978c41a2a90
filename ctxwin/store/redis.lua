-- What `ctxwin.store.redis` has its server do without interleaving other commands.
--
-- ARGV: name of a function in `commands`, what stands in front of a value's name, then the function's arguments.
-- KEYS: the index, see `ctxwin.store.redis`; of `put` also the name under which the value passes.

local used, sizes, expires, tokens, holders, leases = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local values = ARGV[2]
local TOTAL, CLOCK, LEASED, REAPED = ' total', ' clock', 2 ^ 52, 1000
local commands = {}

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
end

local function use(key)
  local score = redis.call('HINCRBY', sizes, CLOCK, 1)
  if redis.call('HEXISTS', leases, key) == 1 then score = score + LEASED end
  redis.call('ZADD', used, score, key)
end

-- Returns whether it is held, which then counts as a use. The index mends itself: a value that Redis dropped leaves it, one
-- whose entry was lost comes back into it.
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

-- Returns 1 where the key is held, which then counts as a use.
function commands.touch(key)
  expire()
  if touch(key) then return 1 end
  return 0
end

-- Returns 1 where the key is held, and leased now.
function commands.lease(key, holder, ms)
  local now = expire()
  if not touch(key) then return 0 end
  lease(holder, key)
  redis.call('ZADD', holders, now + ms, holder)
  return 1
end

-- Ends a holder's leases of the keys that follow in ARGV; there may be more than a function takes.
function commands.release(holder)
  for i = 4, #ARGV do
    if redis.call('SREM', holder, ARGV[i]) == 1 then end_lease(ARGV[i]) end
  end
  return 1
end

-- Renews the leases of a holder, and returns how many there are.
function commands.renew(holder, ms)
  local now = expire()
  redis.call('ZADD', holders, now + ms, holder)
  reap(now)
  return redis.call('SCARD', holder)
end

-- Makes the keys that follow in ARGV the leases of a holder; what is not stored is leased from its next put on.
function commands.restore(holder)
  end_leases(holder, redis.call('SCARD', holder))
  for i = 4, #ARGV do lease(holder, ARGV[i]) end
  return 1
end

-- Returns {new token, value}, or 0.
function commands.claim(key)
  expire()
  if not touch(key) then return 0 end
  return {redis.call('HINCRBY', tokens, key, 1), redis.call('GET', values .. key)}
end

-- Returns 1 where there was one. The mark keeps a former owner from bringing it back.
function commands.retire(key, mark, ms)
  local held = commands.delete(key)
  redis.call('SET', mark, '', 'PX', ms)
  return held
end

-- Returns the value that stands under the name now.
function commands.hold(name, value, ms)
  local standing = redis.call('GET', name) or value
  if standing == value then redis.call('SET', name, standing, 'PX', ms) end
  return standing
end

-- Takes the passing name off the value, last. ttl: in ms, 0 for none; token: 0 where it is not fenced; mark: of a retired one.
-- Returns {1 stored | 0 refused | -1 another's, evictions}.
function commands.put(key, size, limit, ttl, token, mark)
  local passing = KEYS[7]
  size, limit, ttl, token = tonumber(size), tonumber(limit), tonumber(ttl), tonumber(token)
  local now = expire()
  local evicted = 0
  if token > 0 and (tonumber(redis.call('HGET', tokens, key) or 0) > token or redis.call('EXISTS', mark) == 1) then
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
end

-- Returns 1 where there was one.
function commands.delete(key)
  expire()
  local held = redis.call('EXISTS', values .. key)
  drop(key)
  return held
end

-- Deletes exactly what was read, by its last bytes: another process may have replaced it meanwhile.
function commands.reject(key, tail)
  local name = values .. key
  if redis.call('TYPE', name).ok == 'string' and redis.call('GETRANGE', name, -32, -1) ~= tail then return 0 end
  drop(key)
  return 1
end

function commands.list()
  expire()
  return redis.call('ZRANGE', used, 0, -1)
end

function commands.stats()
  expire()
  return {redis.call('ZCARD', used), tonumber(redis.call('HGET', sizes, TOTAL) or 0)}
end

return commands[ARGV[1]](unpack(ARGV, 3, 8))
