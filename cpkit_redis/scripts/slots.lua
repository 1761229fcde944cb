-- The slots of ids that the script comes upon; the same rule as in layout.py.

local ESCAPES = {['%'] = '%25', ['{'] = '%7B', ['}'] = '%7D'}

local function slot_of(id)
  return BASE .. '{' .. string.gsub(id, '[%%{}]', ESCAPES) .. '}:'
end

