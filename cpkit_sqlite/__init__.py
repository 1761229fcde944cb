"""Agent state in one SQLite file; see `cpkit_sqlite.driver` for the manual."""

from cpkit_sqlite.driver import SQLiteCheckpointer

__all__ = ["SQLiteCheckpointer"]
