-- Version 1. Message bodies, extra keys and values, args and results are JSON text:
-- json and jsonb refuse \u0000 or do not keep numbers as they were written.

-- A number is used for one life of a thread: a thread that is deleted and begun again
-- has another one. Deleting the row ends that life; see queries.py.
CREATE TABLE {schema}.threads (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    thread_id text COLLATE "C" NOT NULL UNIQUE,
    changes bigint NOT NULL DEFAULT 0, -- of anything but messages
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The last change that was not an append: appends have a time in their messages.
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE {schema}.messages (
    thread_number bigint NOT NULL,
    appended_at timestamptz NOT NULL,
    position integer NOT NULL CHECK (position >= 0),
    body text NOT NULL,
    PRIMARY KEY (thread_number, position)
);

-- By hash (SHA-256), because a key may be longer than an index entry can be.
CREATE TABLE {schema}.extra (
    thread_number bigint NOT NULL,
    key_hash bytea NOT NULL,
    key text NOT NULL,
    value text NOT NULL,
    PRIMARY KEY (thread_number, key_hash)
);

-- A call outlives its thread, so it names the thread by id.
CREATE TABLE {schema}.calls (
    sequence bigint GENERATED ALWAYS AS IDENTITY, -- the order of claims
    thread_id text COLLATE "C" NOT NULL,
    call_id text COLLATE "C" NOT NULL,
    tool_name text NOT NULL,
    args text NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    attempt integer NOT NULL,
    issued_at timestamptz NOT NULL,
    result text,
    resolved_at timestamptz,
    erased boolean NOT NULL DEFAULT false,
    PRIMARY KEY (thread_id, call_id)
);

CREATE UNIQUE INDEX calls_attempt ON {schema}.calls (idempotency_key, attempt);

CREATE INDEX calls_pending ON {schema}.calls (thread_id, status, sequence);

CREATE TABLE {schema}.schema_version (version integer NOT NULL);
INSERT INTO {schema}.schema_version VALUES (1);
