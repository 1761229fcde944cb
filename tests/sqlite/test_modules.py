"""Tracers that wrap ``sqlite3.connect``, and other modules in its place."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cpkit.driver import StoreFailure
from cpkit_sqlite.errors import failure
from tests.sqlite.inside import use


class Traced:
    """A connection as tracers wrap it: no subclass, and its attributes are passed on.

    OpenTelemetry's and Datadog's are like this one.
    """

    def __init__(self, connection: sqlite3.Connection, seen: list[str]) -> None:
        self.__dict__.update(_connection=connection, _seen=seen)

    def __getattr__(self, name: str) -> Any:
        self._seen.append(name)
        return getattr(self._connection, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._connection, name, value)


async def test_it_opens_under_a_tracer(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each statement goes through the tracer."""
    connect = sqlite3.connect
    seen: list[str] = []

    def traced(*args: Any, **kwargs: Any) -> Traced:
        assert "factory" not in kwargs  # a tracer has its own
        return Traced(connect(*args, **kwargs), seen)

    monkeypatch.setattr(sqlite3, "connect", traced)
    await use(path)
    assert seen.count("execute") > 20


REAL = {
    "opentelemetry.instrumentation.sqlite3": """
from opentelemetry.instrumentation.sqlite3 import SQLite3Instrumentor

SQLite3Instrumentor().instrument()
""",
    "sqlean": """
import sys, sqlean

sys.modules["sqlite3"] = sqlean
""",
}

# Also a watch that hears of another handle, and a file that is not a database.
BEGIN = """
import asyncio, sqlite3, sys

from cpkit_sqlite import SQLiteCheckpointer
from tests.sqlite.inside import use

async def share(path):
    async with SQLiteCheckpointer(path) as cp, SQLiteCheckpointer(path) as other:
        async with cp.watch("t") as changes:
            await other.append("t", [{}])
            assert await anext(changes) == "t"

    with open(path + ".text", "w") as file:
        file.write("no database " * 100)

    try:
        await SQLiteCheckpointer(path + ".text").__aenter__()
    except Exception as exc:
        print(type(exc).__name__)

asyncio.run(use(sys.argv[1]))
asyncio.run(share(sys.argv[1]))
"""


@pytest.mark.parametrize("name", REAL)
def test_it_works_with_real_ones(path: str, name: str) -> None:
    """OpenTelemetry's instrumentation, and a module that brings a newer SQLite."""
    pytest.importorskip(name, reason=f"needs {name}")
    command = [sys.executable, "-c", REAL[name] + BEGIN, path]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=root
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("SchemaMismatch"), done.stderr


OTHER = """
import sys, types, sqlite3

# What pysqlite3 has under the names of the standard library, and nothing else.
other = types.ModuleType("sqlite3")
names = '''connect Connection Cursor Error DatabaseError OperationalError IntegrityError
    sqlite_version sqlite_version_info'''

for name in names.split():
    setattr(other, name, getattr(sqlite3, name))

sys.modules["sqlite3"] = other

import asyncio
from tests.sqlite.inside import use
import cpkit_sqlite.store

assert cpkit_sqlite.store.sqlite3 is other
asyncio.run(use(sys.argv[1]))
"""


def test_another_module_may_be_in_the_place_of_sqlite3(path: str) -> None:
    """Programs do that for a newer SQLite than Python has."""
    command = [sys.executable, "-c", OTHER, path]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=root
    )
    assert done.returncode == 0, done.stderr


def test_an_error_without_a_code_is_in_doubt() -> None:
    """Such a module may not say whether it was the commit that failed."""
    failed = failure(sqlite3.OperationalError("disk I/O error"), "sqlite:", "t")
    assert isinstance(failed, StoreFailure)
    assert failed.fate == "unknown"
