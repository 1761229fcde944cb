"""Every statement of the store, as a whole text.

How appends stay in order without a lock of their own
    A statement names the position behind the last message that it sees, and a position
    is unique in its thread. So of two writers that name the same one, the second waits
    for the first and then inserts nothing: it is run again.

    No gap: a message that a statement sees is committed. The further messages of an
    append are inserted only where its first one was. So a position is never visible
    without those before it.

    No invisible append: the same statement locks the thread's row (FOR KEY SHARE,
    which does not block other appends), and deleting a thread deletes its row first.
    Either the append locks first: the deletion waits for its commit, and removes its
    messages. Or the deletion is first: the append waits, finds no row, and inserts
    nothing. While the row is locked no message can be deleted, so a position that is
    taken is seen as taken.

    No deadlock: a statement inserts into its threads in the order of their ids, and
    extra keys in the order of their hashes. Who changes a call as well locks the
    thread's row first; only a claim inserts its call first, which no one else can see.

Why a conflict names its column
    A copy that leaves out sequences, such as logical replication, gives new threads
    numbers that are taken. Without ``(thread_id)`` an append would take that for a
    thread that another writer began, and would be run again until its time is over.

Why the plans do not depend on statistics
    The planner does not know the number of a thread in advance. From the statistics it
    would guess that a thread has an average size, which beside one huge thread is a
    large part of the table, and read all of it. It takes a range whose end comes from a
    subquery for a two-hundredth of the rows, so ``position < (SELECT …)`` and the like
    keep it on the index. For the same reason arrays stand in a subquery: a plan made
    for given values is not cheaper than the general one, and is not made each time.

Why arrays hold text
    asyncpg knows ``text[]``. Of another array's type it asks the server, once for each
    connection: six round trips, and a query that takes longer than a load. So numbers
    and hashes in an array are sent as text, and calls are returned as JSON texts.

Why times are compared
    Postgres has times that Python cannot hold: infinity, BC, the year 20000. asyncpg
    fails on the whole answer then, and nothing tells which thread is damaged. So they
    are returned as `TOO_LATE`, the same for all of them.
"""

from __future__ import annotations

from datetime import UTC, datetime

from cpkit.driver import StoredCall

TOO_LATE = datetime(9999, 12, 31, tzinfo=UTC)


def _readable(time: str) -> str:
    """Return SQL for a time, or for `TOO_LATE` where Python cannot hold the time."""
    return (
        f"CASE WHEN {time} < '0001-01-02 UTC' OR {time} > '9999-12-31 UTC' "
        f"THEN '9999-12-31 UTC' ELSE {time} END"
    )


# What stands for a name in the queries below; the first may use the others.
_PARTS = {
    "{or_touch_it}": """ON CONFLICT (thread_id) DO UPDATE SET changes = t.changes + 1,
        updated_at = {now}""",
    # Later than before, even if the clock is not: workers compare it.
    "{now}": "greatest(t.updated_at + interval '1 microsecond', clock_timestamp())",
    # Of a row of ``seen``: another transaction holds the lock of the thread's row.
    "{is_locked}": """(seen.number IS NULL AND EXISTS (
        SELECT FROM {schema}.threads AS t WHERE t.thread_id = seen.thread_id))""",
    "{last_message}": """{schema}.messages AS m WHERE m.thread_number = t.number
        ORDER BY m.position DESC LIMIT 1""",
    "{extra_of_thread}": """e.key_hash >= ''
        AND e.key_hash <= (SELECT decode(repeat('ff', 32), 'hex'))
        AND e.thread_number""",
    "{calls_of_thread}": """c.thread_id = $1 AND c.call_id > ''
        AND c.call_id < (SELECT repeat(chr(1114111), 129))""",
    "{call}": "c." + ", c.".join(StoredCall._fields),
    "{call_to_read}": ", ".join(
        f"{_readable(f'c.{name}')} AS {name}" if name.endswith("_at") else f"c.{name}"
        for name in StoredCall._fields
    ),
    "{created_at}": _readable("created_at"),
    # A thread may have been begun while the clock was set back.
    "{updated_at}": f"greatest({_readable('created_at')}, {_readable('updated_at')})",
    "{columns}": ", ".join(StoredCall._fields),
}

# Appends to thread $1 if it is at version $2 (NULL: any): message $3, and those of $4.
# Returns the version before, whether it was appended, and false (see APPEND_MANY).
# Where the clock was set back, the time of the message before counts.
APPEND = """
WITH seen AS (
    SELECT t.number, coalesce(last.position + 1, 0) AS version, last.appended_at
    FROM (SELECT) AS one LEFT JOIN LATERAL (
        SELECT number FROM {schema}.threads WHERE thread_id = $1 FOR KEY SHARE
    ) AS t ON true
    LEFT JOIN LATERAL (SELECT * FROM {last_message}) AS last ON true
), born AS (
    INSERT INTO {schema}.threads (thread_id)
    SELECT $1 FROM seen WHERE number IS NULL AND coalesce($2::integer, 0) = 0
    ON CONFLICT (thread_id) DO NOTHING
    RETURNING number
), first AS (
    INSERT INTO {schema}.messages (thread_number, position, appended_at, body)
    SELECT number, version, greatest(clock_timestamp(), appended_at), $3::text
    FROM (SELECT number, version, appended_at FROM seen WHERE number IS NOT NULL
          UNION ALL SELECT number, 0, NULL FROM born) AS place
    WHERE version = coalesce($2, version)
    ON CONFLICT DO NOTHING
    RETURNING thread_number, position, appended_at
), rest AS (
    INSERT INTO {schema}.messages (thread_number, position, appended_at, body)
    SELECT first.thread_number, first.position + r.nth,
        greatest(clock_timestamp(), first.appended_at), r.body
    FROM first, unnest((SELECT $4::text[])) WITH ORDINALITY AS r (body, nth)
)
SELECT version, EXISTS (SELECT FROM first), false FROM seen
"""

# The same for many threads, each once, ordered by id. $1 to $3 have an element for each
# thread: id, expected version, first message. $4 to $6 have one for each further
# message: its thread's number in $1, 1 for the thread's second message and so on, and
# the message. $7 to $10 have one for each key of extra.
APPEND_MANY = """
WITH wanted AS (
    SELECT w.thread_id, w.expected::integer, w.body, w.entry FROM unnest(
        (SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::text[])
    ) WITH ORDINALITY AS w (thread_id, expected, body, entry)
), seen AS (
    SELECT w.*, t.number, coalesce(last.position + 1, 0) AS version, last.appended_at
    FROM wanted AS w LEFT JOIN LATERAL (
        SELECT number FROM {schema}.threads WHERE thread_id = w.thread_id
        FOR KEY SHARE SKIP LOCKED
    ) AS t ON true
    LEFT JOIN LATERAL (SELECT * FROM {last_message}) AS last ON true
), born AS (
    INSERT INTO {schema}.threads (thread_id)
    SELECT thread_id FROM seen WHERE number IS NULL AND NOT {is_locked}
        AND coalesce(expected, 0) = 0
    ORDER BY entry
    ON CONFLICT (thread_id) DO NOTHING
    RETURNING number, thread_id
), place AS (
    SELECT s.entry, coalesce(s.number, b.number) AS number, s.version, s.body,
        s.appended_at
    FROM seen AS s LEFT JOIN born AS b ON b.thread_id = s.thread_id
    WHERE s.version = coalesce(s.expected, s.version)
), first AS (
    INSERT INTO {schema}.messages (thread_number, position, appended_at, body)
    SELECT number, version, greatest(clock_timestamp(), appended_at), body FROM place
    WHERE number IS NOT NULL
    ORDER BY entry
    ON CONFLICT DO NOTHING
    RETURNING thread_number, appended_at
), rest AS (
    INSERT INTO {schema}.messages (thread_number, position, appended_at, body)
    SELECT p.number, p.version + r.nth::integer,
        greatest(clock_timestamp(), f.appended_at), r.body
    FROM unnest((SELECT $4::text[]), (SELECT $5::text[]), (SELECT $6::text[]))
        AS r (entry, nth, body)
    JOIN place AS p ON p.entry = r.entry::bigint
    JOIN first AS f ON f.thread_number = p.number
), merged AS (
    INSERT INTO {schema}.extra (thread_number, key_hash, key, value)
    SELECT p.number, decode(e.key_hash, 'hex'), e.key, e.value
    FROM unnest((SELECT $7::text[]), (SELECT $8::text[]), (SELECT $9::text[]),
        (SELECT $10::text[])) AS e (entry, key_hash, key, value)
    JOIN place AS p ON p.entry = e.entry::bigint
    JOIN first AS f ON f.thread_number = p.number
    ORDER BY p.entry, decode(e.key_hash, 'hex')
    ON CONFLICT (thread_number, key_hash) DO UPDATE SET value = excluded.value
)
SELECT seen.version, coalesce(p.number IN (SELECT thread_number FROM first), false),
    {is_locked}
FROM seen LEFT JOIN place AS p ON p.entry = seen.entry
ORDER BY seen.entry
"""

# The same for one thread, so it may wait for the lock.
APPEND_WITH_EXTRA = APPEND_MANY.replace(" SKIP LOCKED", "")

VERSION = """
SELECT coalesce((SELECT m.position + 1 FROM {last_message}), 0)
FROM {schema}.threads AS t WHERE t.thread_id = $1
"""

# Waits for appends that are under way, and holds off others until the commit.
LOCK_THREAD = "SELECT FROM {schema}.threads WHERE thread_id = $1 FOR UPDATE"

ADD_THREAD = """
INSERT INTO {schema}.threads (thread_id) VALUES ($1)
ON CONFLICT (thread_id) DO NOTHING
RETURNING number
"""

MERGE = """
WITH thread AS (
    INSERT INTO {schema}.threads AS t (thread_id) VALUES ($1)
    {or_touch_it}
    RETURNING number
)
INSERT INTO {schema}.extra (thread_number, key_hash, key, value)
SELECT thread.number, decode(e.key_hash, 'hex'), e.key, e.value
FROM thread,
    unnest((SELECT $2::text[]), (SELECT $3::text[]), (SELECT $4::text[]))
        AS e (key_hash, key, value)
ORDER BY decode(e.key_hash, 'hex')
ON CONFLICT (thread_number, key_hash) DO UPDATE SET value = excluded.value
"""

# Returns whether the call is on record now, and otherwise the call that stands in the
# way. Neither: another claim was faster, so look again. The unique indexes decide
# between two claims of one call id, or of one attempt of a key; a failed call stays
# failed, so a key has one call that is not. The thread's row comes last, because a
# claim that is refused must not begin a thread.
CLAIM = """
WITH known AS (
    SELECT {call_to_read} FROM {schema}.calls AS c
    WHERE c.thread_id = $1 AND c.call_id = $2
), newest AS (
    SELECT {call_to_read} FROM {schema}.calls AS c WHERE c.idempotency_key = $5
    ORDER BY c.attempt DESC LIMIT 1
), taken AS (
    SELECT * FROM known
    UNION ALL
    SELECT * FROM newest WHERE status <> 'failed' AND NOT EXISTS (SELECT FROM known)
), claimed AS (
    INSERT INTO {schema}.calls (thread_id, call_id, tool_name, args, idempotency_key,
        status, attempt, issued_at)
    SELECT $1, $2, $3, $4, $5, 'issued',
        coalesce((SELECT attempt FROM newest), 0) + 1, clock_timestamp()
    WHERE NOT EXISTS (SELECT FROM taken)
    ON CONFLICT DO NOTHING
    RETURNING thread_id
), thread AS (
    INSERT INTO {schema}.threads AS t (thread_id) SELECT thread_id FROM claimed
    {or_touch_it}
)
SELECT EXISTS (SELECT FROM claimed), taken.*
FROM (SELECT) AS one LEFT JOIN taken ON true
"""

# Returns the call as it stands. Still issued: another writer resolved it meanwhile, so
# look again. Counting the touched rows makes Postgres lock the thread's row first. An
# erased call's thread counts a change and gets no new time: see `MARKERS`.
RESOLVE = """
WITH touched AS (
    UPDATE {schema}.threads AS t
    SET changes = t.changes + 1, updated_at = CASE WHEN c.erased THEN t.updated_at
        ELSE {now} END
    FROM {schema}.calls AS c
    WHERE t.thread_id = $1
        AND c.thread_id = $1 AND c.call_id = $2 AND c.status = 'issued'
    RETURNING t.number
), resolved AS (
    UPDATE {schema}.calls AS c
    SET status = $3, resolved_at = clock_timestamp(),
        result = CASE WHEN c.erased THEN NULL ELSE $4 END
    WHERE c.thread_id = $1 AND c.call_id = $2 AND c.status = 'issued'
        AND (SELECT count(*) FROM touched) >= 0
    RETURNING {call_to_read}
)
SELECT * FROM resolved
UNION ALL
SELECT {call_to_read} FROM {schema}.calls AS c
WHERE c.thread_id = $1 AND c.call_id = $2 AND NOT EXISTS (SELECT FROM resolved)
"""

DELETE_THREAD = "DELETE FROM {schema}.threads WHERE thread_id = $1 RETURNING number"

# After DELETE_THREAD, which returned $2, and a statement of its own: it has to see what
# was written until that row was locked. Without a thread all calls are erased already,
# and one that is not was claimed meanwhile. $3: forget the calls.
DELETE_CONTENT = """
WITH deleted_messages AS (
    DELETE FROM {schema}.messages
    WHERE thread_number = $2 AND position >= 0 AND position <= (SELECT 2147483647)
), deleted_extra AS (
    DELETE FROM {schema}.extra AS e WHERE {extra_of_thread} = $2
), forgotten AS (
    DELETE FROM {schema}.calls AS c
    WHERE {calls_of_thread} AND $3::boolean AND (c.erased OR $2::bigint IS NOT NULL)
)
UPDATE {schema}.calls AS c SET args = '{}', result = NULL, erased = true
WHERE {calls_of_thread} AND NOT $3::boolean AND NOT c.erased AND $2::bigint IS NOT NULL
"""

# No claim may come between looking at keys and restoring or forgetting their calls: the
# number of an attempt would count calls that are gone, or not count restored ones.
LOCK_CALLS = "LOCK TABLE {schema}.calls IN SHARE ROW EXCLUSIVE MODE"

ATTEMPTS = """
SELECT {call_to_read} FROM {schema}.calls AS c
WHERE c.idempotency_key = ANY ($1::text[])
ORDER BY c.attempt
"""

# Each element of $1 is a call as a JSON object.
RESTORE_CALLS = """
INSERT INTO {schema}.calls ({columns})
SELECT {call} FROM unnest($1::text[]) WITH ORDINALITY AS r (text, nth),
    LATERAL json_populate_record(NULL::{schema}.calls, r.text::json) AS c
ORDER BY nth
"""

# Fails with a unique violation of the id where the thread was begun meanwhile.
RESTORE_THREAD = """
WITH thread AS (
    INSERT INTO {schema}.threads (thread_id, created_at, updated_at)
    VALUES ($1, $2, $3) RETURNING number
), messages AS (
    INSERT INTO {schema}.messages (thread_number, position, appended_at, body)
    SELECT number, nth - 1, $3, body
    FROM thread, unnest($4::text[]) WITH ORDINALITY AS r (body, nth)
)
INSERT INTO {schema}.extra (thread_number, key_hash, key, value)
SELECT number, decode(key_hash, 'hex'), key, value
FROM thread, unnest($5::text[], $6::text[], $7::text[]) AS r (key_hash, key, value)
"""

# The messages from position $2 up to $3 of thread $1; either can be negative, to count
# from the end. Before them, at position -1, a row with the version and, where $4 is not
# NULL, the rest of the thread: extra, all keys before all values; the pending calls or
# ($4) every call; the times.
READ = """
WITH thread AS (
    SELECT number, created_at, greatest(updated_at, appended_at) AS updated_at,
        coalesce(position + 1, 0) AS version
    FROM {schema}.threads AS t LEFT JOIN LATERAL (SELECT * FROM {last_message}) AS last
        ON true
    WHERE thread_id = $1
)
SELECT -1 AS position, NULL AS body, version,
    CASE WHEN $4::boolean IS NOT NULL THEN
        ARRAY(SELECT e.key FROM {schema}.extra AS e
              WHERE {extra_of_thread} = number ORDER BY e.key_hash)
        || ARRAY(SELECT e.value FROM {schema}.extra AS e
              WHERE {extra_of_thread} = number ORDER BY e.key_hash)
    END AS extra,
    CASE WHEN $4 THEN
        ARRAY(SELECT json_build_array({call})::text FROM {schema}.calls AS c
              WHERE {calls_of_thread} ORDER BY c.sequence)
    WHEN NOT $4 THEN
        ARRAY(SELECT json_build_array({call})::text FROM {schema}.calls AS c
              WHERE c.thread_id = $1 AND c.status = 'issued' AND NOT c.erased
                  AND c.sequence > 0 AND c.sequence < (SELECT 9223372036854775807)
              ORDER BY c.sequence)
    END AS calls,
    {created_at} AS created_at, {updated_at} AS updated_at
FROM (SELECT) AS one LEFT JOIN thread ON true
UNION ALL
SELECT position, body, NULL, NULL, NULL, NULL, NULL FROM {schema}.messages
WHERE thread_number = (SELECT number FROM thread)
    AND position >= (
        SELECT CASE WHEN $2::integer < 0 THEN version + $2 ELSE $2 END FROM thread)
    AND position < (
        SELECT CASE WHEN $3::integer < 0 THEN version + $3 ELSE $3 END FROM thread)
"""

# With $5 also ids that have nothing but erased calls.
THREADS = """
SELECT thread_id, version, {created_at}, {updated_at}
FROM (
    SELECT t.thread_id, coalesce(last.position + 1, 0) AS version, t.created_at,
        greatest(t.updated_at, last.appended_at) AS updated_at
    FROM (
        SELECT * FROM {schema}.threads
        WHERE thread_id >= $1 AND thread_id IS DISTINCT FROM $2 AND thread_id < $3
        ORDER BY thread_id LIMIT $4
    ) AS t
    LEFT JOIN LATERAL (SELECT * FROM {last_message}) AS last ON true
    UNION ALL
    (SELECT c.thread_id, 0, min(c.issued_at),
        greatest(max(c.issued_at), max(c.resolved_at))
    FROM {schema}.calls AS c
    WHERE $5::boolean AND NOT EXISTS (
            SELECT FROM {schema}.threads AS t WHERE t.thread_id = c.thread_id)
        AND thread_id >= $1 AND thread_id IS DISTINCT FROM $2 AND thread_id < $3
    GROUP BY c.thread_id ORDER BY c.thread_id LIMIT $4)
) AS page
ORDER BY thread_id LIMIT $4
"""

CALLS = """
SELECT {call_to_read} FROM {schema}.calls AS c
WHERE {calls_of_thread} ORDER BY c.sequence
"""

HOLDER = """
SELECT {call_to_read} FROM {schema}.calls AS c WHERE c.idempotency_key = $1
ORDER BY c.attempt DESC LIMIT 1
"""

# A marker has the thread's number, its changes that are not appends, and its last
# position. Without a thread it counts the calls, and has the newest of them: others can
# stand in the place of forgotten ones. $1 is NULL for all ids.
MARKERS = """
SELECT w.thread_id, t.number, t.changes, (SELECT m.position FROM {last_message}),
    calls.number, calls.issued, calls.newest
FROM (
    SELECT unnest((SELECT $1::text[]))
    UNION SELECT thread_id FROM {schema}.threads WHERE $1 IS NULL
    UNION SELECT thread_id FROM {schema}.calls WHERE $1 IS NULL
) AS w (thread_id)
LEFT JOIN {schema}.threads AS t ON t.thread_id = w.thread_id
LEFT JOIN LATERAL (
    SELECT count(*) AS number, count(*) FILTER (WHERE c.status = 'issued') AS issued,
        max(c.sequence) AS newest
    FROM {schema}.calls AS c
    WHERE c.thread_id = w.thread_id AND c.call_id > ''
        AND c.call_id < (SELECT repeat(chr(1114111), 129))
) AS calls ON t.number IS NULL
WHERE t.number IS NOT NULL OR calls.number > 0
"""

# Ends the server process $1; returns a row for as long as it exists, after a moment. A
# process that began less than $2 seconds ago is another one, with the same number.
END_BACKEND = """
SELECT pg_terminate_backend(pid), pg_sleep(0.01) FROM pg_stat_activity
WHERE pid = $1::integer AND usename = current_user AND datname = current_database()
    AND backend_start <= clock_timestamp() - $2::double precision * interval '1 second'
"""

# Two keys of 32 bits: those of this store, and not of another program's locks.
LISTENING = "SELECT pg_advisory_lock_shared($1::integer, $2::integer)"

IS_STANDBY = "SELECT pg_is_in_recovery()"

ANNOUNCE = """
SELECT pg_notify($1, thread_id) FROM unnest((SELECT $4::text[])) AS w (thread_id)
WHERE EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 2 AND granted
        AND classid::bigint::bit(32)::integer = $2::integer
        AND objid::bigint::bit(32)::integer = $3::integer
        AND database = (
            SELECT oid FROM pg_database WHERE datname = current_database())
)
"""


def filled(query: str, schema: str) -> str:
    """Return the text of a query for a schema of that name."""
    for name, part in _PARTS.items():
        query = query.replace(name, part)

    return query.replace("{schema}", quoted(schema))


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
