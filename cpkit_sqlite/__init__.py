"""Agent state in one SQLite file; ``docs/drivers.md`` is the manual."""

from cpkit.extras import needs_extra

with needs_extra("cpkit_sqlite", "sqlite"):
    from cpkit_sqlite.store import SQLiteCheckpointer, SQLiteStore

__all__ = ["SQLiteCheckpointer", "SQLiteStore"]
