"""Agent state in a Postgres schema; ``docs/drivers.md`` is the manual."""

from cpkit.registry import needs_extra

with needs_extra("cpkit_postgres", "postgres"):
    from cpkit_postgres.store import PostgresCheckpointer, PostgresStore

__all__ = ["PostgresCheckpointer", "PostgresStore"]
