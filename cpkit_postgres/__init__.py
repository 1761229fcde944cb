"""Agent state in a Postgres schema; see `cpkit_postgres.driver` for the manual."""

from cpkit_postgres.driver import PostgresCheckpointer

__all__ = ["PostgresCheckpointer"]
