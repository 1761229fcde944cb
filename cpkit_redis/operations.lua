-- Run operations of the store one after another, each one wholly or not at all.
--
--   redis-cli --eval operations.lua 'cpkit:{t}:' , cpkit: append t '' '{"a": 1}' ''
--   redis-cli --eval operations.lua 'cpkit:{t}:' , cpkit: claim t call key tool '{}'
--   redis-cli --eval operations.lua 'cpkit:{key}:' , cpkit: find
--   redis-cli --eval operations.lua cpkit:threads , cpkit: list - + 100 0
--
-- KEYS     for each operation the key that it is about: what all keys of its thread
--          start with, unless said otherwise at the operation; see schema.py
-- ARGV     '<prefix>:', then for each operation its name and its arguments
-- Cluster  KEYS are all keys of one slot that the operations may use, first the one that
--          all operations are about. ARGV begins with '', a new token of 16 letters, and
--          the mark that a new thread must have (see `unlisted`). spread.py has the steps
--          that make one write of operations in two slots.
-- Returns  for each operation {word, ...}; {'failed', error} is one of its own
--
-- Messages are JSON texts, one a line. Items are keys and values of extra by turns, one
-- a line. Redis does not roll a script back. So each operation reads every key that it
-- will change before its first change: a key of a wrong type fails it there. Whatever
-- else refuses a write (memory, a disk error, a replica) refuses its first change.

local BASE = ARGV[1]
local CLUSTER = BASE == ''
local TOKEN, MARK = ARGV[2], ARGV[3]
local KINDS = CLUSTER and 'mxtpcw' or 'mxtpc'
local THREADS, ERASED = BASE .. 'threads', BASE .. 'erased'
-- unpack() puts its values on Lua's stack, which holds 8,000. An even number, for items.
local CHUNK = 4000
-- How a call's record begins: up to its tool; it captures attempt, time and key.
local HEAD = '^%d+%z(%d+)%z(%d+)%z([^%z]+)%z[^%z]+%z'

local call = redis.call
local clock = call('TIME')
local NOW = clock[1] * 1000000 + clock[2]

-- The same rule as in schema.py.
local function slot_of(id)
  local escapes = {['%'] = '%25', ['{'] = '%7B', ['}'] = '%7D'}
  return BASE .. '{' .. string.gsub(id, '[%%{}]', escapes) .. '}:'
end

local function corrupt(what)
  error('CORRUPT ' .. what, 0)
end

-- Call a command with the lines of a text as its last arguments.
local function with_lines(command, key, text)
  local stop = string.find(text, '\n', 1, true)

  if not stop then
    return call(command, key, text)
  end

  local lines, at, answer = {}, 1, nil

  while at do
    lines[#lines + 1] = string.sub(text, at, stop and stop - 1)
    at = stop and stop + 1
    stop = at and string.find(text, '\n', at, true)

    if #lines == CHUNK or not at then
      answer = call(command, key, unpack(lines))
      lines = {}
    end
  end

  return answer
end

-- Return when the thread changed last, or nil for a missing thread.
local function last_change(slot, thread)
  local updated = call('HGET', slot .. 't', 'updated')

  if updated then
    return tonumber(updated) or corrupt('no time in ' .. slot .. 't')
  end

  if not CLUSTER then
    call('ZSCORE', THREADS, thread)
    call('ZSCORE', ERASED, thread)
  end

  if call('EXISTS', slot .. 'm') == 1 then
    corrupt('messages, but no ' .. slot .. 't')
  end
end

-- Put a new thread on the list, before anything else of it is written.
local function enlist(slot, thread, before)
  if before then
    return
  elseif not CLUSTER then
    call('ZADD', THREADS, 0, thread)
    call('ZREM', ERASED, thread)
  end

  call('HDEL', slot .. 't', 'first', 'last', 'begun')
end

-- In a cluster the list is in another slot. So a new thread is first marked as begun,
-- then put on the list, and then written if it still has that mark: a deletion removes
-- the mark. Return an answer with the mark where the caller has to enlist the thread.
local function unlisted(slot, before)
  if before or not CLUSTER then
    return nil
  end

  local begun = call('HGET', slot .. 't', 'begun')

  if begun and begun == MARK then
    return nil
  elseif not begun then
    call('HSET', slot .. 't', 'begun', TOKEN)
  end

  return {'unlisted', begun or TOKEN}
end

-- Mark the thread as changed now, after everything else was written.
local function stamp(slot, before)
  if not before then
    call('HSET', slot .. 't', 'created', NOW, 'updated', NOW)
  else
    -- Later than before, even if the clock is not: watchers compare it.
    call('HSET', slot .. 't', 'updated', math.max(NOW, before + 1))
  end
end

-- Return a call's record, or false.
local function recorded(slot, call_id)
  return call('HGET', slot .. 'p', call_id) or call('HGET', slot .. 'c', call_id)
end

-- Return the newest attempt in a register: its number, thread, call id and record.
local function newest_of(register)
  local newest = call('ZREVRANGE', register, 0, 0, 'WITHSCORES')

  if newest[1] then
    local thread, call_id = string.match(newest[1], '^([^%z]+)%z([^%z]+)$')
    local record = thread and recorded(slot_of(thread), call_id)
    return tonumber(newest[2]), thread, call_id,
      record or corrupt('no such call as in ' .. register)
  end
end

local function is_failed(record)
  return string.match(record, HEAD .. 'failed%z') ~= nil
end

local operations = {}

-- KEYS: the register of an idempotency key without its last letter.
function operations.find(slot)
  local attempt, thread, call_id, record = newest_of(slot .. 'k')
  return attempt and {'call', thread, call_id, record} or {'unknown'}
end

function operations.append(slot, thread, expected, messages, items)
  local version

  if expected ~= '' or messages == '' then
    version = call('LLEN', slot .. 'm')

    if expected ~= '' and tonumber(expected) ~= version then
      return {'conflict', version}
    elseif messages == '' and items == '' then
      return {'version', version}
    end
  end

  local before = last_change(slot, thread)

  if items ~= '' then
    call('HLEN', slot .. 'x')
  end

  local new = unlisted(slot, before)

  if new then
    return new
  end

  enlist(slot, thread, before)

  if messages ~= '' then
    version = with_lines('RPUSH', slot .. 'm', messages)
  end

  if items ~= '' then
    with_lines('HSET', slot .. 'x', items)
  end

  stamp(slot, before)
  return {'version', version}
end

function operations.merge(slot, thread, items)
  local before = last_change(slot, thread)
  call('HLEN', slot .. 'x')
  local new = unlisted(slot, before)

  if new then
    return new
  end

  enlist(slot, thread, before)
  with_lines('HSET', slot .. 'x', items)
  stamp(slot, before)
  return {'done'}
end

function operations.claim(slot, thread, call_id, key, tool, args)
  local known = recorded(slot, call_id)

  if known then
    return {'call', thread, call_id, known}
  end

  local register = slot_of(key) .. 'k'
  local attempt, holder, holder_call, held = newest_of(register)

  if attempt and not is_failed(held) then
    return {'call', holder, holder_call, held}
  end

  local before = last_change(slot, thread)
  local sequence = call('HLEN', slot .. 'p') + call('HLEN', slot .. 'c') + 1
  local now = string.format('%.0f', NOW)
  attempt = (attempt or 0) + 1
  enlist(slot, thread, before)
  call('HSET', slot .. 'p', call_id,
    table.concat({sequence, attempt, now, key, tool, 'issued', '', args, ''}, '\0'))
  call('ZADD', register, attempt, thread .. '\0' .. call_id)
  stamp(slot, before)
  return {'done'}
end

function operations.resolve(slot, thread, call_id, status, result)
  local record = recorded(slot, call_id)
  local _, stop = string.find(record or '', HEAD .. 'issued%z%z')

  if not stop then
    return record and {'call', thread, call_id, record} or {'unknown'}
  end

  local head = string.sub(record, 1, stop - 8) .. status .. '\0'
    .. string.format('%.0f', NOW) .. '\0'
  -- What follows the args and the empty result: nothing, or in a cluster the token.
  local args, token = string.match(record, '^([^%z]*)%z(.*)$', stop + 1)

  -- A call without args is erased: its result is not kept, and no thread comes back.
  if args == '' then
    record = head .. '\0' .. token
    local is_alone = call('HEXISTS', slot .. 't', 'last') == 1
    local field = is_alone and 'last' or 'late'
    local before = tonumber(call('HGET', slot .. 't', field) or 0)
    call('HSET', slot .. 'c', call_id, record)
    call('HSET', slot .. 't', field, math.max(NOW, before + 1))
    return {'call', thread, call_id, record}
  end

  local before = last_change(slot, thread) or corrupt('calls, but no ' .. slot .. 't')
  record = head .. args .. '\0' .. result .. token
  call('HLEN', slot .. 'c')
  call('HSET', slot .. 'c', call_id, record)
  call('HDEL', slot .. 'p', call_id)
  stamp(slot, before)
  return {'call', thread, call_id, record}
end

-- The last argument is '1' to forget the calls, and so to free their keys.
function operations.erase(slot, thread, forget)
  local erased, registers, first, last = {}, {}, math.huge, 0
  local freed = {'freed'}

  for kind in string.gmatch('pc', '.') do
    local calls = call('HGETALL', slot .. kind)

    for at = 1, #calls, 2 do
      local pattern = HEAD .. '%l+%z(%d*)%z'
      local _, stop, _, issued, key, resolved = string.find(calls[at + 1], pattern)

      if not stop then
        corrupt('no times of a call in ' .. slot .. kind)
      end

      first = math.min(first, issued)
      last = math.max(last, issued, tonumber(resolved) or 0)
      local token = CLUSTER and string.sub(calls[at + 1], -17) or ''
      erased[calls[at]] = string.sub(calls[at + 1], 1, stop) .. '\0' .. token

      if CLUSTER then
        freed[#freed + 1] = {key, calls[at], string.sub(token, 2)}
      else
        registers[calls[at]] = slot_of(key) .. 'k'
      end
    end
  end

  local keeps_calls = forget == '0' and next(erased)

  if not CLUSTER then
    call('ZSCORE', THREADS, thread)
    call('ZSCORE', ERASED, thread)
  end

  call('LLEN', slot .. 'm')
  call('HLEN', slot .. 'x')
  call('HLEN', slot .. 't')

  for call_id, register in pairs(keeps_calls and {} or registers) do
    call('ZSCORE', register, thread .. '\0' .. call_id)
  end

  if not CLUSTER then
    call('ZREM', THREADS, thread)
  end

  for kind in string.gmatch(KINDS, '.') do
    call('UNLINK', slot .. kind)
  end

  if not keeps_calls then
    if CLUSTER then
      return freed
    end

    call('ZREM', ERASED, thread)

    for call_id, register in pairs(registers) do
      call('ZREM', register, thread .. '\0' .. call_id)
    end

    return {'done'}
  end

  for call_id, record in pairs(erased) do
    call('HSET', slot .. 'c', call_id, record)
  end

  call('HSET', slot .. 't', 'first', first, 'last', last)

  if not CLUSTER then
    call('ZADD', ERASED, 0, thread)
  end

  return {'done'}
end

-- Make a copied thread the thread of its id, or remove the copy. ``copy`` is what the
-- keys of the copy start with; ``sizes`` how many entries it has under m, x, t, p and c.
function operations.restore(slot, thread, copy, sizes)
  local kinds, registers = {}, {}

  local function refuse(...)
    for kind in string.gmatch('mxtpc', '.') do
      call('UNLINK', copy .. kind)
    end

    return {...}
  end

  if CLUSTER and call('HGET', slot .. 't', 'begun') == TOKEN then
    call('HDEL', slot .. 't', 'begun')
  elseif CLUSTER then
    return refuse('gone')
  end

  for kind, size in string.gmatch(sizes, '(%l)(%d+)') do
    if call('EXISTS', slot .. kind) == 1 then
      return refuse('conflict', call('LLEN', slot .. 'm'))
    elseif call(kind == 'm' and 'LLEN' or 'HLEN', copy .. kind) ~= tonumber(size) then
      error('the copy is not complete: the server evicted a part of it', 0)
    elseif size ~= '0' then
      kinds[#kinds + 1] = kind
    end
  end

  for kind in string.gmatch(CLUSTER and '' or 'pc', '.') do
    local calls = call('HGETALL', copy .. kind)

    for at = 1, #calls, 2 do
      local attempt, _, key = string.match(calls[at + 1], HEAD)
      local register = slot_of(key) .. 'k'
      local newest, holder, _, held = newest_of(register)

      -- Of each key all attempt numbers differ, and only the newest is not failed.
      if newest and (call('ZCOUNT', register, attempt, attempt) > 0
        or not is_failed(newest < tonumber(attempt) and held or calls[at + 1])) then
        return refuse('held', key, holder)
      end

      registers[#registers + 1] = {register, attempt, thread .. '\0' .. calls[at]}
    end
  end

  local list = call('HEXISTS', copy .. 't', 'last') == 1 and ERASED or THREADS

  if not CLUSTER then
    call('ZSCORE', list, thread)
  end

  for _, kind in ipairs(kinds) do
    call('RENAME', copy .. kind, slot .. kind)
    call('PERSIST', slot .. kind)
  end

  for _, entry in ipairs(registers) do
    call('ZADD', unpack(entry))
  end

  if not CLUSTER then
    call('ZADD', list, 0, thread)
  end

  return {'done'}
end

-- KEYS: the list of threads. The bounds are as ZRANGEBYLEX takes them. With '1' it
-- returns as many erased ids too, after the threads.
function operations.list(list, low, high, limit, erased)
  local found = {'threads'}

  for _, kind in ipairs({{list, 'created', 'updated'}, {ERASED, 'first', 'last'}}) do
    if kind[1] == list or erased == '1' then
      for _, id in ipairs(call('ZRANGEBYLEX', kind[1], low, high, 'LIMIT', 0, limit)) do
        local slot = slot_of(id)
        local times = call('HMGET', slot .. 't', kind[2], kind[3])
        found[#found + 1] = {id, call('LLEN', slot .. 'm'), times[1], times[2]}
      end
    end
  end

  return found
end

-- KEYS: a key to read, when the server has no memory to queue a transaction.
function operations.read(key, command, first, last)
  if command == 'LRANGE' then
    return {'answer', call(command, key, first, last)}
  end

  return {'answer', call(command, key)}
end

-- KEYS: a key that is not in use, and that of the version, in two slots: a cluster
-- refuses the script before it runs. Each kind of write is made once, to no effect: a
-- user that may not make one is refused here, and not in the middle of an operation.
function operations.create(key, version)
  local renamed = redis.pcall('RENAME', key, key)

  if not string.find(renamed.err, 'no such key', 1, true) then
    error(renamed.err, 0)
  end

  call('UNLINK', key)
  call('HDEL', key, 'field')
  call('ZREM', key, 'member')
  call('PERSIST', key)
  call('EXPIRE', key, 60)
  call('HSET', key, 'field', 'value')
  call('UNLINK', key)
  call('ZADD', key, 0, 'member')
  call('UNLINK', key)
  call('RPUSH', key, 'element')
  call('UNLINK', key)
  call('SET', KEYS[2], version, 'NX')
  return {'version', call('GET', KEYS[2])}
end

-- What is for a cluster alone. Every call of the script defines these functions.
-- A member of a register is thread, call id and token.
if CLUSTER then
  -- Return a register's newest member and its attempt, and whether that attempt failed.
  local function newest_member(slot)
    local newest = call('ZREVRANGE', slot .. 'k', 0, 0, 'WITHSCORES')
    local failed = newest[1] and call('GET', slot .. 's') == 'failed\0' .. newest[1]
    return newest[1], tonumber(newest[2] or 0), failed
  end

  -- Write down a call that is to be claimed, without claiming it.
  function operations.prepare(slot, thread, call_id, key, tool, args)
    local known = recorded(slot, call_id)

    if known then
      return {'call', thread, call_id, known}
    end

    call('HLEN', slot .. 'w')
    local new = unlisted(slot, last_change(slot, thread))

    if not new then
      call('HSET', slot .. 'w', call_id, table.concat({TOKEN, key, tool, args}, '\0'))
    end

    return new or {'done'}
  end

  -- KEYS: a register. Enter a member as the next attempt if the newest one failed.
  function operations.grant(slot, member)
    local newest, attempt, failed = newest_member(slot)

    if newest and newest ~= member and not failed then
      return {'taken', newest, attempt}
    elseif newest ~= member then
      attempt = attempt + 1
      call('ZADD', slot .. 'k', attempt, member)
      call('UNLINK', slot .. 's')
    end

    return {'granted', attempt}
  end

  -- Record the call that was prepared with this token, or return its record. Where the
  -- thread has no such call, it will never have one with this token.
  function operations.confirm(slot, thread, call_id, token, attempt)
    local record = recorded(slot, call_id)

    if record and string.sub(record, -16) == token then
      return {'call', thread, call_id, record}
    end

    local waiting = call('HGET', slot .. 'w', call_id)

    if record or not waiting or string.sub(waiting, 1, 16) ~= token then
      if call('HGET', slot .. 't', 'begun') == token then
        call('HDEL', slot .. 't', 'begun')
      end

      return {'gone'}
    end

    local before = last_change(slot, thread)
    local sequence = call('HLEN', slot .. 'p') + call('HLEN', slot .. 'c') + 1
    local key, tool, args = string.match(waiting, '^[^%z]+%z([^%z]+)%z([^%z]+)%z(.*)$')
    local now = string.format('%.0f', NOW)
    record = table.concat(
      {sequence, attempt, now, key, tool, 'issued', '', args, '', token}, '\0')
    enlist(slot, thread, before)
    call('HSET', slot .. 'p', call_id, record)
    call('HDEL', slot .. 'w', call_id)
    stamp(slot, before)
    return {'call', thread, call_id, record}
  end

  -- Remove a call that was prepared and not granted.
  function operations.withdraw(slot, call_id, token)
    if string.sub(call('HGET', slot .. 'w', call_id) or '', 1, 16) == token then
      call('HDEL', slot .. 'w', call_id)
    end

    return {'done'}
  end

  -- KEYS: a register. Return its newest member.
  function operations.newest(slot)
    local newest, attempt = newest_member(slot)
    return newest and {'taken', newest, attempt} or {'unknown'}
  end

  -- KEYS: a register. Note the status of its newest member.
  function operations.settle(slot, member, status)
    if newest_member(slot) == member then
      call('SET', slot .. 's', status .. '\0' .. member)
    end

    return {'done'}
  end

  -- KEYS: a register. Remove a member. All but the newest attempts have failed.
  function operations.release(slot, member)
    local before = newest_member(slot)
    call('ZREM', slot .. 'k', member)
    local newest = newest_member(slot)

    if not newest then
      call('UNLINK', slot .. 's')
    elseif newest ~= before then
      call('SET', slot .. 's', 'failed\0' .. newest)
    end

    return {'done'}
  end

  -- Mark a thread as begun, to restore it.
  function operations.begin(slot)
    if call('HEXISTS', slot .. 't', 'created') + call('HEXISTS', slot .. 't', 'first') > 0
      or call('EXISTS', slot .. 'm', slot .. 'x', slot .. 'p', slot .. 'c') > 0 then
      return {'conflict', call('LLEN', slot .. 'm')}
    end

    call('HSET', slot .. 't', 'begun', TOKEN)
    return {'done'}
  end

  -- KEYS: a register. Enter a member of a restored thread. Of each key all attempt numbers
  -- differ, and only the newest is not failed.
  function operations.reserve(slot, member, attempt, status)
    local newest, last, failed = newest_member(slot)
    local number = tonumber(attempt)

    if newest and newest ~= member then
      local same = call('ZRANGEBYSCORE', slot .. 'k', attempt, attempt)[1]

      if last > number and status ~= 'failed' or last < number and not failed then
        return {'taken', newest, last, newest}
      elseif same and same ~= member then
        return {'taken', same, number, newest}
      end
    end

    call('ZADD', slot .. 'k', attempt, member)

    if newest_member(slot) == member then
      call('SET', slot .. 's', status .. '\0' .. member)
    end

    return {'done'}
  end

  -- KEYS: a list of threads. Each entry has a number that no earlier entry had.
  function operations.enlist(slot, thread)
    call('ZADD', slot .. 'l', 0, thread)
    call('HSET', slot .. 'n', thread, call('HINCRBY', slot .. 'n', '', 1))
    return {'done'}
  end

  -- KEYS: a list of threads. Remove the entry if it has this number.
  function operations.delist(slot, thread, number)
    if call('HGET', slot .. 'n', thread) == number then
      call('ZREM', slot .. 'l', thread)
      call('HDEL', slot .. 'n', thread)
    end

    return {'done'}
  end

  -- Return what a list of threads shows of one.
  function operations.info(slot)
    local times = call('HMGET', slot .. 't', 'created', 'updated', 'first', 'last')
    return {'info', call('LLEN', slot .. 'm'), unpack(times, 1, 4)}
  end
end

local ARGUMENTS = {
  append = 4, merge = 2, claim = 5, resolve = 4, erase = 2, restore = 3,
  find = 0, list = 4, read = 3, create = 1,
  prepare = 5, grant = 1, confirm = 4, withdraw = 2, newest = 0, settle = 2, release = 1,
  begin = 0, reserve = 3, enlist = 1, delist = 2, info = 0,
}
local outcomes, at = {}, CLUSTER and 4 or 2

while ARGV[at] do
  local name, key = ARGV[at], KEYS[CLUSTER and 1 or #outcomes + 1]
  local last = at + ARGUMENTS[name]
  local done, outcome = true, outcomes[#outcomes]

  -- Operations after one that has to wait for the list wait too: they keep their order.
  if not outcome or outcome[1] ~= 'unlisted' then
    done, outcome = pcall(operations[name], key, unpack(ARGV, at + 1, last))
  end

  if not done then
    -- Redis 7 raises a table, Redis 6.2 a string.
    outcome = {'failed', type(outcome) == 'table' and outcome.err or outcome}
  end

  outcomes[#outcomes + 1] = outcome
  at = last + 1
end

return outcomes
