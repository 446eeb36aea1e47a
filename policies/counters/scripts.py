"""The Lua that decides on Redis or Valkey: `rules.py` and `windows.settle_window` again, by the server's clock.

A bucket is a string "level at", a calendar counter "used start", concurrency a sorted set of members by expiry.
Every figure is an integer below 2**53. Needs effects replication (Redis 5 or newer, any Valkey).
"""

from __future__ import annotations

import hashlib

SERVER_CLOCK = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
"""

_SHARED = """
local function pair(raw)
  local gap = string.find(raw, ' ', 1, true)
  return tonumber(string.sub(raw, 1, gap - 1)), tonumber(string.sub(raw, gap + 1))
end
local function keep_bucket(key, level, limit)
  if limit > 0 and level > 0 then
    redis.call('SET', key, string.format('%.0f %.0f', level, now), 'PX', math.floor(level / limit) + 1000)
  else
    redis.call('DEL', key)
  end
end
local function bucket(key, limit)
  local raw = redis.call('GET', key)
  if not raw then return 0 end
  local level, at = pair(raw)
  if now > at then
    level = math.max(0, level - (now - at) * limit)
  elseif now < at then -- the clock went back: drain from here on, not only when it has come as far again
    keep_bucket(key, level, limit)
  end
  return level
end
local function keep_calendar(key, used, start, ends)
  local text = string.format('%.0f %.0f', used, start)
  if ends == 0 then
    redis.call('SET', key, text)
  else
    redis.call('SET', key, text, 'PX', math.max(ends - now, 0) + 86400000)
  end
end
"""

_EXPIRE = """
local function expire(key, ttl_ms) -- also what a clock that went back would keep for longer than a lease lasts
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', key, now + ttl_ms + 1, '+inf')) do
    redis.call('ZADD', key, now + ttl_ms, member)
  end
end
"""

_ADMIT = """
-- per key: kind, hard, limit, cost, x, y
-- bucket: x window_ms; calendar: x start, y end (0: never); slots: x ttl_ms, y member
-- answer: {now, number of the refusing rule or 0, wait_ms or -1, then per key the level before and its mark}
local answer, levels, starts = {now, 0, -1}, {}, {}
for i = 1, #KEYS do
  local b = (i - 1) * 6
  local kind, hard, limit, cost = ARGV[b + 1], ARGV[b + 2] == '1', tonumber(ARGV[b + 3]), tonumber(ARGV[b + 4])
  local x, y = tonumber(ARGV[b + 5]), ARGV[b + 6]
  local level, mark, over, wait = 0, now, 0, 0
  if kind == 'b' then
    level = bucket(KEYS[i], limit)
    over = level + cost * x - limit * x
    if over > 0 and limit > 0 then
      wait = math.floor(over / limit)
      if wait * limit < over then wait = wait + 1 end
    end
  elseif kind == 'c' then
    local start, ends = x, tonumber(y)
    local raw = redis.call('GET', KEYS[i])
    mark = start
    if raw then
      local used, stored = pair(raw)
      if start > stored and start <= now then
        level = 0
      elseif ends ~= 0 and stored > ends then
        level = used
        keep_calendar(KEYS[i], used, start, ends)
      else
        level, mark = used, stored
      end
    end
    over = level + cost - limit
    wait = ends == 0 and -1 or math.max(ends - now, 1)
  else
    expire(KEYS[i], x)
    level = redis.call('ZCARD', KEYS[i])
    over, wait = level + 1 - limit, 1000
  end
  levels[i], starts[i] = level, mark
  answer[2 + 2 * i], answer[3 + 2 * i] = level, mark
  if hard and over > 0 and (answer[2] == 0 or answer[3] >= 0) then
    if cost > limit then wait = -1 end
    if answer[2] == 0 or wait < 0 or wait > answer[3] then answer[2], answer[3] = i, wait end
  end
end
if answer[2] ~= 0 then return answer end
for i = 1, #KEYS do
  local b = (i - 1) * 6
  local kind, limit, cost = ARGV[b + 1], tonumber(ARGV[b + 3]), tonumber(ARGV[b + 4])
  local x, y = tonumber(ARGV[b + 5]), ARGV[b + 6]
  if kind == 'b' then
    keep_bucket(KEYS[i], levels[i] + cost * x, limit)
  elseif kind == 'c' then
    keep_calendar(KEYS[i], levels[i] + cost, starts[i], tonumber(y))
  else
    redis.call('ZADD', KEYS[i], now + x, y)
    redis.call('PEXPIRE', KEYS[i], x + 1000)
  end
end
return answer
"""

_ADJUST = """
-- per key: kind, limit, change, level_after, mark, y
-- bucket: level_after -1 gives back without a bound; calendar: y end; slots: y member, which is removed
-- answer: per key the level before and after (-1: nothing done)
local answer = {}
for i = 1, #KEYS do
  local b = (i - 1) * 6
  local kind, limit, change = ARGV[b + 1], tonumber(ARGV[b + 2]), tonumber(ARGV[b + 3])
  local level_after, mark, y = tonumber(ARGV[b + 4]), tonumber(ARGV[b + 5]), ARGV[b + 6]
  local before, after = -1, -1
  if kind == 'b' then
    before = bucket(KEYS[i], limit)
    if change < 0 and level_after >= 0 then
      local left = level_after
      if now > mark then left = math.max(0, level_after - (now - mark) * limit) end
      change = -math.min(-change, left)
    end
    after = math.max(0, before + change)
    keep_bucket(KEYS[i], after, limit)
  elseif kind == 'c' then
    local raw = redis.call('GET', KEYS[i])
    local used, start = 0, -1
    if raw then used, start = pair(raw) end
    if start == mark or (not raw and change > 0) then
      before, after = used, math.max(0, used + change)
      keep_calendar(KEYS[i], after, mark, tonumber(y))
    end
  else
    redis.call('ZREM', KEYS[i], y)
  end
  answer[2 * i - 1], answer[2 * i] = before, after
end
return answer
"""

_BEAT = """
-- one sorted set; ttl_ms, then members: each stays ttl_ms longer. answer: {now, live members}
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + tonumber(ARGV[1]), ARGV[i]) end
expire(KEYS[1], tonumber(ARGV[1]))
redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[1]) + 1000)
return {now, redis.call('ZCARD', KEYS[1])}
"""


class Script:
    """A script and the name under which the server keeps it once loaded."""

    __slots__ = ("sha", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class Scripts:
    """The three scripts on one clock: Lua that sets `now` to milliseconds."""

    def __init__(self, clock: str = SERVER_CLOCK) -> None:
        self.admit = Script(clock + _SHARED + _EXPIRE + _ADMIT)
        self.adjust = Script(clock + _SHARED + _ADJUST)
        self.beat = Script(clock + _EXPIRE + _BEAT)

    def texts(self) -> tuple[str, ...]:
        return (self.admit.text, self.adjust.text, self.beat.text)
