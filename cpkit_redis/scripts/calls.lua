-- Calls on record.

-- Returns the call, or nil.
local function recorded(thread, slot, call_id)
  local issued = call('HGET', slot .. 'i', call_id)

  if issued then
    local resolved = call('HGET', slot .. 'r', call_id)
    local args = call('HGET', slot .. 'a', call_id)
    local result = call('HGET', slot .. 'v', call_id)
    return {'call', thread, call_id, issued, resolved, args, result}
  end
end

-- Returns the number of a key's newest attempt and that call, or 0.
local function newest_attempt(register)
  local newest = call('ZREVRANGE', register, 0, 0, 'WITHSCORES')

  if not newest[1] then
    return 0
  end

  local thread, call_id = string.match(newest[1], '^([^%z]+)%z([^%z]+)$')
  local found = thread and recorded(thread, slot_of(thread), call_id)

  if not found then
    error('CORRUPT no such call as in ' .. register, 0)
  end

  return tonumber(newest[2]), found
end

