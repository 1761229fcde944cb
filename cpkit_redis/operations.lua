-- Run operations of the store one after another, each one wholly or not at all.
--
--   redis-cli --eval operations.lua 'cpkit:{0}:' , append 4 t '' '{"a": 1}' ''
--   redis-cli --eval operations.lua 'cpkit:{0}:' , claim 5 t call key tool '{}'
--   redis-cli --eval operations.lua 'cpkit:{0}:' , find 1 key
--   redis-cli --eval operations.lua 'cpkit:{0}:' , list 4 - + 100 0
--
-- KEYS     what all keys of a shard start with; see schema.py. No key has this name, so
--          a node of a cluster refuses the script while the slot is on its way to another
-- ARGV     for each operation its name, the number of its arguments, and these
-- Returns  for each operation {word, ...}; {'failed', error} is one of its own
--
-- Messages are JSON texts, one a line. Items are keys and values of extra by turns, one
-- a line. Redis does not roll a script back. So each operation reads every key that it
-- will change before its first change: a key of a wrong type fails it there. Whatever
-- else refuses a write (memory, a disk error, a replica) refuses its first change.

local BASE = KEYS[1]
local THREADS, ERASED = BASE .. 'threads', BASE .. 'erased'
-- unpack() puts its values on Lua's stack, which holds 8,000. An even number, for items.
local CHUNK = 4000
-- How a call's record begins: up to its args.
local HEAD = '^%d+%z(%d+)%z(%d+)%z([^%z]+)%z[^%z]+%z(%x*)%z()(%l+)%z(%d*)%z()'

local call = redis.call
local clock = call('TIME')
local NOW = string.format('%d%06d', clock[1], clock[2])

local function key_of(kind, id)
  return BASE .. kind .. ':' .. id
end

local function corrupt(what)
  error('CORRUPT ' .. what, 0)
end

-- Call a command with the lines of a text as its last arguments.
local function with_lines(command, key, text)
  local lines, at, answer = {}, 1, nil

  repeat
    local stop = string.find(text, '\n', at, true)
    lines[#lines + 1] = string.sub(text, at, (stop or 0) - 1)
    at = stop and stop + 1

    if #lines == CHUNK or not at then
      answer = call(command, key, unpack(lines))
      lines = {}
    end
  until not at

  return answer
end

-- Return a time of a thread, or nil. Its key is ``times``.
local function time_of(times, field)
  local time = call('HGET', times, field)

  if time then
    -- Lua's numbers are exact for 16 digits of microseconds, and tonumber() takes more.
    return #time <= 16 and string.find(time, '^%d+$') and tonumber(time)
      or corrupt('no time in ' .. times)
  end
end

-- Return when the thread changed last, or nil for a missing thread.
local function last_change(thread)
  local times = key_of('t', thread)
  local updated = time_of(times, 'updated')

  if updated then
    return updated
  end

  call('ZSCORE', THREADS, thread)
  call('ZSCORE', ERASED, thread)
  local erased = call('HEXISTS', times, 'first') == 1

  for kind in string.gmatch(erased and 'mxp' or 'mxpc', '.') do
    if call('EXISTS', key_of(kind, thread)) == 1 then
      corrupt('a part of a thread, but no time in ' .. times)
    end
  end
end

-- Note that the thread changes now, and put a new one on the list. ``before`` is when it
-- changed last.
local function stamp(thread, before)
  local times = key_of('t', thread)

  if before then
    -- Later than before, even if the clock is not: readers and watchers compare it.
    call('HSET', times, 'updated', math.max(NOW, before + 1))
  else
    call('ZADD', THREADS, 0, thread)
    call('ZREM', ERASED, thread)
    call('HDEL', times, 'first', 'last', 'begun')
    call('HSET', times, 'created', NOW, 'updated', NOW)
  end
end

-- Return a call's record, or false.
local function recorded(thread, call_id)
  return call('HGET', key_of('p', thread), call_id)
    or call('HGET', key_of('c', thread), call_id)
end

-- Return what a call's record says, and where its status and its args begin.
local function head_of(record)
  local attempt, issued, key, token, status_at, status, resolved, args_at =
    string.match(record, HEAD)

  return {
    attempt = attempt, issued = issued, key = key, token = token,
    status_at = status_at or corrupt('the record of a call'),
    status = status, resolved = resolved, args_at = args_at,
  }
end

-- Return the newest member of a register and its attempt, or nil and 0.
local function newest_of(register)
  local newest = call('ZREVRANGE', register, 0, 0, 'WITHSCORES')
  return newest[1], tonumber(newest[2] or 0)
end

-- Return the call of a member of a register in the same shard, and its status.
local function held_by(member, register)
  local thread, call_id = string.match(member, '^([^%z]+)%z([^%z]+)%z$')
  local record = thread and recorded(thread, call_id)
    or corrupt('no such call as in ' .. register)

  return {'call', thread, call_id, record}, head_of(record).status
end

-- Return the member of a register that does not allow another one to enter at an attempt,
-- and its attempt; or nothing. All attempt numbers of a key differ, and all
-- attempts but the newest have failed. ``failed`` is the newest member if it has failed.
local function obstacle(register, member, attempt, status, failed)
  local newest, last = newest_of(register)

  if newest and newest ~= member then
    local same = call('ZRANGEBYSCORE', register, attempt, attempt)[1]

    if same and same ~= member then
      return same, attempt
    elseif (last > attempt and status ~= 'failed') or (last < attempt and newest ~= failed) then
      return newest, last
    end
  end
end

-- Return a conflict with the version if anything of the thread is stored, else nothing.
local function conflict(thread)
  for kind in string.gmatch('mxtpc', '.') do
    if call('EXISTS', key_of(kind, thread)) == 1 then
      return {'conflict', call('LLEN', key_of('m', thread))}
    end
  end
end

-- Put a call on record as issued.
local function issue(thread, call_id, attempt, key, tool, token, args)
  local before = last_change(thread)
  local pending = key_of('p', thread)
  local sequence = call('HLEN', pending) + call('HLEN', key_of('c', thread)) + 1
  local record = table.concat(
    {sequence, attempt, NOW, key, tool, token, 'issued', '', args, ''}, '\0')
  call('HSET', pending, call_id, record)
  stamp(thread, before)
  return {'call', thread, call_id, record}
end

local operations = {}

function operations.append(thread, expected, messages, items)
  local list, version = key_of('m', thread), nil

  if expected ~= '' or messages == '' then
    version = call('LLEN', list)

    if expected ~= '' and tonumber(expected) ~= version then
      return {'conflict', version}
    elseif messages == '' and items == '' then
      return {'version', version}
    end
  end

  local before = last_change(thread)

  if items ~= '' then
    call('HLEN', key_of('x', thread))
  end

  if messages ~= '' then
    version = with_lines('RPUSH', list, messages)
  end

  if items ~= '' then
    with_lines('HSET', key_of('x', thread), items)
  end

  stamp(thread, before)
  return {'version', version}
end

function operations.merge(thread, items)
  local before = last_change(thread)
  with_lines('HSET', key_of('x', thread), items)
  stamp(thread, before)
  return {'done'}
end

-- The key's register is in the same shard.
function operations.claim(thread, call_id, key, tool, args)
  local known = recorded(thread, call_id)

  if known then
    return {'call', thread, call_id, known}
  end

  local register = key_of('k', key)
  local newest, attempt = newest_of(register)

  if newest then
    local holder, status = held_by(newest, register)

    if status ~= 'failed' then
      return holder
    end
  end

  issue(thread, call_id, attempt + 1, key, tool, '', args)
  call('ZADD', register, attempt + 1, thread .. '\0' .. call_id .. '\0')
  return {'done'}
end

-- Return the newest call of a key, whose register is in the same shard.
function operations.find(key)
  local register = key_of('k', key)
  local newest = newest_of(register)
  return newest and (held_by(newest, register)) or {'unknown'}
end

function operations.resolve(thread, call_id, status, result)
  local record = recorded(thread, call_id)
  local head = record and head_of(record)

  if not record then
    return {'unknown'}
  elseif head.status ~= 'issued' then
    return {'call', thread, call_id, record}
  end

  -- An issued call has no result: its args are all that follows.
  local args = string.sub(record, head.args_at, -2)
  local times, calls = key_of('t', thread), key_of('c', thread)
  record = table.concat({string.sub(record, 1, head.status_at - 2), status, NOW, args,
    args ~= '' and result or ''}, '\0')

  -- A call without args is erased: its result is not kept, and its thread stays as it is.
  if args == '' then
    local field = call('HEXISTS', times, 'last') == 1 and 'last' or 'late'
    local before = time_of(times, field) or 0
    call('HSET', calls, call_id, record)
    call('HSET', times, field, math.max(NOW, before + 1))
  else
    local before = last_change(thread) or corrupt('calls, but no ' .. times)
    call('HSET', calls, call_id, record)
    call('HDEL', key_of('p', thread), call_id)
    stamp(thread, before)
  end

  return {'call', thread, call_id, record}
end

-- Note that a prepared call was removed before it was confirmed, so that its caller may
-- prepare it again. The note stays for an hour, which is longer than a claim takes.
local function void(prepared)
  local token = string.match(prepared, '^%x*')
  call('SET', key_of('v', token), '1', 'EX', 3600)
end

-- ``forget`` is '1' to remove the calls too, and so to free their keys. A call with a
-- token has its register in another shard: it is returned, to be released there.
function operations.erase(thread, forget)
  local erased, registers, freed = {}, {}, {'freed'}
  local first, last = math.huge, 0

  for kind in string.gmatch('pc', '.') do
    local calls = call('HGETALL', key_of(kind, thread))

    for at = 1, #calls, 2 do
      local head = head_of(calls[at + 1])
      local member = thread .. '\0' .. calls[at] .. '\0' .. head.token
      first = math.min(first, head.issued)
      last = math.max(last, head.issued, tonumber(head.resolved) or 0)
      erased[calls[at]] = string.sub(calls[at + 1], 1, head.args_at - 1) .. '\0'

      if head.token == '' then
        registers[member] = key_of('k', head.key)
      else
        freed[#freed + 1] = {head.key, member}
      end
    end
  end

  local keeps_calls = forget == '0' and next(erased)

  for member, register in pairs(keeps_calls and {} or registers) do
    call('ZSCORE', register, member)
  end

  call('ZSCORE', THREADS, thread)
  call('ZSCORE', ERASED, thread)
  call('LLEN', key_of('m', thread))
  call('HLEN', key_of('x', thread))
  call('HLEN', key_of('t', thread))
  local waiting = call('HGETALL', key_of('w', thread))

  call('ZREM', THREADS, thread)
  call('ZREM', ERASED, thread)

  for at = 2, #waiting, 2 do
    void(waiting[at])
  end

  for kind in string.gmatch('mxtpcw', '.') do
    call('UNLINK', key_of(kind, thread))
  end

  if not keeps_calls then
    for member, register in pairs(registers) do
      call('ZREM', register, member)
    end

    return freed
  end

  for call_id, record in pairs(erased) do
    call('HSET', key_of('c', thread), call_id, record)
  end

  call('HSET', key_of('t', thread), 'first', first, 'last', last)
  call('ZADD', ERASED, 0, thread)
  return {'done'}
end

-- Make a copied thread the thread of its id, or remove the copy. ``copy`` is what the
-- keys of the copy start with; ``sizes`` how many entries it has under m, x, t, p and c.
-- With a token its calls are in their registers already, and the thread is begun.
function operations.restore(thread, copy, sizes, token)
  local times, kinds, members = key_of('t', thread), {}, {}

  local function refuse(answer)
    for kind in string.gmatch('mxtpc', '.') do
      call('UNLINK', copy .. kind)
    end

    return answer
  end

  if token ~= '' and call('HGET', times, 'begun') ~= token then
    return refuse({'gone'})
  end

  call('HDEL', times, 'begun')
  local known = conflict(thread)

  if known then
    return refuse(known)
  end

  for kind, size in string.gmatch(sizes, '(%l)(%d+)') do
    if call(kind == 'm' and 'LLEN' or 'HLEN', copy .. kind) ~= tonumber(size) then
      error('the copy is not complete: the server evicted a part of it', 0)
    elseif size ~= '0' then
      kinds[#kinds + 1] = kind
    end
  end

  for kind in string.gmatch(token == '' and 'pc' or '', '.') do
    local calls = call('HGETALL', copy .. kind)

    for at = 1, #calls, 2 do
      local head = head_of(calls[at + 1])
      local register = key_of('k', head.key)
      local member = thread .. '\0' .. calls[at] .. '\0'
      local newest, holder, status = newest_of(register), nil, nil

      if newest then
        holder, status = held_by(newest, register)
      end

      local failed = status == 'failed' and newest

      if obstacle(register, member, tonumber(head.attempt), head.status, failed) then
        return refuse({'held', head.key, holder[2]})
      end

      members[#members + 1] = {register, head.attempt, member}
    end
  end

  local list = call('HEXISTS', copy .. 't', 'last') == 1 and ERASED or THREADS
  call('ZSCORE', list, thread)

  for _, kind in ipairs(kinds) do
    call('RENAME', copy .. kind, key_of(kind, thread))
    call('PERSIST', key_of(kind, thread))
  end

  for _, entry in ipairs(members) do
    call('ZADD', unpack(entry))
  end

  call('ZADD', list, 0, thread)
  return {'done'}
end

-- The bounds are as ZRANGEBYLEX takes them. With '1' it returns as many erased ids too,
-- after the threads.
function operations.list(low, high, limit, erased)
  local found = {'threads'}
  local lists = {{THREADS, 'created', 'updated'}, {ERASED, 'first', 'last'}}

  for n = 1, erased == '1' and 2 or 1 do
    local name, first, last = unpack(lists[n])

    for _, id in ipairs(call('ZRANGEBYLEX', name, low, high, 'LIMIT', 0, limit)) do
      local times = call('HMGET', key_of('t', id), first, last)
      found[#found + 1] = {id, call('LLEN', key_of('m', id)), times[1], times[2]}
    end
  end

  return found
end

-- Set the version of a new store. Each kind of write is made once, to no effect: a user
-- that may not make one is refused here, and not in the middle of an operation.
function operations.create(version)
  local key = BASE .. 'rehearsal'
  -- A server that was killed during an earlier open may have kept half of its writes.
  call('UNLINK', key)
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
  call('SET', BASE .. 'schema', version, 'NX')
  return {'version', call('GET', BASE .. 'schema')}
end

-- The steps of a claim and of a restore over two shards; see cluster.py.

-- Write down a call that is to be claimed, without claiming it.
function operations.prepare(thread, call_id, token, key, tool, args)
  local known = recorded(thread, call_id)

  if known then
    return {'call', thread, call_id, known}
  end

  last_change(thread)
  local replaced = call('HGET', key_of('w', thread), call_id)
  local prepared = table.concat({token, key, tool, args}, '\0')

  if replaced then
    void(replaced)
  end

  call('HSET', key_of('w', thread), call_id, prepared)
  return {'done'}
end

-- Enter a member in a register, at an attempt or (where that is '') as the next one.
-- Return what is in its way, or its attempt.
function operations.enter(key, member, attempt, status, failed)
  local register = key_of('k', key)
  local newest, last = newest_of(register)
  local number = tonumber(attempt) or (newest == member and last or last + 1)
  local other, its_attempt = obstacle(register, member, number, status, failed)

  if other then
    return {'taken', other, its_attempt, newest}
  end

  call('ZADD', register, number, member)
  return {'entered', number}
end

-- Record the call that was prepared with this token, or return its record. Where the
-- thread has no such call, it will never have one with this token. It is 'void' if it
-- was never confirmed, and 'gone' if it may have been.
function operations.confirm(thread, call_id, token, attempt)
  local record = recorded(thread, call_id)

  if record and head_of(record).token == token then
    return {'call', thread, call_id, record}
  end

  local waiting = key_of('w', thread)
  local prepared = call('HGET', waiting, call_id) or ''
  local known, key, tool, at = string.match(prepared, '^(%x+)%z([^%z]+)%z([^%z]+)%z()')

  if record or known ~= token then
    local times = key_of('t', thread)

    if call('HGET', times, 'begun') == token then
      call('HDEL', times, 'begun')
    end

    return {call('EXISTS', key_of('v', token)) == 1 and 'void' or 'gone'}
  end

  local args = string.sub(prepared, at)
  local issued = issue(thread, call_id, attempt, key, tool, token, args)
  call('HDEL', waiting, call_id)
  return issued
end

-- Remove a call that was prepared and not entered.
function operations.withdraw(thread, call_id, token)
  local prepared = call('HGET', key_of('w', thread), call_id) or ''

  if string.sub(prepared, 1, #token) == token then
    call('HDEL', key_of('w', thread), call_id)
  end

  return {'done'}
end

-- Return the newest member of a register.
function operations.newest(key)
  local newest, attempt = newest_of(key_of('k', key))
  return newest and {'taken', newest, attempt} or {'unknown'}
end

-- Remove a member from a register.
function operations.release(key, member)
  call('ZREM', key_of('k', key), member)
  return {'done'}
end

-- Mark a thread as begun, to restore it.
function operations.begin(thread, token)
  call('HDEL', key_of('t', thread), 'begun')
  local known = conflict(thread)

  if not known then
    call('HSET', key_of('t', thread), 'begun', token)
  end

  return known or {'done'}
end

local outcomes, at = {}, 1

while ARGV[at] do
  local last = at + 1 + ARGV[at + 1]
  local done, outcome = pcall(operations[ARGV[at]], unpack(ARGV, at + 2, last))

  if not done then
    -- Redis 7 raises a table, Redis 6.2 a string.
    outcome = {'failed', type(outcome) == 'table' and outcome.err or outcome}
  end

  outcomes[#outcomes + 1] = outcome
  at = last + 1
end

return outcomes
