-- Arguments: lowest and highest id as ZRANGEBYLEX takes them, how many at most.

local function operation(first, last)
  local low, high, limit = unpack(ARGV, first, last)
  local ids = call('ZRANGEBYLEX', THREADS, low, high, 'LIMIT', 0, limit)
  local found = {'threads'}

  for _, thread in ipairs(ids) do
    local slot = slot_of(thread)
    local times = call('HMGET', slot .. 't', 'created', 'updated')
    found[#found + 1] = {thread, call('LLEN', slot .. 'm'), times[1], times[2]}
  end

  return found
end

