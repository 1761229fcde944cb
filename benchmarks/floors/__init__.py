"""Floors: the least work that a driver could do with the same client library.

Each write is one trip to the client and one commit. Nothing is checked, translated,
batched or retried. An append stores the encoded message and its position. A load is one
fetch and one pass of the JSON parser, with Python's garbage collector paused. For a
call or a key of extra the contract also updates the thread's ``updated_at``. SQLite and
Postgres write both rows in one transaction; Redis sends one command, and the file gets
one line.
"""

from benchmarks.floors.file import FileFloor
from benchmarks.floors.postgres import PostgresFloor
from benchmarks.floors.redis import RedisFloor
from benchmarks.floors.sqlite import SQLiteFloor

__all__ = ["FileFloor", "PostgresFloor", "RedisFloor", "SQLiteFloor"]
