BEGIN TRANSACTION;
CREATE TABLE cpkit_calls (
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
INSERT INTO "cpkit_calls" VALUES(1,'thread é','c1','pay','{"a":1}','key 1','completed',1,1704067204000000,'{"ok":true}',1704067206000000,0);
INSERT INTO "cpkit_calls" VALUES(2,'thread é','c2','pay','{}','key 2','failed',1,1704067205000000,'"no"',1704067207000000,0);
INSERT INTO "cpkit_calls" VALUES(3,'thread é','c3','pay','{}','key 2','issued',2,1704067208000000,NULL,NULL,0);
INSERT INTO "cpkit_calls" VALUES(4,'deleted','c4','pay','{}','key 3','issued',1,1704067210000000,NULL,NULL,1);
CREATE TABLE cpkit_extra (
    thread_number INTEGER NOT NULL,
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (thread_number, key)
) WITHOUT ROWID;
INSERT INTO "cpkit_extra" VALUES(1,'""','{}');
INSERT INTO "cpkit_extra" VALUES(1,'"plan"','[1.5,null]');
INSERT INTO "cpkit_extra" VALUES(2,'"k"','true');
CREATE TABLE cpkit_messages (
    key INTEGER PRIMARY KEY,
    appended_at INTEGER NOT NULL,
    body TEXT NOT NULL
);
INSERT INTO "cpkit_messages" VALUES(4294967296,1704067201000000,'{"role":"user","content":"é\u0000''"}');
INSERT INTO "cpkit_messages" VALUES(4294967297,1704067201000000,'{"n":100000000000000000000}');
CREATE TABLE cpkit_schema (version INTEGER NOT NULL);
INSERT INTO "cpkit_schema" VALUES(1);
CREATE TABLE cpkit_threads (
    number INTEGER PRIMARY KEY,
    thread_id TEXT NOT NULL UNIQUE,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    stored_at INTEGER NOT NULL,
    trimmed INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "cpkit_threads" VALUES(1,'thread é',1704067201000000,1704067208000000,1704067201000000,0);
INSERT INTO "cpkit_threads" VALUES(2,'only extra',1704067203000000,1704067203000000,1704067203000000,0);
CREATE UNIQUE INDEX cpkit_calls_attempt
    ON cpkit_calls (idempotency_key, attempt);
CREATE UNIQUE INDEX cpkit_calls_holder
    ON cpkit_calls (idempotency_key) WHERE status <> 'failed';
CREATE INDEX cpkit_calls_pending
    ON cpkit_calls (thread_id, sequence) WHERE status = 'issued' AND NOT erased;
CREATE INDEX cpkit_calls_erased ON cpkit_calls (thread_id) WHERE erased;
COMMIT;
