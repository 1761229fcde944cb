-- When threads change, in microseconds since 1970.

local clock = call('TIME')
local NOW = clock[1] * 1000000 + clock[2]

-- Returns when the thread changed last, or nil where there is no thread.
local function last_change(thread, slot)
  local updated = call('HGET', slot .. 't', 'updated')

  if updated then
    return tonumber(updated) or error('CORRUPT no time in ' .. slot .. 't', 0)
  end

  call('ZSCORE', THREADS, thread)

  if call('EXISTS', slot .. 'm') == 1 then
    error('CORRUPT messages, but no ' .. slot .. 't', 0)
  end
end

-- Put a new thread on the list, before anything else of it is written.
local function enlist(thread, before)
  if not before then
    call('ZADD', THREADS, 0, thread)
  end
end

-- Mark the thread as changed now, after everything else was written.
local function stamp(slot, before)
  if not before then
    call('HSET', slot .. 't', 'created', NOW, 'updated', NOW)
  elseif before < NOW then
    call('HSET', slot .. 't', 'updated', NOW)
  end
end

