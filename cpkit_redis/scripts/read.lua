-- Arguments: a command that reads. Returns its answer.

local function operation(first, last)
  return call(unpack(ARGV, first, last))
end

