"""Every statement of the store, as a whole text, and how values are put into them.

Ids, keys and texts are bytes to the server: it compares them byte by byte, and changes
no character. Times are microseconds since 1970, UTC.
"""

from __future__ import annotations

from collections.abc import Iterable

SCHEMA_VERSION = 1

# A thread keeps its row for as long as anything is on record of it; if that is nothing
# but erased calls, it has no times. ``claims`` numbers the next call.
# Every change writes a new random ``revision``: a watch compares it, and two nodes of a
# cluster that change one thread at the same time change one row.
#
# The comment of the last table is the version of the schema.
#
# Two claims of one key meet in a row of ``cpkit_keys``: each creates or replaces it.
# It says nothing else: attempts are found by the index of ``cpkit_calls``.
CREATE = """
CREATE TABLE IF NOT EXISTS cpkit_threads (
    thread_id VARBINARY(512) NOT NULL PRIMARY KEY,
    version BIGINT NOT NULL,
    first BIGINT NOT NULL,
    created_at BIGINT,
    updated_at BIGINT,
    claims BIGINT NOT NULL,
    revision BIGINT NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
CREATE TABLE IF NOT EXISTS cpkit_messages (
    thread_id VARBINARY(512) NOT NULL,
    position BIGINT NOT NULL,
    body LONGBLOB NOT NULL,
    PRIMARY KEY (thread_id, position)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
CREATE TABLE IF NOT EXISTS cpkit_extra (
    thread_id VARBINARY(512) NOT NULL,
    name VARBINARY(520) NOT NULL,
    value LONGBLOB NOT NULL,
    PRIMARY KEY (thread_id, name)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
CREATE TABLE IF NOT EXISTS cpkit_keys (
    idempotency_key VARBINARY(768) NOT NULL PRIMARY KEY,
    revision BIGINT NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
CREATE TABLE IF NOT EXISTS cpkit_calls (
    thread_id VARBINARY(512) NOT NULL,
    call_id VARBINARY(512) NOT NULL,
    tool_name BLOB NOT NULL,
    args LONGBLOB NOT NULL,
    idempotency_key VARBINARY(768) NOT NULL,
    status VARBINARY(16) NOT NULL,
    attempt BIGINT NOT NULL,
    issued_at BIGINT NOT NULL,
    result LONGBLOB,
    resolved_at BIGINT,
    erased BOOLEAN NOT NULL,
    sequence BIGINT NOT NULL,
    PRIMARY KEY (thread_id, call_id),
    UNIQUE KEY attempts (idempotency_key, attempt),
    KEY pending (thread_id, status, erased, sequence)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC COMMENT = '1'
"""

SCHEMA = """
SELECT MAX(table_comment), SUM(data_length + index_length)
FROM information_schema.tables
WHERE table_schema = DATABASE() AND table_name LIKE 'cpkit\\_%'
"""

# A read sees one moment: the server's view of when the transaction began.
ONE_MOMENT = """
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY
"""

# Rows are locked in the order of the primary key. With another plan the server could
# wait for rows of other writers.
THREADS = """
SELECT CONVERT(thread_id USING utf8mb4), version, first, created_at, updated_at, claims
FROM cpkit_threads FORCE INDEX (PRIMARY) WHERE thread_id IN {ids} ORDER BY thread_id
"""
# In the order of a StoredCall's fields; bytes that are text are sent as text.
CALLS = """
SELECT CONVERT(c.thread_id USING utf8mb4), CONVERT(c.call_id USING utf8mb4),
    CONVERT(c.tool_name USING utf8mb4), c.args,
    CONVERT(c.idempotency_key USING utf8mb4), CONVERT(c.status USING utf8mb4),
    c.attempt, c.issued_at, c.result, c.resolved_at, c.erased
FROM cpkit_calls AS c WHERE {condition}
"""

# The thread is one row by its key, so its version is a constant to the planner, and
# only the range is read.
MESSAGES = """
SELECT m.body FROM cpkit_threads AS t JOIN cpkit_messages AS m
    ON m.thread_id = t.thread_id AND m.position >= {start} AND m.position < {stop}
WHERE t.thread_id = {id} ORDER BY m.position
"""
EXTRA = "SELECT name, value FROM cpkit_extra WHERE thread_id = {id}"
# A thread without times has those of its erased calls.
PAGE = """
SELECT CONVERT(t.thread_id USING utf8mb4), t.version,
    COALESCE(t.created_at, (SELECT MIN(c.issued_at)
        FROM cpkit_calls AS c WHERE c.thread_id = t.thread_id)),
    COALESCE(t.updated_at, (SELECT MAX(COALESCE(c.resolved_at, c.issued_at))
        FROM cpkit_calls AS c WHERE c.thread_id = t.thread_id))
FROM cpkit_threads AS t
WHERE t.thread_id >= {start} AND t.thread_id > {after} AND t.thread_id < {end}
    AND (t.created_at IS NOT NULL OR {erased}) ORDER BY t.thread_id LIMIT {limit}
"""
MARKERS = """
SELECT CONVERT(thread_id USING utf8mb4), revision FROM cpkit_threads WHERE {where}
"""


def quoted(value: str | bytes | int | None) -> str:
    """Return a value as SQL.

    The session's sql_mode has neither NO_BACKSLASH_ESCAPES nor ANSI_QUOTES, and its
    character set is utf8mb4, so a quotation mark ends a text only where it stands
    alone. JSON grows less by this than by the client's own function.
    """
    if value is None or isinstance(value, int):
        return "NULL" if value is None else str(int(value))

    text = value if isinstance(value, str) else value.decode()
    return "_binary'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def as_list(values: Iterable[str | bytes | int | None]) -> str:
    return f"({', '.join(map(quoted, values))})"
