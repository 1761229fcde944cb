-- Arguments: thread, slot, expected version or '', messages.
-- Returns the version of the thread.

-- unpack() puts its values on Lua's stack, which holds 8,000.
local CHUNK = 4000

local function operation(first, last)
  local thread, slot, expected = ARGV[first], ARGV[first + 1], ARGV[first + 2]
  local empty = last == first + 2
  local version

  if empty or expected ~= '' then
    version = call('LLEN', slot .. 'm')

    if expected ~= '' and tonumber(expected) ~= version then
      return {'conflict', version}
    end

    if empty then
      return version
    end
  end

  local before = last_change(thread, slot)
  enlist(thread, before)

  for at = first + 3, last, CHUNK do
    local to = math.min(at + CHUNK - 1, last)
    version = call('RPUSH', slot .. 'm', unpack(ARGV, at, to))
  end

  stamp(slot, before)
  return version
end

