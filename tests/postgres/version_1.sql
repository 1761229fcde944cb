-- Version 1. Message bodies, extra keys and values, args and results are JSON text:
-- json and jsonb refuse \u0000 or do not keep numbers as they were written.
--
-- Whoever changes a thread holds its lock, pg_advisory_xact_lock of the id's hash, to
-- the end of the transaction. So a thread's messages are committed in the order of
-- their positions, and nobody appends to a thread that is being deleted. The lock is
-- taken in a step of its own: the next statement, under READ COMMITTED, sees all that
-- the holder before has committed, so a thread that is not there is not born meanwhile.
-- (In an assignment, because PL/pgSQL evaluates that itself; a query, as by PERFORM,
-- costs more than the lock.) A row lock would do the same, at the price of a WAL record.
--
-- Functions end in a number: a later version of the schema adds functions and leaves
-- these to handles of older code.

CREATE TABLE {schema}.threads (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    thread_id text COLLATE "C" NOT NULL UNIQUE,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- By anything but appends: of those the last message tells.
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE {schema}.messages (
    thread_number bigint NOT NULL,
    appended_at timestamptz NOT NULL,
    position integer NOT NULL CHECK (position >= 0),
    body text NOT NULL,
    PRIMARY KEY (thread_number, position)
);

-- By hash, because a key may be longer than an index takes.
CREATE TABLE {schema}.extra (
    thread_number bigint NOT NULL,
    key_hash bytea NOT NULL,
    key text NOT NULL,
    value text NOT NULL,
    PRIMARY KEY (thread_number, key_hash)
);

-- A call outlives its thread: what is left of it after a deletion names it by id.
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

-- At most one issued or completed call per key, by the store's own word.
CREATE UNIQUE INDEX calls_holder ON {schema}.calls (idempotency_key)
    WHERE status <> 'failed';

CREATE INDEX calls_pending ON {schema}.calls (thread_id, sequence)
    WHERE status = 'issued' AND NOT erased;

-- Append a message, and maybe more (an array costs more than the rest of the arguments)
-- to one thread. Returns where it ends now, as its number << 32 | its version (a
-- number that has no room there as 0), or -1 minus the version that it is at where that
-- is not the expected one. A guess is such an end, of any time before: with it the
-- thread need not be looked up. Of a deleted thread no message is there, and its number
-- is not given again, so an old guess is never taken for a true one.
CREATE FUNCTION {schema}.append_1(
    of_thread text, expected integer, body text, more text[], guess bigint
) RETURNS bigint LANGUAGE plpgsql AS $body$
DECLARE
    lock bigint := hashtextextended(of_thread, {lock_seed});
    locked boolean;
    known bigint := guess >> 32;
    version integer;
BEGIN
    locked := pg_advisory_xact_lock(lock) IS NULL;

    -- By ORDER BY, in a step of its own: measured to cost less than max() in a subquery.
    IF known > 0 THEN
        SELECT m.position + 1 INTO version FROM {schema}.messages AS m
        WHERE m.thread_number = known AND m.position >= (guess & 4294967295) - 1
        ORDER BY m.position DESC LIMIT 1;
    END IF;

    IF version IS NULL THEN
        SELECT t.number INTO known
        FROM {schema}.threads AS t WHERE t.thread_id = of_thread;

        SELECT m.position + 1 INTO version
        FROM {schema}.messages AS m WHERE m.thread_number = known
        ORDER BY m.position DESC LIMIT 1;

        version := coalesce(version, 0);
    END IF;

    IF version <> expected THEN
        RETURN -1 - version;
    END IF;

    IF known IS NULL THEN
        INSERT INTO {schema}.threads (thread_id) VALUES (of_thread)
        RETURNING number INTO known;
    END IF;

    INSERT INTO {schema}.messages VALUES (known, clock_timestamp(), version, body);
    version := version + 1;

    IF more IS NOT NULL THEN
        INSERT INTO {schema}.messages
        SELECT known, clock_timestamp(), version + nth - 1, another
        FROM unnest(more) WITH ORDINALITY AS _ (another, nth);
        version := version + cardinality(more);
    END IF;

    RETURN (CASE WHEN known < 2147483648 THEN known << 32 ELSE 0 END) + version;
END
$body$;

-- Append to many threads, each named once, in one transaction. The arrays before
-- `entries` have an element for each thread, the others one for each message: the
-- thread's place in the first arrays, the message's place in what the thread gets, and
-- the message. Returns for each thread its version, or -1 minus the version that it is at
-- where that is not the expected one. A guess is what the version may be: with a good
-- one the index is read from there, else a whole page of it.
CREATE FUNCTION {schema}.append_many_1(
    of_threads text[], all_expected integer[], guesses integer[], counts integer[],
    entries integer[], nths integer[], bodies text[]
) RETURNS integer[] LANGUAGE plpgsql AS $body$
DECLARE
    outcomes integer[];
BEGIN
    -- In the order of the locks, so that no two groups wait for each other.
    PERFORM pg_advisory_xact_lock(ordered.lock) FROM (
        SELECT hashtextextended(of_thread, {lock_seed}) AS lock
        FROM unnest(of_threads) AS of_thread
        ORDER BY 1
    ) AS ordered;

    WITH asked AS (
        SELECT a.*, t.number, 1 + coalesce(
            (SELECT max(m.position) FROM {schema}.messages AS m
             WHERE m.thread_number = t.number AND m.position >= a.guess - 1),
            (SELECT max(m.position) FROM {schema}.messages AS m
             WHERE m.thread_number = t.number),
            -1) AS version
        FROM unnest(of_threads, all_expected, guesses, counts)
            WITH ORDINALITY AS a (of_thread, expected, guess, count, entry)
        LEFT JOIN {schema}.threads AS t ON t.thread_id = a.of_thread
    ), fitting AS (
        SELECT * FROM asked WHERE version = coalesce(expected, version)
    ), born AS (
        INSERT INTO {schema}.threads (thread_id)
        SELECT of_thread FROM fitting WHERE number IS NULL
        RETURNING number, thread_id
    ), added AS (
        INSERT INTO {schema}.messages
        SELECT coalesce(f.number, b.number), clock_timestamp(), f.version + i.nth,
               i.body
        FROM unnest(entries, nths, bodies) AS i (entry, nth, body)
        JOIN fitting AS f ON f.entry = i.entry
        LEFT JOIN born AS b ON b.thread_id = f.of_thread
    )
    SELECT array_agg(
        CASE WHEN version = coalesce(expected, version)
            THEN version + count
            ELSE -1 - version
        END ORDER BY entry)
    INTO outcomes FROM asked;

    RETURN outcomes;
END
$body$;

CREATE FUNCTION {schema}.save_extra_1(of_thread text, keys text[], all_values text[])
RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
    lock bigint := hashtextextended(of_thread, {lock_seed});
    locked boolean;
    known bigint;
BEGIN
    locked := pg_advisory_xact_lock(lock) IS NULL;

    UPDATE {schema}.threads AS t
    SET updated_at = greatest(t.updated_at, clock_timestamp())
    WHERE t.thread_id = of_thread RETURNING t.number INTO known;

    IF NOT FOUND THEN
        INSERT INTO {schema}.threads (thread_id) VALUES (of_thread)
        RETURNING number INTO known;
    END IF;

    INSERT INTO {schema}.extra
    SELECT known, sha256(convert_to(new.key, 'UTF8')), new.key, new.value
    FROM unnest(keys, all_values) AS new (key, value)
    ON CONFLICT (thread_number, key_hash) DO UPDATE SET value = excluded.value;
END
$body$;

-- Claim a key for a call. Returns nothing where the call is on record now, else the
-- call that was there before. The key is looked up first and without the lock, so a
-- replay writes nothing and waits for nobody. The unique indexes decide between two
-- claims: the one that comes second waits there, and looks again.
CREATE FUNCTION {schema}.claim_1(
    of_thread text, of_call text, tool text, with_args text, key text
) RETURNS SETOF {schema}.calls LANGUAGE plpgsql AS $body$
DECLARE
    lock bigint := hashtextextended(of_thread, {lock_seed});
    locked boolean;
    last {schema}.calls;
BEGIN
    LOOP
        SELECT * INTO last FROM {schema}.calls AS c
        WHERE c.idempotency_key = key ORDER BY c.attempt DESC LIMIT 1;

        IF last.status IS NULL OR last.status = 'failed' THEN
            locked := pg_advisory_xact_lock(lock) IS NULL;

            INSERT INTO {schema}.calls (
                thread_id, call_id, tool_name, args, idempotency_key, status, attempt,
                issued_at)
            VALUES (
                of_thread, of_call, tool, with_args, key, 'issued',
                coalesce(last.attempt, 0) + 1, clock_timestamp())
            ON CONFLICT DO NOTHING;

            IF FOUND THEN
                UPDATE {schema}.threads AS t
                SET updated_at = greatest(t.updated_at, clock_timestamp())
                WHERE t.thread_id = of_thread;

                IF NOT FOUND THEN
                    INSERT INTO {schema}.threads (thread_id) VALUES (of_thread);
                END IF;

                RETURN;
            END IF;
        END IF;

        -- Asked after the key: a call that is not on record now was not then, so either
        -- answer is true of one moment.
        RETURN QUERY SELECT * FROM {schema}.calls AS c
        WHERE c.thread_id = of_thread AND c.call_id = of_call;

        IF FOUND THEN
            RETURN;
        END IF;

        IF last.status <> 'failed' THEN
            RETURN NEXT last;
            RETURN;
        END IF;
    END LOOP;
END
$body$;

-- Record the outcome of a call that has none, and return the call as it stands.
CREATE FUNCTION {schema}.resolve_1(
    of_thread text, of_call text, outcome text, with_result text
) RETURNS SETOF {schema}.calls LANGUAGE plpgsql AS $body$
DECLARE
    lock bigint := hashtextextended(of_thread, {lock_seed});
    locked boolean;
    stored {schema}.calls;
BEGIN
    locked := pg_advisory_xact_lock(lock) IS NULL;

    UPDATE {schema}.calls AS c
    SET status = outcome,
        result = CASE WHEN c.erased THEN NULL ELSE with_result END,
        resolved_at = clock_timestamp()
    WHERE c.thread_id = of_thread AND c.call_id = of_call AND c.status = 'issued'
    RETURNING c.* INTO stored;

    IF NOT FOUND THEN
        RETURN QUERY SELECT * FROM {schema}.calls AS c
        WHERE c.thread_id = of_thread AND c.call_id = of_call;
        RETURN;
    END IF;

    IF NOT stored.erased THEN
        UPDATE {schema}.threads AS t
        SET updated_at = greatest(t.updated_at, clock_timestamp())
        WHERE t.thread_id = of_thread;
    END IF;

    RETURN NEXT stored;
END
$body$;

CREATE FUNCTION {schema}.erase_1(of_thread text, forget_keys boolean)
RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
    lock bigint := hashtextextended(of_thread, {lock_seed});
    locked boolean;
    known bigint;
BEGIN
    locked := pg_advisory_xact_lock(lock) IS NULL;

    DELETE FROM {schema}.threads WHERE thread_id = of_thread
    RETURNING number INTO known;

    DELETE FROM {schema}.messages WHERE thread_number = known;
    DELETE FROM {schema}.extra WHERE thread_number = known;

    IF forget_keys THEN
        DELETE FROM {schema}.calls WHERE thread_id = of_thread;
    ELSE
        UPDATE {schema}.calls SET args = '{}', result = NULL, erased = true
        WHERE thread_id = of_thread AND NOT erased;
    END IF;
END
$body$;

CREATE TABLE {schema}.schema_version (version integer NOT NULL);
INSERT INTO {schema}.schema_version VALUES (1);
