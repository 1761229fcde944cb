-- Run operations of the store one after another.
--
--   redis-cli --eval operations.lua '{cpkit}:' , '' create 1
--   redis-cli --eval operations.lua '{cpkit}:' , '' append t '' '{"a": 1}' ''
--   redis-cli --eval operations.lua '{cpkit}:' , '' claim t call tool '{}' key
--   redis-cli --eval operations.lua '{cpkit}:' , '' find key
--   redis-cli --eval operations.lua '{cpkit}:' , '' list - + 100 0
--
-- KEYS     what all keys of the store start with; see schema.py. No key has this name, so
--          a node of a cluster refuses the script while the slot is on its way to another
-- ARGV     what the key schema has to be, or '' for anything; then for each operation its
--          name and its arguments
-- Returns  for each operation its outcome, which may be a conflict or the holder of a key.
--          The script stops at the first error and then returns
--          {'failed', error, number of the operation, 1 if anything was written}
--
-- Redis does not roll a script back. What refuses a write (memory, a disk error, a
-- replica) refuses the first write of the script. So an error after a write means that
-- a stored value is damaged.
--
-- Messages are JSON texts, one a line. Items are keys and values of extra by turns, one
-- a line. Numbers of Lua are doubles: times and versions stay below 2^53.

local BASE = KEYS[1]
local SCHEMA, THREADS, ERASED = BASE .. 'schema', BASE .. 'threads', BASE .. 'erased'
-- unpack() puts its values on Lua's stack, which holds 8,000. An even number, for items.
local CHUNK = 4000
-- A call's record, up to its args.
local HEAD = '^((%d+%z(%d+)%z([^%z]+)%z[^%z]+%z(%d+)%z)(%l+)%z(%d*)%z)'
-- The id and the record of a restored call.
local CALL = '([^%z]+)%z(' .. string.rep('[^%z]*%z', 8) .. '[^%z]*)%z'

local call = redis.call
local clock = call('TIME')
local NOW = clock[1] * 1000000 + clock[2]
local NOW_TEXT = string.format('%.0f', NOW)
local has_written = false
local changed = {}

local function write(...)
  local answer = call(...)
  has_written = true
  return answer
end

local function key_of(kind, id)
  return BASE .. kind .. ':' .. id
end

local function corrupt(what)
  error('CORRUPT ' .. what, 0)
end

-- End an operation, before it writes, unless a version is the expected one; '' is any.
local function expect(expected, version)
  if expected ~= '' and tonumber(expected) ~= version then
    error({'conflict', version})
  end
end

-- Call a command with the lines of a text, if it has any, as its last arguments.
local function write_lines(command, key, text)
  local lines, at, answer = {}, text ~= '' and 1, nil

  while at do
    local stop = string.find(text, '\n', at, true)
    lines[#lines + 1] = string.sub(text, at, (stop or 0) - 1)
    at = stop and stop + 1

    if #lines == CHUNK or not at then
      answer = write(command, key, unpack(lines))
      lines = {}
    end
  end

  return answer
end

-- Return when a thread changed last, nil for a missing thread, and its first position.
local function state_of(thread)
  local times = key_of('t', thread)
  local updated, first = unpack(call('HMGET', times, 'updated', 'first'))
  return updated and (tonumber(updated) or corrupt('no time in ' .. times)), first or 0
end

local function version_of(thread, first)
  return (first or select(2, state_of(thread))) + call('LLEN', key_of('m', thread))
end

-- Note that a thread changes now, and put a new one on the list. ``updated`` is when it
-- changed last.
local function stamp(thread, updated)
  changed[thread] = true

  if updated then
    -- Later than before, even if the clock is not: readers and watchers compare it.
    write('HSET', key_of('t', thread), 'updated', math.max(NOW, updated + 1))
  else
    write('ZADD', THREADS, 0, thread)
    write('ZREM', ERASED, thread)
    write('HSET', key_of('t', thread), 'created', NOW, 'updated', NOW)
  end
end

-- Return a call's record, or false.
local function recorded(thread, call_id)
  return call('HGET', key_of('p', thread), call_id)
    or call('HGET', key_of('c', thread), call_id)
end

-- Return the fields of a record, and what it is without args and result.
local function parse(record)
  local kept, head, attempt, key, issued, status, resolved = string.match(record, HEAD)

  return {
    kept = (kept or corrupt('the record of a call')) .. '\0', head = head, attempt = attempt,
    key = key, issued = issued, status = status, resolved = resolved,
  }
end

-- Return the number of a key's newest attempt, and {'call', thread, id, record}; or 0.
local function newest_of(key)
  local register = key_of('k', key)
  local newest = call('ZREVRANGE', register, 0, 0, 'WITHSCORES')

  if not newest[1] then
    return 0
  end

  local thread, call_id = string.match(newest[1], '^([^%z]+)%z([^%z]+)$')
  local record = thread and recorded(thread, call_id)
    or corrupt('no such call as in ' .. register)
  return tonumber(newest[2]), {'call', thread, call_id, record}
end

local operations = {}

-- ``expected`` is a version, or '' for any.
function operations.append(thread, expected, messages, items)
  local updated, first = state_of(thread)
  local version = (expected ~= '' or messages == '') and version_of(thread, first)
  expect(expected, version)

  if messages == '' and items == '' then
    return version
  end

  local length = write_lines('RPUSH', key_of('m', thread), messages)
  write_lines('HSET', key_of('x', thread), items)
  stamp(thread, updated)
  return length and first + length or version
end

function operations.merge(thread, items)
  operations.append(thread, '', '', items)
  return false
end

function operations.claim(thread, call_id, tool, args, key)
  local known = recorded(thread, call_id)

  if known then
    return {'call', thread, call_id, known}
  end

  local attempt, newest = newest_of(key)

  if newest and parse(newest[4]).status ~= 'failed' then
    return newest
  end

  local updated = state_of(thread)
  local pending = key_of('p', thread)
  local sequence = call('HLEN', pending) + call('HLEN', key_of('c', thread)) + 1
  local record = {sequence, attempt + 1, key, tool, NOW_TEXT, 'issued', '', args, ''}
  write('HSET', pending, call_id, table.concat(record, '\0'))
  write('ZADD', key_of('k', key), attempt + 1, thread .. '\0' .. call_id)
  stamp(thread, updated)
  return false
end

function operations.resolve(thread, call_id, status, result)
  local record = recorded(thread, call_id)
  local fields = record and parse(record)

  if not fields then
    return false
  elseif fields.status == 'issued' then
    -- An issued call has no result, so its args end the record; an erased one has none.
    local args = string.sub(record, #fields.kept, -2)
    record = fields.head .. table.concat(
      {status, NOW_TEXT, args, args ~= '' and result or ''}, '\0')
    local updated = state_of(thread)
    write('HSET', key_of('c', thread), call_id, record)

    if args ~= '' then
      write('HDEL', key_of('p', thread), call_id)
      stamp(thread, updated)
    end
  end

  return {'call', thread, call_id, record}
end

-- ``forget`` is '1' to remove the calls too, and so to free their keys.
function operations.erase(thread, forget, expected)
  local erased = {}
  expect(expected, version_of(thread))

  for kind in string.gmatch('pc', '.') do
    local calls = call('HGETALL', key_of(kind, thread))

    for at = 1, #calls, 2 do
      erased[calls[at]] = parse(calls[at + 1])
    end
  end

  for kind in string.gmatch('mxtpc', '.') do
    write('UNLINK', key_of(kind, thread))
  end

  for call_id, fields in pairs(erased) do
    if forget == '1' then
      write('ZREM', key_of('k', fields.key), thread .. '\0' .. call_id)
    else
      write('HSET', key_of('c', thread), call_id, fields.kept)
    end
  end

  changed[thread] = true
  write('ZREM', THREADS, thread)
  write('ZREM', ERASED, thread)

  if forget == '0' and next(erased) then
    write('ZADD', ERASED, 0, thread)
  end

  return false
end

-- Remove the messages before a position, if there are any, and return how many.
function operations.trim(thread, before, expected)
  local _, first = state_of(thread)
  local version = version_of(thread, first)
  local removed = math.max(0, math.min(tonumber(before), version) - first)
  expect(expected, version)

  if removed > 0 then
    -- LTRIM first: a server without memory would refuse the HSET.
    write('LTRIM', key_of('m', thread), removed, -1)
    write('HSET', key_of('t', thread), 'first', first + removed)
  end

  return removed
end

-- Erase the calls with an outcome from before a time, and return how many.
function operations.erase_calls(thread, before, expected)
  local calls, erased = call('HGETALL', key_of('c', thread)), 0
  expect(expected, version_of(thread))

  for at = 1, #calls, 2 do
    local fields = parse(calls[at + 1])
    local ended = tonumber(fields.resolved)

    if ended and ended < tonumber(before) and calls[at + 1] ~= fields.kept then
      write('HSET', key_of('c', thread), calls[at], fields.kept)
      erased = erased + 1
    end
  end

  return erased
end

-- End an operation, before it writes, unless a restored call may have its attempt of its
-- key: all attempts differ, and all but the newest have failed.
local function expect_free(fields)
  local last, newest = newest_of(fields.key)

  if newest then
    local same = call('ZRANGEBYSCORE', key_of('k', fields.key), fields.attempt, fields.attempt)
    local older = last < tonumber(fields.attempt) and parse(newest[4]) or fields

    if same[1] or older.status ~= 'failed' then
      error({'held', fields.key, newest[2]})
    end
  end
end

-- ``created`` is '' for an id that has nothing but erased calls. ``texts`` are the ids and
-- records of the calls; a NUL ends each field.
function operations.restore(thread, created, updated, messages, items, texts, first)
  local times, calls = key_of('t', thread), {}

  if call('EXISTS', times, key_of('c', thread)) > 0 then
    return {'conflict', version_of(thread)}
  end

  for call_id, record in string.gmatch(texts, CALL) do
    local fields = parse(record)
    expect_free(fields)
    calls[#calls + 1] = {call_id, record, fields}
  end

  write_lines('RPUSH', key_of('m', thread), messages)
  write_lines('HSET', key_of('x', thread), items)

  for _, entry in ipairs(calls) do
    local call_id, record, fields = unpack(entry)
    local kind = fields.status == 'issued' and record ~= fields.kept and 'p' or 'c'
    write('HSET', key_of(kind, thread), call_id, record)
    write('ZADD', key_of('k', fields.key), fields.attempt, thread .. '\0' .. call_id)
  end

  changed[thread] = true

  if created == '' then
    write('ZADD', ERASED, 0, thread)
  else
    write('ZADD', THREADS, 0, thread)
    write('HSET', times, 'created', created, 'updated', updated, 'restored', NOW)

    if first ~= '0' then
      write('HSET', times, 'first', first)
    end
  end

  return false
end

-- Tell listeners, if there are any, which threads the operations before have changed.
function operations.announce()
  local channel, ids = BASE .. 'changes', {}
  -- A user without the rights gets errors here.
  local listeners = redis.pcall('PUBSUB', 'NUMSUB', channel)[2] or 0

  for thread in pairs(changed) do
    ids[#ids + 1] = thread
  end

  if listeners > 0 and ids[1] then
    redis.pcall('PUBLISH', channel, table.concat(ids, '\0'))
  end

  return false
end

-- Return the newest call of a key.
function operations.find(key)
  local _, newest = newest_of(key)
  return newest or false
end

-- Return a thread's id, version and times: created, updated and restored. A missing
-- thread has no times.
function operations.row(thread)
  local found = call('HMGET', key_of('t', thread), 'created', 'updated', 'restored', 'first')
  local created, updated, restored, first = unpack(found)
  return {thread, version_of(thread, first or 0), created, updated, restored}
end

-- The bounds are as ZRANGEBYLEX takes them. With '1' it returns as many ids too, after the
-- threads, that have nothing but erased calls.
function operations.list(low, high, limit, erased)
  local rows = {}

  for _, thread in ipairs(call('ZRANGEBYLEX', THREADS, low, high, 'LIMIT', 0, limit)) do
    rows[#rows + 1] = operations.row(thread)
  end

  if erased == '1' then
    for _, thread in ipairs(call('ZRANGEBYLEX', ERASED, low, high, 'LIMIT', 0, limit)) do
      local created, updated = math.huge, 0

      for _, record in ipairs(call('HVALS', key_of('c', thread))) do
        local fields = parse(record)
        created = math.min(created, fields.issued)
        updated = math.max(updated, fields.issued, tonumber(fields.resolved) or 0)
      end

      rows[#rows + 1] = {thread, 0, created, updated}
    end
  end

  return rows
end

-- Set the schema of a new store, and return the store's. Each kind of write is made once,
-- to no effect: a user that may not make one is refused here, and not in the middle of an
-- operation.
function operations.create(schema)
  local key = BASE .. 'rehearsal'
  -- A server that was killed here earlier may have kept half of this.
  call('UNLINK', key)
  call('LTRIM', key, 0, 0)
  call('HDEL', key, 'field')
  call('ZREM', key, 'member')
  call('RPUSH', key, 'element')
  call('UNLINK', key)
  call('HSET', key, 'field', 'value')
  call('UNLINK', key)
  call('ZADD', key, 0, 'member')
  call('UNLINK', key)

  if call('SET', SCHEMA, schema, 'NX') and call('EXISTS', THREADS, ERASED) > 0 then
    call('UNLINK', SCHEMA)
    error('LOST ' .. SCHEMA .. ' is missing, and the threads are there', 0)
  end

  return call('GET', SCHEMA)
end

local ARGUMENTS = {
  append = 4, merge = 2, claim = 5, resolve = 4, erase = 3, trim = 3, erase_calls = 3,
  restore = 7, announce = 0, find = 1, row = 1, list = 4, create = 1,
}
local outcomes, at = {}, 2

if ARGV[1] ~= '' and call('GET', SCHEMA) ~= ARGV[1] then
  return {'failed', 'VANISHED ' .. SCHEMA .. ' is not what it was', 0, 0}
end

while ARGV[at] do
  local name, last = ARGV[at], at + ARGUMENTS[ARGV[at]]
  local done, outcome = pcall(operations[name], unpack(ARGV, at + 1, last))

  -- A raised {'conflict', …} is the outcome of its operation; the others go on.
  if not done and not outcome[1] then
    -- Redis 7 raises a table, Redis 6.2 a string.
    local text = type(outcome) == 'table' and outcome.err or outcome
    return {'failed', text, #outcomes, has_written and 1 or 0}
  end

  outcomes[#outcomes + 1] = outcome
  at = last + 1
end

return outcomes
