-- Version 1. Message bodies, extra keys and values, args and results are JSON text:
-- json and jsonb refuse \u0000 or do not keep numbers as they were written.
-- Times are microseconds since 1970, UTC.

-- A number is used for one life of a thread: a thread that is deleted and begun again
-- has another one. There is room in the pages, so that a write, which moves updated_at,
-- changes no index.
CREATE TABLE {schema}.threads (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    first bigint NOT NULL DEFAULT 0, -- the position of the first message left
    created_at bigint NOT NULL,
    version bigint NOT NULL,
    updated_at bigint NOT NULL,
    thread_id text COLLATE "C" NOT NULL UNIQUE
) WITH (fillfactor = 80);

CREATE TABLE {schema}.messages (
    thread_number bigint NOT NULL,
    position bigint NOT NULL,
    body text NOT NULL,
    PRIMARY KEY (thread_number, position)
);

CREATE TABLE {schema}.extra (
    thread_number bigint NOT NULL,
    key text COLLATE "C" NOT NULL,
    value text NOT NULL,
    PRIMARY KEY (thread_number, key)
);

-- A call outlives its thread, so it names the thread by id.
CREATE TABLE {schema}.calls (
    sequence bigint GENERATED ALWAYS AS IDENTITY, -- the order of claims
    issued_at bigint NOT NULL,
    resolved_at bigint,
    attempt integer NOT NULL,
    erased boolean NOT NULL DEFAULT false,
    status text COLLATE "C" NOT NULL,
    thread_id text COLLATE "C" NOT NULL,
    call_id text COLLATE "C" NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL,
    tool_name text NOT NULL,
    args text NOT NULL,
    result text,
    PRIMARY KEY (thread_id, call_id)
);

CREATE UNIQUE INDEX calls_attempt ON {schema}.calls (idempotency_key, attempt);

CREATE INDEX calls_pending ON {schema}.calls (thread_id, sequence)
    WHERE status = 'issued' AND NOT erased;

CREATE TABLE {schema}.schema_version (version integer NOT NULL);
INSERT INTO {schema}.schema_version VALUES (1);
