-- Arguments: thread, slot, keys and values of extra by turns.

-- An even number, and well below the 8,000 values that Lua's stack holds.
local CHUNK = 4000

local function operation(first, last)
  local thread, slot = ARGV[first], ARGV[first + 1]
  local before = last_change(thread, slot)
  call('HLEN', slot .. 'x')
  enlist(thread, before)

  for at = first + 2, last, CHUNK do
    local to = math.min(at + CHUNK - 1, last)
    call('HSET', slot .. 'x', unpack(ARGV, at, to))
  end

  stamp(slot, before)
  return 1
end

