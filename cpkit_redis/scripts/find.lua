-- Arguments: the register of an idempotency key.

local function operation(first)
  local _, newest = newest_attempt(ARGV[first])
  return newest or {'unknown'}
end

