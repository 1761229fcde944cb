"""Every statement of the store.

The messages of a thread have the keys from ``number << 32`` on; see ``schema.sql``.
JSON is stored as TEXT and fetched as bytes: the codec names a row that is not UTF-8.
"""

# Each thread with its last message. Fast, because the keys of a thread are a range of
# the table's b-tree.
_THREADS = """
cpkit_threads LEFT JOIN cpkit_messages ON key =
    (SELECT max(key) FROM cpkit_messages
     WHERE key >= number << 32 AND key < (number + 1) << 32)
"""
_VERSION = "coalesce(key - (number << 32) + 1, trimmed)"

HEAD = f"""
SELECT number, {_VERSION}, coalesce(appended_at, 0), trimmed
FROM {_THREADS} WHERE thread_id = ?
"""
THREADS = f"""
SELECT thread_id, {_VERSION}, created_at, max(updated_at, coalesce(appended_at, 0))
FROM {_THREADS}
WHERE thread_id >= ? AND thread_id < ? ORDER BY thread_id LIMIT ?
"""
# The newest message of each thread that is like a pattern, and more of them with OR.
# The inner LIMIT keeps the order of the threads, which are looked at one by one.
SEARCH = rf"""
SELECT thread_id, found.key - (number << 32) FROM (
    SELECT number, thread_id FROM {_THREADS} WHERE thread_id >= ? AND thread_id < ?
    ORDER BY max(updated_at, coalesce(appended_at, 0)) DESC LIMIT -1
) CROSS JOIN cpkit_messages AS found ON found.key =
    (SELECT max(key) FROM cpkit_messages
     WHERE key >= number << 32 AND key < (number + 1) << 32
         AND (body LIKE ? ESCAPE '\'))
LIMIT ?
"""
ERASED_THREADS = """
SELECT thread_id, 0, min(issued_at), max(max(issued_at, coalesce(resolved_at, 0)))
FROM cpkit_calls
WHERE erased AND thread_id >= ? AND thread_id < ?
    AND thread_id NOT IN (SELECT thread_id FROM cpkit_threads)
GROUP BY thread_id ORDER BY thread_id LIMIT ?
"""
# Each change of a thread gives its row another of these values.
MARKERS = f"""
SELECT thread_id, stored_at, updated_at, {_VERSION}
FROM {_THREADS} WHERE thread_id BETWEEN ? AND ?
"""

# Later than before, even if the clock is not: watchers compare it.
TOUCH_THREAD = """
INSERT INTO cpkit_threads (thread_id, created_at, updated_at, stored_at)
VALUES (?, ?, ?, ?)
ON CONFLICT (thread_id) DO UPDATE SET
    updated_at = max(updated_at + 1, excluded.updated_at)
"""
SET_UPDATED = "UPDATE cpkit_threads SET updated_at = ? WHERE thread_id = ?"
# updated_at takes the time of the last message: that message may go.
SET_TRIMMED = """
UPDATE cpkit_threads SET trimmed = ?, updated_at = max(updated_at, ?) WHERE number = ?
"""
DELETE_THREAD = "DELETE FROM cpkit_threads WHERE number = ?"

# Where the clock was set back, the time of the message before counts.
ADD_MESSAGE = "INSERT INTO cpkit_messages VALUES (?, max(?, ?), CAST(? AS TEXT))"
ADD_ENCRYPTED = "INSERT INTO cpkit_messages VALUES (?, max(?, ?), ?)"
MESSAGES = """
SELECT CAST(body AS BLOB) FROM cpkit_messages WHERE key >= ? AND key < ? ORDER BY key
"""
DELETE_MESSAGES = "DELETE FROM cpkit_messages WHERE key >= ? AND key < ?"

SET_EXTRA = """
INSERT INTO cpkit_extra VALUES (?, CAST(? AS TEXT), CAST(? AS TEXT))
ON CONFLICT (thread_number, key) DO UPDATE SET value = excluded.value
"""
EXTRA = """
SELECT CAST(key AS BLOB), CAST(value AS BLOB) FROM cpkit_extra WHERE thread_number = ?
"""
DELETE_EXTRA = "DELETE FROM cpkit_extra WHERE thread_number = ?"

_CALL = """
SELECT thread_id, call_id, tool_name, CAST(args AS BLOB), idempotency_key, status,
    attempt, issued_at, CAST(result AS BLOB), resolved_at, erased
FROM cpkit_calls
"""
CALL = f"{_CALL} WHERE thread_id = ? AND call_id = ?"
CALLS = f"{_CALL} WHERE thread_id = ? ORDER BY sequence"
PENDING = f"""
{_CALL} WHERE thread_id = ? AND status = 'issued' AND NOT erased ORDER BY sequence
"""
ATTEMPTS = f"{_CALL} WHERE idempotency_key = ? ORDER BY attempt DESC LIMIT ?"

ADD_CALL = """
INSERT INTO cpkit_calls (thread_id, call_id, tool_name, args, idempotency_key, status,
    attempt, issued_at, result, resolved_at, erased)
VALUES (?, ?, ?, CAST(? AS TEXT), ?, ?, ?, ?, CAST(? AS TEXT), ?, ?)
"""
RESOLVE_CALL = """
UPDATE cpkit_calls SET status = ?, result = CAST(? AS TEXT), resolved_at = ?
WHERE thread_id = ? AND call_id = ?
"""
ERASE_ALL_CALLS = """
UPDATE cpkit_calls SET args = '{}', result = NULL, erased = 1 WHERE thread_id = ?
"""
ERASE_ENDED_CALLS = f"{ERASE_ALL_CALLS} AND resolved_at < ? AND NOT erased"
DELETE_CALLS = "DELETE FROM cpkit_calls WHERE thread_id = ?"
