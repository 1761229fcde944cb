"""Floors: what a perfect driver could do with the client that a driver uses.

One trip to the client and one commit for each write, and nothing checked, translated,
coalesced or retried. An append is the encoded message and its position; a load is one
fetch and one pass of the JSON parser, with Python's collector as it comes. Where the
contract asks for more than one row (a call or an extra also moves the thread's
``updated_at``), SQLite and Postgres write both in the same transaction; Redis and the
file make one command, or one line.
"""

from benchmarks.floors.file import FileFloor
from benchmarks.floors.postgres import PostgresFloor
from benchmarks.floors.redis import RedisFloor
from benchmarks.floors.sqlite import SQLiteFloor

__all__ = ["FileFloor", "PostgresFloor", "RedisFloor", "SQLiteFloor"]
