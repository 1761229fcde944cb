-- Arguments: thread, slot, call id, status, result.

local function operation(first, last)
  local thread, slot, call_id, status, result = unpack(ARGV, first, last)
  local known = recorded(thread, slot, call_id)

  if not known then
    return {'unknown'}
  end

  if known[5] then
    return known
  end

  known[5] = status .. '\0' .. string.format('%.0f', NOW)

  -- A call without args is erased: its result is not kept, and no thread comes back.
  if not known[6] then
    call('HSET', slot .. 'r', call_id, known[5])
    return known
  end

  local before = last_change(thread, slot)
  call('HLEN', slot .. 'p')

  if not before then
    error('CORRUPT calls, but no ' .. slot .. 't', 0)
  end

  call('HSET', slot .. 'r', call_id, known[5])
  call('HSET', slot .. 'v', call_id, result)
  call('HDEL', slot .. 'p', call_id)
  stamp(slot, before)
  known[7] = result
  return known
end

