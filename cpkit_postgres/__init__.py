"""Agent state in a Postgres schema; see `cpkit_postgres.store` for the manual."""

from cpkit_postgres.store import PostgresCheckpointer, PostgresStore

__all__ = ["PostgresCheckpointer", "PostgresStore"]
