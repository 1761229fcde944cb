"""Agent state in a Postgres schema; see `cpkit_postgres.store` for the manual."""

from cpkit.extras import needs_extra

with needs_extra("cpkit_postgres", "postgres"):
    from cpkit_postgres.store import PostgresCheckpointer, PostgresStore

__all__ = ["PostgresCheckpointer", "PostgresStore"]
