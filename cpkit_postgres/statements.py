"""The driver's SQL, for one schema."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Statements", "quoted", "statements"]

_CALL = """c.thread_id, c.call_id, c.tool_name, c.args, c.idempotency_key, c.status,
    c.attempt, c.issued_at, c.result, c.resolved_at, c.erased"""

# A thread's messages, after a row at position -1 with what there is of it beside them.
# In no order: sorting whole messages is cheap here and can spill to disk over there.
_LOAD = f"""
WITH thread AS (SELECT number FROM {{schema}}.threads WHERE thread_id = $1)
SELECT -1 AS position, NULL AS body,
    (SELECT max(position) FROM {{schema}}.messages WHERE thread_number = number)
        AS last,
    ARRAY(SELECT row(key, value) FROM {{schema}}.extra WHERE thread_number = number)
        AS extra,
    ARRAY(SELECT row({_CALL}) FROM {{schema}}.calls AS c
          WHERE c.thread_id = $1 AND c.status = 'issued' AND NOT c.erased
          ORDER BY c.sequence)
        AS pending
FROM thread
UNION ALL
SELECT position, body, NULL, NULL, NULL FROM {{schema}}.messages
WHERE thread_number = (SELECT number FROM thread)
"""

# The same for the slice from $2 to $3, either of them negative to count from the end.
_READ = """
WITH thread AS (
    SELECT number, 1 + coalesce(
        (SELECT max(position) FROM {schema}.messages WHERE thread_number = number),
        -1) AS version
    FROM {schema}.threads WHERE thread_id = $1
)
SELECT -1 AS position, NULL AS body, version FROM thread
UNION ALL
SELECT position, body, NULL FROM {schema}.messages
WHERE thread_number = (SELECT number FROM thread)
    AND position >= (
        SELECT CASE WHEN $2::bigint < 0 THEN version + $2 ELSE $2 END FROM thread)
    AND position < (
        SELECT CASE WHEN $3::bigint < 0 THEN version + $3 ELSE $3 END FROM thread)
"""

_VERSION = """
SELECT 1 + coalesce(
    (SELECT max(position) FROM {schema}.messages WHERE thread_number = number), -1)
FROM {schema}.threads WHERE thread_id = $1
"""

_THREADS = """
SELECT t.thread_id, coalesce(m.position, -1) + 1, t.created_at,
    greatest(t.updated_at, m.appended_at)
FROM (
    SELECT * FROM {schema}.threads
    WHERE thread_id >= $1 AND thread_id IS DISTINCT FROM $2 AND thread_id < $3
    ORDER BY thread_id LIMIT $4
) AS t
LEFT JOIN LATERAL (
    SELECT position, appended_at FROM {schema}.messages
    WHERE thread_number = t.number ORDER BY position DESC LIMIT 1
) AS m ON true
ORDER BY t.thread_id
"""

_CALLS = f"""
SELECT {_CALL} FROM {{schema}}.calls AS c WHERE c.thread_id = $1 ORDER BY c.sequence
"""

_LAST_ATTEMPT = f"""
SELECT {_CALL} FROM {{schema}}.calls AS c WHERE c.idempotency_key = $1
ORDER BY c.attempt DESC LIMIT 1
"""

_SETTINGS = """
SELECT version, current_setting('default_transaction_isolation'),
    current_setting('synchronous_commit'), current_setting('fsync'),
    current_setting('full_page_writes')
FROM {schema}.schema_version
"""


class Statements(NamedTuple):
    """Each statement's text; asyncpg prepares it once per connection."""

    load: str = _LOAD
    read: str = _READ
    version: str = _VERSION
    threads: str = _THREADS
    calls: str = _CALLS
    last_attempt: str = _LAST_ATTEMPT
    settings: str = _SETTINGS
    append: str = "SELECT {schema}.append_1($1, $2, $3, $4, $5)"
    append_many: str = "SELECT {schema}.append_many_1($1, $2, $3, $4, $5, $6, $7)"
    save_extra: str = "SELECT {schema}.save_extra_1($1, $2, $3)"
    claim: str = f"SELECT {_CALL} FROM {{schema}}.claim_1($1, $2, $3, $4, $5) AS c"
    resolve: str = f"SELECT {_CALL} FROM {{schema}}.resolve_1($1, $2, $3, $4) AS c"
    erase: str = "SELECT {schema}.erase_1($1, $2)"


def statements(schema: str) -> Statements:
    """Return the statements for a schema of that name."""
    name = quoted(schema)
    return Statements(*(text.replace("{schema}", name) for text in Statements()))


def quoted(name: str) -> str:
    """Return a name as an SQL identifier, inert whatever is in it."""
    return '"' + name.replace('"', '""') + '"'
