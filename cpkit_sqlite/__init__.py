"""Agent state in one SQLite file; ``docs/drivers.md`` is the manual."""

from cpkit_sqlite.store import SQLiteCheckpointer, SQLiteStore

__all__ = ["SQLiteCheckpointer", "SQLiteStore"]
