-- Every script starts with this part.
--
-- KEYS[1]  what every key of the store starts with: '<prefix>:'
-- ARGV     for each operation the count of its arguments, and these
-- Returns  for each operation a number where it is done, or a word and what it is about
--
-- A script is not rolled back. So an operation first reads every key that it will write
-- and a key of a wrong type fails it there, before anything is written. What else may
-- refuse a write (memory, a disk error, a read-only replica) refuses the first one.
--
-- Ids and JSON texts are opaque bytes. Ids hold no NUL, so NUL separates them. A slot is
-- what all keys of a thread, or of an idempotency key, start with: '<prefix>:{<id>}:'.

local BASE = KEYS[1]
local THREADS = BASE .. 'threads'
local call = redis.call

