-- Arguments: thread, slot, call id, idempotency key, its register, tool, args.

local function operation(first, last)
  local thread, slot, call_id, key, register, tool, args = unpack(ARGV, first, last)
  local known = recorded(thread, slot, call_id)

  if known then
    return known
  end

  local attempt, newest = newest_attempt(register)

  if newest and not (newest[5] and string.match(newest[5], '^failed%z')) then
    return newest
  end

  local before = last_change(thread, slot)
  local sequence = call('HLEN', slot .. 'i') + 1
  local now = string.format('%.0f', NOW)
  local issued = table.concat({sequence, attempt + 1, now, key, tool}, '\0')
  call('HLEN', slot .. 'a')
  call('HLEN', slot .. 'p')

  -- In a cluster these are three steps, in this order. The first, in the thread's slot,
  -- is invisible until the second: the register in the key's slot names the call.
  enlist(thread, before)
  call('HSET', slot .. 'i', call_id, issued)
  call('HSET', slot .. 'a', call_id, args)
  call('HSET', slot .. 'p', call_id, issued .. '\0' .. args)

  call('ZADD', register, attempt + 1, thread .. '\0' .. call_id)

  stamp(slot, before)
  return 1
end

