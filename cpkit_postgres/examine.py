"""What ``cpkit doctor`` finds in a store and around it."""

from __future__ import annotations

from cpkit.driver import Findings, StoreFailure
from cpkit_postgres.connections import Connections
from cpkit_postgres.errors import sqlstate

# What an operator does not see from the client, each with its advice. Limits are those
# of the role, the database and the server; cpkit sets statement_timeout itself.
_AROUND = """
WITH tables AS (
    SELECT * FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident($1))
        AND relname IN ('threads', 'messages', 'extra', 'calls', 'schema_version')
), limits AS (
    SELECT name || '=' || setting || 'ms' AS text FROM pg_settings
    WHERE name IN ('idle_in_transaction_session_timeout', 'idle_session_timeout',
            'lock_timeout', 'statement_timeout', 'transaction_timeout')
        AND setting <> '0' AND source NOT IN ('client', 'session')
    UNION
    SELECT config FROM pg_db_role_setting, unnest(setconfig) AS config
    WHERE setrole IN (0, (SELECT oid FROM pg_roles WHERE rolname = current_user))
        AND setdatabase IN
            (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
        AND config LIKE 'statement_timeout=%'
)
SELECT pg_backend_pid() AS pid, CASE WHEN pg_is_in_recovery() THEN 'on' END AS standby,
    CASE WHEN NOT pg_is_in_recovery()
        THEN nullif(current_setting('transaction_read_only'), 'off') END AS read_only,
    (SELECT string_agg(relname || '.' || tgname, ', ') FROM tables AS t
     JOIN pg_trigger ON tgrelid = t.oid WHERE NOT tgisinternal) AS triggers,
    (SELECT string_agg(relname || '.' || rulename, ', ') FROM tables AS t
     JOIN pg_rewrite ON ev_class = t.oid) AS rules,
    (SELECT string_agg(text, ', ') FROM limits) AS limits,
    (SELECT true FROM pg_roles WHERE rolname = current_user AND NOT rolsuper
        AND NOT rolbypassrls AND current_setting('row_security') = 'on') AS hides,
    (SELECT nullif(checksum_failures, 0) FROM pg_stat_database
     WHERE datname = current_database()) AS checksums
"""
_ADVICE = {
    "standby": "the server is a standby: it takes no writes, and its reads lag",
    "read_only": "sessions are read-only: ALTER ROLE … or DATABASE … RESET "
    "default_transaction_read_only",
    "triggers": "other programs' triggers can change or refuse what is written: "
    "DROP TRIGGER, for {}",
    "rules": "other programs' rules can change or refuse what is written: "
    "DROP RULE, for {}",
    "limits": "the role, the database or the server has limits of time, which end what "
    "takes longer ({}): ALTER ROLE … RESET them, or keep them above timeout",
    "checksums": "the server has met {} damaged pages in this database "
    "(checksum_failures): restore a backup, and check the disk",
    "pooler": "a pooler is in between: each statement takes two round trips, and "
    "a watch polls; use the server's own address where there is one",
    "hides": "Postgres would hide rows in silence where a policy is added later: ALTER "
    "ROLE … SET row_security = off, because a pooler takes no settings",
}

# The texts are read too, so that a page that cannot be read is met.
_FAULTS = """
WITH found AS (
    SELECT thread_number, count(*) AS messages, min(position) AS low,
        max(position) AS high, sum(length(body)) AS size
    FROM {schema}.messages GROUP BY thread_number
)
(SELECT format('thread %L is at version %s, and has %s of its messages',
    thread_id, version, coalesce(messages, 0))
FROM {schema}.threads LEFT JOIN found ON thread_number = number
WHERE version - first <> coalesce(messages, 0)
    OR low < first OR high >= version OR size < messages)
UNION ALL
(SELECT format('key %L has two calls that have not failed, or one attempt twice',
    idempotency_key)
FROM {schema}.calls GROUP BY idempotency_key
HAVING count(*) FILTER (WHERE status <> 'failed') > 1
    OR count(DISTINCT attempt) < count(*))
UNION ALL
(SELECT format('call %L is of thread %L, which is missing', call_id, thread_id)
FROM {schema}.calls AS c WHERE NOT erased
    AND NOT EXISTS (SELECT FROM {schema}.threads AS t WHERE t.thread_id = c.thread_id))
UNION ALL
(SELECT format('there are messages or extra of %s threads that are missing',
    count(DISTINCT thread_number))
FROM (SELECT thread_number FROM found
    UNION ALL SELECT thread_number FROM {schema}.extra WHERE length(value) > 0) AS parts
WHERE thread_number NOT IN (SELECT number FROM {schema}.threads) HAVING count(*) > 0)
LIMIT 10
"""
# Statements for those indexes that Postgres' own extension can check for this role.
_CHECKS = """
SELECT format('SELECT %I.bt_index_check(%s, true)', nspname, indexrelid)
FROM pg_proc AS f JOIN pg_namespace AS n ON n.oid = pronamespace
CROSS JOIN pg_index JOIN pg_class AS t ON t.oid = indrelid
WHERE proname = 'bt_index_check' AND pronargs = 2
    AND has_function_privilege(f.oid, 'EXECUTE')
    AND relnamespace = to_regnamespace(quote_ident($1))
    AND indisvalid AND pg_get_indexdef(indexrelid) LIKE '% USING btree %'
"""


async def examine(connections: Connections, whole: bool) -> Findings:
    """Look around the store, and for damage if it is to be ``whole``."""
    try:
        around = await connections.look(_AROUND, connections.schema)
        found = {**around, "pooler": connections.pooler == "transaction"}
        advice = [text.format(found[k]) for k, text in _ADVICE.items() if found[k]]

        if not whole:
            return Findings(advice=advice)

        damaged = await _check(connections, _FAULTS)
        checks = await connections.fetch(_CHECKS, connections.schema)

        for (check,) in checks:
            damaged += await _check(connections, check)

        missing = "not checked: CREATE EXTENSION amcheck, or the right to execute it"
        return Findings(damaged, advice, {} if checks else {"indexes": missing})
    except StoreFailure as exc:
        return Findings(advice=[f"the store could not be examined: {exc.reason}"])
    finally:
        await connections.close()


async def _check(connections: Connections, query: str) -> list[str]:
    """Return the faults that a statement finds, or the one that it fails with."""
    try:
        async with connections.transaction() as fetch:
            await fetch("SET LOCAL statement_timeout = 0")
            return [row[0] for row in await fetch(query) if row[0]]
    except StoreFailure as exc:
        if sqlstate(exc.__cause__).startswith("XX"):  # data or an index is corrupted
            return [exc.reason]

        raise
