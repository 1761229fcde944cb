-- Version 1. Times are microseconds since 1970, UTC. Message bodies, extra keys and
-- values, args and results are JSON text.

CREATE TABLE cpkit_threads (
    number INTEGER PRIMARY KEY,
    thread_id TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL  -- by anything but appends: the last message tells
);

-- The key holds the thread's number above and the position below, so that the messages
-- of a thread lie together in one b-tree and an append writes one page of it.
CREATE TABLE cpkit_messages (
    key INTEGER PRIMARY KEY,  -- number << 32 | position
    appended_at INTEGER NOT NULL,
    body TEXT NOT NULL
);

CREATE TABLE cpkit_extra (
    thread_number INTEGER NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (thread_number, key)
) WITHOUT ROWID;

-- A call outlives its thread: what is left of it after a deletion names it by id.
CREATE TABLE cpkit_calls (
    sequence INTEGER PRIMARY KEY,  -- the order of claims
    thread_id TEXT NOT NULL,
    call_id TEXT NOT NULL,
    tool_name TEXT NOT NULL,
    args TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    status TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    issued_at INTEGER NOT NULL,
    result TEXT,
    resolved_at INTEGER,
    erased INTEGER NOT NULL DEFAULT 0,
    UNIQUE (thread_id, call_id)
);

CREATE UNIQUE INDEX cpkit_calls_attempt ON cpkit_calls (idempotency_key, attempt);

-- At most one issued or completed call per key, by the store's own word.
CREATE UNIQUE INDEX cpkit_calls_holder ON cpkit_calls (idempotency_key)
    WHERE status <> 'failed';

CREATE INDEX cpkit_calls_pending ON cpkit_calls (thread_id, sequence)
    WHERE status = 'issued' AND NOT erased;

CREATE TABLE cpkit_schema (version INTEGER NOT NULL);
INSERT INTO cpkit_schema VALUES (1);
