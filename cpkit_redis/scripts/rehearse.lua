-- Make every kind of write once, to no effect: a user who may not make one of them is
-- found out here, and not in the middle of an operation. What takes away comes first,
-- so that nothing is left over.

local function operation()
  local key = BASE .. 'rehearsal'
  call('UNLINK', key)
  call('HDEL', key, 'field')
  call('ZREM', key, 'member')
  call('HSET', key, 'field', 'value')
  call('UNLINK', key)
  call('ZADD', key, 0, 'member')
  call('UNLINK', key)
  call('RPUSH', key, 'element')
  call('UNLINK', key)
  return 1
end

