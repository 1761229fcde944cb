"""Every statement of the store, as a whole text, and how values are put into them.

Ids, keys and texts are bytes to the server: it compares them byte by byte, and changes
no character. Times are microseconds since 1970, UTC.
"""

from __future__ import annotations

from collections.abc import Iterable

from cpkit.driver import StoredCall

SCHEMA_VERSION = 1

# A thread keeps its row for as long as anything is on record of it: ``erased`` is 1 if
# that is nothing but erased calls. ``claims`` counts them and numbers the next one.
# Every change writes a new random ``revision``: a watch compares it, and two nodes of a
# cluster that change one thread at the same time change one row.
#
# A row of ``cpkit_keys`` is locked by each change of a key's attempts. It says nothing
# else: attempts are found by the index of ``cpkit_calls``, and a missing row is created
# by the next claim.
CREATE = """
CREATE TABLE IF NOT EXISTS cpkit_threads (
    thread_id VARBINARY(512) NOT NULL PRIMARY KEY,
    version BIGINT NOT NULL,
    first BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    erased BOOLEAN NOT NULL,
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
    idempotency_key VARBINARY(512) NOT NULL PRIMARY KEY,
    revision BIGINT NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
CREATE TABLE IF NOT EXISTS cpkit_calls (
    thread_id VARBINARY(512) NOT NULL,
    call_id VARBINARY(512) NOT NULL,
    tool_name BLOB NOT NULL,
    args LONGBLOB NOT NULL,
    idempotency_key VARBINARY(512) NOT NULL,
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
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
CREATE TABLE IF NOT EXISTS cpkit_schema (
    version BIGINT NOT NULL PRIMARY KEY
) ENGINE = InnoDB;
REPLACE INTO cpkit_schema VALUES (1)
"""

VERSION = "SELECT version FROM cpkit_schema"
SIZE = """
SELECT SUM(data_length + index_length) FROM information_schema.tables
WHERE table_schema = DATABASE() AND table_name LIKE 'cpkit\\_%'
"""

# A read sees one moment: the server's view of when the transaction began.
ONE_MOMENT = """
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY
"""

# Rows are locked in the order of the primary key. With another plan the server could
# wait for rows of other writers.
LOCK_THREADS = """
SELECT thread_id, version, first, created_at, updated_at, erased, claims
FROM cpkit_threads FORCE INDEX (PRIMARY) WHERE thread_id IN {ids}
ORDER BY thread_id FOR UPDATE
"""
LOCK_KEYS = """
SELECT idempotency_key FROM cpkit_keys FORCE INDEX (PRIMARY)
WHERE idempotency_key IN {keys} ORDER BY idempotency_key FOR UPDATE
"""

_CALL = ", ".join(f"c.{name}" for name in StoredCall._fields)
CALLS = f"SELECT {_CALL} FROM cpkit_calls AS c WHERE {{condition}}"
CALLS_OF_THREAD = f"{CALLS} AND c.thread_id = {{id}} ORDER BY c.sequence"
NEWEST_ATTEMPTS = f"""
SELECT {_CALL} FROM cpkit_calls AS c JOIN (
    SELECT idempotency_key, MAX(attempt) AS attempt FROM cpkit_calls
    WHERE idempotency_key IN {{keys}} GROUP BY idempotency_key
) AS newest USING (idempotency_key, attempt)
"""
HOLDER = f"""
SELECT {_CALL} FROM cpkit_calls AS c
WHERE idempotency_key = {{key}} ORDER BY attempt DESC LIMIT 1
"""

THREAD = """
SELECT version, first, created_at, updated_at, erased FROM cpkit_threads
WHERE thread_id = {id}
"""
# The thread is one row by its key, so its version is a constant to the planner, and
# only the range is read.
MESSAGES = """
SELECT m.body FROM cpkit_threads AS t JOIN cpkit_messages AS m
    ON m.thread_id = t.thread_id AND m.position >= {start} AND m.position < {stop}
WHERE t.thread_id = {id} ORDER BY m.position
"""
EXTRA = "SELECT name, value FROM cpkit_extra WHERE thread_id = {id}"
THREADS = """
SELECT thread_id, version, created_at, updated_at FROM cpkit_threads
WHERE thread_id >= {start} AND thread_id > {after} AND thread_id < {end}
    AND erased <= {erased} ORDER BY thread_id LIMIT {limit}
"""
MARKERS = "SELECT thread_id, revision FROM cpkit_threads"


def quoted(value: str | bytes | int | None) -> str:
    """Return a value as SQL.

    The session's sql_mode has neither NO_BACKSLASH_ESCAPES nor ANSI_QUOTES, and its
    character set is utf8mb4, so a quotation mark ends a text only where it stands
    alone. JSON grows less by this than by the client's own function.
    """
    if isinstance(value, int):
        return str(int(value))

    if value is None:
        return "NULL"

    text = value if isinstance(value, str) else value.decode()
    return "_binary'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def as_list(values: Iterable[str | bytes | int | None]) -> str:
    return f"({', '.join(map(quoted, values))})"


def size(text: str) -> int:
    """Return how many bytes a part of a script has."""
    return len(text) if text.isascii() else len(text.encode())
