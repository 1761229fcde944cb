-- Version 1. Times are microseconds since 1970, UTC. Message bodies, extra keys and
-- values, args and results are JSON text; encrypted messages are blobs.
BEGIN IMMEDIATE;

-- An append does not set updated_at: the time of the last message counts as well.
-- Messages below the position `trimmed` are gone, so the version of a thread without
-- messages is `trimmed`. A restored row is stored later than it was created.
CREATE TABLE IF NOT EXISTS cpkit_threads (
    number INTEGER PRIMARY KEY,
    thread_id TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    stored_at INTEGER NOT NULL,
    trimmed INTEGER NOT NULL DEFAULT 0
);

-- The key is the thread's number << 32 | the message's position. So a thread's messages
-- lie together in one b-tree, and an append writes one page.
CREATE TABLE IF NOT EXISTS cpkit_messages (
    key INTEGER PRIMARY KEY,
    appended_at INTEGER NOT NULL,
    body TEXT NOT NULL
);

CREATE TABLE IF NOT EXISTS cpkit_extra (
    thread_number INTEGER NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (thread_number, key)
) WITHOUT ROWID;

-- In the order of claims. A call outlives its thread, so it names the thread by its id.
CREATE TABLE IF NOT EXISTS cpkit_calls (
    sequence INTEGER PRIMARY KEY,
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

-- The second index refuses a second issued or completed call of a key.
CREATE UNIQUE INDEX IF NOT EXISTS cpkit_calls_attempt
    ON cpkit_calls (idempotency_key, attempt);
CREATE UNIQUE INDEX IF NOT EXISTS cpkit_calls_holder
    ON cpkit_calls (idempotency_key) WHERE status <> 'failed';
CREATE INDEX IF NOT EXISTS cpkit_calls_pending
    ON cpkit_calls (thread_id, sequence) WHERE status = 'issued' AND NOT erased;
CREATE INDEX IF NOT EXISTS cpkit_calls_erased ON cpkit_calls (thread_id) WHERE erased;

CREATE TABLE IF NOT EXISTS cpkit_schema (version INTEGER NOT NULL);
INSERT INTO cpkit_schema SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM cpkit_schema);

COMMIT;
