"""What ``cpkit doctor`` finds in a store and around it."""

from __future__ import annotations

from cpkit.driver import Findings, StoreFailure
from cpkit_postgres.connections import Connections
from cpkit_postgres.errors import sqlstate

# What an operator does not see from the client, each with its advice. Limits of time
# that cpkit sets itself are left out.
_AROUND = """
SELECT pg_backend_pid() AS pid,
    (SELECT string_agg(name || '=' || setting || 'ms', ', ') FROM pg_settings
     WHERE name IN ('idle_in_transaction_session_timeout', 'idle_session_timeout',
             'lock_timeout', 'statement_timeout', 'transaction_timeout')
         AND setting <> '0' AND source NOT IN ('client', 'session')) AS limits,
    (SELECT nullif(checksum_failures, 0) FROM pg_stat_database
     WHERE datname = current_database()) AS checksums,
    (SELECT format('%s of %s, which autovacuum frees for new rows', sum(n_dead_tup),
        sum(n_live_tup + n_dead_tup)) FROM pg_stat_user_tables WHERE schemaname = $1
     HAVING sum(n_dead_tup) * 10 > sum(n_live_tup + n_dead_tup)) AS dead
"""
_ADVICE = {
    "limits": "the role, the database or the server has limits of time, which end what "
    "takes longer ({}): ALTER ROLE … RESET them, or keep them above timeout",
    "checksums": "the server has met {} damaged pages in this database "
    "(checksum_failures): restore a backup, and check the disk",
}

# Reads every row and text, so that a page that cannot be read is met.
_ROWS = """
SELECT (SELECT max(version) FROM {schema}.threads),
    (SELECT max(length(body)) FROM {schema}.messages),
    (SELECT max(length(value)) FROM {schema}.extra),
    (SELECT max(length(args) + length(result)) FROM {schema}.calls)
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
        found = await connections.look(_AROUND, connections.schema)
        advice = [text.format(found[k]) for k, text in _ADVICE.items() if found[k]]
        facts = {"dead rows": str(found["dead"])} if found["dead"] else {}

        if not whole:
            return Findings(advice=advice, facts=facts)

        checks = await connections.fetch(_CHECKS, connections.schema)
        queries = [_ROWS, *(row[0] for row in checks)]
        damaged = [
            fault for one in queries if (fault := await _fault(connections, one))
        ]

        if not checks:
            missing = (
                "not checked: CREATE EXTENSION amcheck, or the right to execute it"
            )
            facts["indexes"] = missing

        return Findings(damaged, advice, facts)
    except StoreFailure as exc:
        return Findings(advice=[f"the store could not be examined: {exc.reason}"])
    finally:
        await connections.close()


async def _fault(connections: Connections, query: str) -> str | None:
    """Return what is damaged, by the error of a query that meets it."""
    try:
        async with connections.transaction() as fetch:
            await fetch("SET LOCAL statement_timeout = 0")
            await fetch(query)
            return None
    except StoreFailure as exc:
        if sqlstate(exc.__cause__).startswith("XX"):  # data or an index is corrupted
            return exc.reason

        raise
