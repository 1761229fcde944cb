"""Every statement of the store, as a whole text.

How writes stay in order
    A thread's version and the time of its last change stand in its row. Every write
    locks that row until the commit, and moves the time, but for a trim and what changes
    erased calls alone. The server compares the version of the newest row. A statement
    that waited for a row sees everything else as it was when it began. So ERASE deletes
    only a row that is as it saw it.

Locks
    Rows of several threads are locked in the order of their ids. A claim inserts its
    call before it changes its thread; every other statement begins with the thread.

Why ON CONFLICT names its column
    A copy that leaves out sequences, such as logical replication, gives new threads
    numbers that are taken. That is an error, not a thread that another writer began. A
    call has no such number: CLAIM means both of its indexes.

Why the plans do not depend on statistics
    The planner does not know the number of a thread in advance. From the statistics it
    would guess that a thread has an average size, which beside one huge thread is a
    large part of the table, and read all of it. It takes a range whose end comes from a
    subquery for a two-hundredth of the rows, so ``position < (SELECT …)`` and the like
    keep it on the index. An array of ids stands in a subquery: a plan for given values
    would look cheaper than the general one, and be made each time.

Why arrays hold text, and ids are joined
    Of the type of another array asyncpg asks the server: six round trips a connection.
    It checks each element in Python, so the ids and numbers of a batch are one text.
"""

from __future__ import annotations

from cpkit.driver import StoredCall

_PARTS = {
    "{items_of}": """(SELECT json_agg(json_build_array(e.key, e.value))
        FROM {schema}.extra AS e WHERE {extra_of_thread} =""",
    "{pending_of}": """(SELECT json_agg(json_build_array({call}) ORDER BY c.sequence)
        FROM {schema}.calls AS c WHERE c.status = 'issued' AND NOT c.erased
            AND c.sequence > 0 AND c.sequence < (SELECT 9223372036854775807)
            AND c.thread_id =""",
    "{call}": "c." + ", c.".join(StoredCall._fields),
    "{columns}": ", ".join(StoredCall._fields),
    "{calls_of_thread}": """c.thread_id = $1 AND c.call_id > ''
        AND c.call_id < (SELECT repeat(chr(1114111), 129))""",
    # A key is a JSON string, so it begins with a quotation mark.
    "{extra_of_thread}": """e.key >= '"' AND e.key < (SELECT '#')
        AND e.thread_number""",
}

# Appends message $4 (NULL: none) to thread $1 and sets key $5 of extra (NULL: none) to
# $6, if the thread is at version $2 (NULL: any). $3 is the time. Returns the version;
# no row where the thread was at another one, or another writer was faster.
APPEND = """
WITH grown AS (
    UPDATE {schema}.threads
    SET version = version + ($4::text IS NOT NULL)::integer,
        updated_at = greatest(updated_at + 1, $3)
    WHERE thread_id = $1 AND version = coalesce($2, version)
    RETURNING number, version
), born AS (
    INSERT INTO {schema}.threads (thread_id, version, created_at, updated_at)
    SELECT $1, ($4 IS NOT NULL)::integer, $3, $3
    WHERE coalesce($2, 0) = 0 AND NOT EXISTS (SELECT FROM grown)
    ON CONFLICT (thread_id) DO NOTHING
    RETURNING number, version
), thread AS (
    SELECT * FROM grown UNION ALL SELECT * FROM born
), message AS (
    INSERT INTO {schema}.messages (thread_number, position, body)
    SELECT number, version - 1, $4 FROM thread WHERE $4 IS NOT NULL
), extra AS (
    INSERT INTO {schema}.extra (thread_number, key, value)
    SELECT number, $5, $6 FROM thread WHERE $5::text IS NOT NULL
    ON CONFLICT (thread_number, key) DO UPDATE SET value = excluded.value
)
SELECT version FROM thread
"""

# The same for any number of threads, each once, ordered by id. $4 separates the parts
# of $1, $2, $5, $6 and $7. $1, $2 and $5 are the ids, the versions expected (NULL: any
# for all; empty: any), and how many messages each one gets; $6 to $8 for each message
# its thread, how far from the end it stands, and the text; $9 to $11 for each key of
# extra its thread, key and value. Returns the threads written and their new versions.
# A thread that must exist is locked first: deleted meanwhile, it would be begun again.
APPEND_MANY = """
WITH thread AS (
    INSERT INTO {schema}.threads AS t (thread_id, version, created_at, updated_at)
    SELECT w.thread_id, w.added::bigint, $3, $3
    FROM unnest((SELECT string_to_array($1, $4)), string_to_array($2, $4),
            string_to_array($5, $4)) AS w (thread_id, expected, added)
    WHERE coalesce(w.expected, '') IN ('', '0') OR EXISTS (
        SELECT FROM {schema}.threads AS s WHERE s.thread_id = w.thread_id FOR KEY SHARE)
    ON CONFLICT (thread_id) DO UPDATE
    SET version = t.version + excluded.version,
        updated_at = greatest(t.updated_at + 1, $3)
    WHERE $2 IS NULL OR (SELECT string_to_array($2, $4))[array_position(
        (SELECT string_to_array($1, $4)), t.thread_id)] IN ('', t.version::text)
    RETURNING number, thread_id, version
), messages AS (
    INSERT INTO {schema}.messages (thread_number, position, body)
    SELECT t.number, t.version - m.back::bigint, m.body
    FROM unnest(string_to_array($6, $4), string_to_array($7, $4), $8::text[])
        AS m (thread_id, back, body)
    JOIN thread AS t USING (thread_id)
), extra AS (
    INSERT INTO {schema}.extra (thread_number, key, value)
    SELECT t.number, e.key, e.value
    FROM unnest($9::text[], $10::text[], $11::text[]) AS e (thread_id, key, value)
    JOIN thread AS t USING (thread_id)
    ON CONFLICT (thread_number, key) DO UPDATE SET value = excluded.value
)
SELECT thread_id, version FROM thread
"""

VERSION = "SELECT version FROM {schema}.threads WHERE thread_id = $1"

# Returns whether the call is on record now, and otherwise the call that stands in the
# way. Neither: another claim was faster, so look again. The unique indexes decide
# between two claims of one call id, or of one attempt of a key. The thread's row comes
# last, because a claim that is refused must not begin a thread.
CLAIM = """
WITH known AS (
    SELECT {call} FROM {schema}.calls AS c WHERE c.thread_id = $1 AND c.call_id = $2
), newest AS (
    SELECT {call} FROM {schema}.calls AS c WHERE c.idempotency_key = $5
    ORDER BY c.attempt DESC LIMIT 1
), taken AS (
    SELECT * FROM known
    UNION ALL
    SELECT * FROM newest WHERE status <> 'failed' AND NOT EXISTS (SELECT FROM known)
), claimed AS (
    INSERT INTO {schema}.calls (thread_id, call_id, tool_name, args, idempotency_key,
        status, attempt, issued_at)
    SELECT $1, $2, $3, $4, $5, 'issued',
        coalesce((SELECT attempt FROM newest), 0) + 1, $6
    WHERE NOT EXISTS (SELECT FROM taken)
    ON CONFLICT DO NOTHING
    RETURNING thread_id
), thread AS (
    INSERT INTO {schema}.threads AS t (thread_id, version, created_at, updated_at)
    SELECT thread_id, 0, $6, $6 FROM claimed
    ON CONFLICT (thread_id) DO UPDATE SET updated_at = greatest(t.updated_at + 1, $6)
)
SELECT EXISTS (SELECT FROM claimed), taken.*
FROM (SELECT) AS one LEFT JOIN taken ON true
"""

# Returns the call as it stands. Still issued: another writer resolved it meanwhile, so
# look again. Counting the changed threads makes Postgres lock the thread's row first.
RESOLVE = """
WITH known AS (
    SELECT {call} FROM {schema}.calls AS c WHERE c.thread_id = $1 AND c.call_id = $2
), thread AS (
    UPDATE {schema}.threads SET updated_at = greatest(updated_at + 1, $5)
    WHERE thread_id = $1
        AND EXISTS (SELECT FROM known WHERE status = 'issued' AND NOT erased)
    RETURNING number
), resolved AS (
    UPDATE {schema}.calls AS c
    SET status = $3, resolved_at = greatest(c.issued_at, $5),
        result = CASE WHEN c.erased THEN NULL ELSE $4 END
    WHERE c.thread_id = $1 AND c.call_id = $2 AND c.status = 'issued'
        AND (SELECT count(*) FROM thread) >= 0
    RETURNING {call}
)
SELECT * FROM resolved
UNION ALL
SELECT * FROM known WHERE NOT EXISTS (SELECT FROM resolved)
"""

# Deletes thread $1 if it is at version $2 (NULL: any), and with $3 its calls. Returns
# the version that was seen (NULL: no thread), and whether the thread was deleted.
# Without a thread all calls are erased; one that is not was claimed meanwhile.
ERASE = """
WITH seen AS (
    SELECT number, version, updated_at FROM {schema}.threads WHERE thread_id = $1
), gone AS (
    DELETE FROM {schema}.threads AS t USING seen
    WHERE t.number = seen.number AND t.updated_at = seen.updated_at
        AND seen.version = coalesce($2, seen.version)
    RETURNING t.number
), messages AS (
    DELETE FROM {schema}.messages WHERE thread_number = (SELECT number FROM gone)
        AND position >= 0 AND position < (SELECT version FROM seen)
), extra AS (
    DELETE FROM {schema}.extra AS e WHERE {extra_of_thread} = (SELECT number FROM gone)
), forgotten AS (
    DELETE FROM {schema}.calls AS c
    WHERE {calls_of_thread} AND $3::boolean AND (
        EXISTS (SELECT FROM gone)
        OR c.erased AND coalesce($2, 0) = 0 AND NOT EXISTS (SELECT FROM seen))
), erased AS (
    UPDATE {schema}.calls AS c SET args = '{}', result = NULL, erased = true
    WHERE {calls_of_thread} AND NOT $3 AND NOT c.erased AND EXISTS (SELECT FROM gone)
)
SELECT (SELECT version FROM seen), EXISTS (SELECT FROM gone)
"""

# Removes the messages of thread $1 below $2, if it is at version $3 (NULL: any).
# Returns the version and the first position that were seen, and how many it removed:
# none where a message below $2 came meanwhile, so look again.
TRIM = """
WITH seen AS (
    SELECT number, version, first FROM {schema}.threads WHERE thread_id = $1
), cut AS (
    UPDATE {schema}.threads AS t SET first = least($2, t.version) FROM seen
    WHERE t.number = seen.number AND t.version = coalesce($3, t.version)
        AND least($2, t.version) BETWEEN t.first + 1 AND seen.version
    RETURNING t.number, t.first
), gone AS (
    DELETE FROM {schema}.messages WHERE thread_number = (SELECT number FROM cut)
        AND position >= (SELECT first FROM seen)
        AND position < (SELECT first FROM cut)
    RETURNING position
)
SELECT coalesce(version, 0), coalesce(first, 0), (SELECT count(*) FROM gone)
FROM (SELECT) AS one LEFT JOIN seen ON true
"""

# Erases the calls of thread $1 with an outcome from before $2, if the thread is at
# version $3 (NULL: any). Returns the version, and how many it erased. It locks the
# thread's row only if there is something to erase.
ERASE_ENDED_CALLS = """
WITH seen AS (
    SELECT version FROM {schema}.threads AS t
    WHERE thread_id = $1 AND EXISTS (
        SELECT FROM {schema}.calls AS c
        WHERE {calls_of_thread} AND c.resolved_at < $2 AND NOT c.erased)
    FOR UPDATE OF t
), erased AS (
    UPDATE {schema}.calls AS c SET args = '{}', result = NULL, erased = true
    WHERE {calls_of_thread} AND c.resolved_at < $2 AND NOT c.erased
        AND (SELECT version FROM seen) = coalesce($3, (SELECT version FROM seen))
    RETURNING 1
)
SELECT coalesce((SELECT version FROM seen),
    (SELECT version FROM {schema}.threads WHERE thread_id = $1), 0),
    (SELECT count(*) FROM erased)
"""

# No claim may come between looking at keys and restoring or forgetting their calls: the
# number of an attempt would count calls that are gone, or not count restored ones.
LOCK_CALLS = "LOCK TABLE {schema}.calls IN SHARE ROW EXCLUSIVE MODE"

CALLS_OF_KEYS = """
SELECT {call} FROM {schema}.calls AS c
WHERE c.idempotency_key = ANY ($1::text[]) ORDER BY c.attempt
"""

# Returns no row where the thread was begun meanwhile. $3 is its first position.
BEGIN_THREAD = """
INSERT INTO {schema}.threads (thread_id, first, version, created_at, updated_at)
VALUES ($1, $3, $3, $2, $2) ON CONFLICT (thread_id) DO NOTHING RETURNING number
"""

SET_TIME = "UPDATE {schema}.threads SET updated_at = $2 WHERE thread_id = $1"

# Each element of $1 is a call as a JSON object.
RESTORE_CALLS = """
INSERT INTO {schema}.calls ({columns})
SELECT {call} FROM unnest($1::text[]) WITH ORDINALITY AS r (text, nth),
    LATERAL json_populate_record(NULL::{schema}.calls, r.text::json) AS c
ORDER BY nth
"""

# The messages from position $2 up to $3 of thread $1; either can be negative, to count
# from the end. Before them, at position -1, the rest of the thread as JSON: version,
# extra, the pending calls or ($4) every call, times, and the first position.
READ = """
WITH thread AS (SELECT * FROM {schema}.threads WHERE thread_id = $1)
SELECT -1 AS position, json_build_array(
    version,
    {items_of} number),
    CASE WHEN $4::boolean THEN
        (SELECT json_agg(json_build_array({call}) ORDER BY c.sequence)
         FROM {schema}.calls AS c WHERE {calls_of_thread})
    ELSE {pending_of} $1)
    END, created_at, updated_at, coalesce(first, 0))::text AS body
FROM (SELECT) AS one LEFT JOIN thread ON true
UNION ALL
SELECT position, body FROM {schema}.messages
WHERE thread_number = (SELECT number FROM thread)
    AND position >= (
        SELECT greatest(first, CASE WHEN $2::bigint < 0 THEN version + $2 ELSE $2 END)
        FROM thread)
    AND position < (
        SELECT CASE WHEN $3::bigint < 0 THEN version + $3 ELSE $3 END FROM thread)
"""

# Threads $1 without messages, each as JSON: version, extra, the pending calls, and the
# first position.
READ_MANY = """
SELECT t.thread_id, json_build_array(
    t.version, {items_of} t.number), {pending_of} t.thread_id), t.first)::text
FROM unnest((SELECT $1::text[])) AS w (thread_id)
JOIN {schema}.threads AS t ON t.thread_id = w.thread_id
"""

# Ids from $1 on, without $2, before $3. With $5 also ids that have nothing but erased
# calls.
THREADS = """
(SELECT thread_id, version, created_at, updated_at FROM {schema}.threads
WHERE thread_id >= $1 AND thread_id IS DISTINCT FROM $2 AND thread_id < $3
ORDER BY thread_id LIMIT $4)
UNION ALL
(SELECT c.thread_id, 0, min(c.issued_at), greatest(max(c.issued_at), max(c.resolved_at))
FROM {schema}.calls AS c
WHERE $5::boolean AND NOT EXISTS (
        SELECT FROM {schema}.threads AS t WHERE t.thread_id = c.thread_id)
    AND thread_id >= $1 AND thread_id IS DISTINCT FROM $2 AND thread_id < $3
GROUP BY c.thread_id ORDER BY c.thread_id LIMIT $4)
ORDER BY thread_id LIMIT $4
"""

# The newest message of each thread that is like one of $3, thread by thread, in order
# of their last change. That is the order of the inner query, so the limit ends it.
SEARCH = """
SELECT t.thread_id, found.position FROM (
    SELECT * FROM {schema}.threads WHERE thread_id >= $1 AND thread_id < $2
    ORDER BY updated_at DESC
) AS t CROSS JOIN LATERAL (
    SELECT position FROM {schema}.messages
    WHERE thread_number = t.number AND position >= 0
        AND position < (SELECT t.version) AND body ILIKE ANY ($3::text[])
    ORDER BY position DESC LIMIT 1
) AS found
ORDER BY t.updated_at DESC LIMIT $4
"""

LIMIT_TIME = "SELECT set_config('statement_timeout', $1, true)"

CALLS = """
SELECT {call} FROM {schema}.calls AS c WHERE {calls_of_thread} ORDER BY c.sequence
"""

HOLDER = """
SELECT {call} FROM {schema}.calls AS c WHERE c.idempotency_key = $1
ORDER BY c.attempt DESC LIMIT 1
"""

# $1 is NULL for all ids.
MARKERS = """
SELECT t.thread_id, t.number, t.updated_at
FROM unnest((SELECT $1::text[])) AS w (thread_id)
JOIN {schema}.threads AS t ON t.thread_id = w.thread_id
UNION ALL
SELECT thread_id, number, updated_at FROM {schema}.threads WHERE $1 IS NULL
"""

# Transactions that notify take one lock of the whole server at their commit. So writes
# do not notify. The handle that wrote does it later, and only where a process listens,
# which shows in ``pg_locks``: a connection that listens shares an advisory lock.
LISTENING = "SELECT pg_advisory_lock_shared(hashtextextended($1, 0))"

ANNOUNCE = """
SELECT pg_notify($1, thread_id) FROM unnest((SELECT $2::text[])) AS w (thread_id)
WHERE EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 1 AND granted
        AND (classid::bigint << 32) | objid::bigint = hashtextextended($1, 0)
        AND database = (
            SELECT oid FROM pg_database WHERE datname = current_database())
)
"""


def filled(query: str, schema: str) -> str:
    """Return the text of a query for a schema of that name."""
    for name, part in _PARTS.items():
        query = query.replace(name, part)

    identifier = schema.replace('"', '""')
    return query.replace("{schema}", f'"{identifier}"')
