-- Arguments: thread, slot, '1' to forget its calls and so free their keys or else '0'.

-- Returns the registers that name the thread's calls, and how each calls them.
local function registered(thread, slot)
  local calls = call('HGETALL', slot .. 'i')
  local names = {}

  for at = 1, #calls, 2 do
    local key = string.match(calls[at + 1], '^%d+%z%d+%z%d+%z([^%z]+)%z')

    if not key then
      error('CORRUPT no key of a call in ' .. slot .. 'i', 0)
    end

    local register, name = slot_of(key) .. 'k', thread .. '\0' .. calls[at]
    call('ZSCORE', register, name)
    names[#names + 1] = {register, name}
  end

  return names
end

local function operation(first, last)
  local thread, slot, forget = unpack(ARGV, first, last)
  local names = forget == '1' and registered(thread, slot) or {}
  call('ZSCORE', THREADS, thread)
  call('LLEN', slot .. 'm')

  for kind in string.gmatch('xtpairv', '.') do
    call('HLEN', slot .. kind)
  end

  call('ZREM', THREADS, thread)

  for kind in string.gmatch('mxtpav', '.') do
    call('UNLINK', slot .. kind)
  end

  if forget == '1' then
    for _, entry in ipairs(names) do
      call('ZREM', entry[1], entry[2])
    end

    call('UNLINK', slot .. 'i', slot .. 'r')
  end

  return 1
end

