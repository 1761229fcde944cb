-- Every script ends with this part: it runs the operations one after another. One that
-- fails gives its error as its outcome, and the others go on.

local outcomes = {}
local at = 1

while ARGV[at] do
  local last = at + tonumber(ARGV[at])
  local done, outcome = pcall(operation, at + 1, last)

  if not done then
    -- Redis 7 raises a table, 6.2 a string.
    outcome = {err = type(outcome) == 'table' and outcome.err or outcome}
  end

  outcomes[#outcomes + 1] = outcome
  at = last + 1
end

return outcomes
