"""A small encrypted store in SQLite, and statements on its raw file."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from cpkit import Checkpointer, ToolCall, open_checkpointer
from cpkit.keyring import LocalKeyring

__all__ = ["KEYS", "fill", "opened", "ring", "rows", "run"]

KEYS = {f"k{i}": bytes([i]) * 32 for i in (1, 2)}


def ring(*ids: str, **options: Any) -> LocalKeyring:
    """Return a keyring with these keys, of which the last one is the newest."""
    keys = {one: KEYS[one] for one in ids or ("k1",)}
    return LocalKeyring(keys, name="test", **options)


def opened(folder: Path, keyring: LocalKeyring | None = None) -> Any:
    """Return an unopened handle of the store in the folder."""
    return open_checkpointer(f"sqlite:///{folder}/a.db", keyring=keyring or ring())


async def fill(cp: Checkpointer[Any], thread_id: str, canary: str = "") -> None:
    """Write a thread with every kind of value: three messages, and two calls."""
    await cp.append(thread_id, [{"n": i, "text": canary} for i in range(2)])
    await cp.append(thread_id, [{"n": 2}], extra={"a": [canary], "b": canary})

    for one in ("c1", "c2"):
        key = f"{thread_id} {one}"
        await cp.record_issued(thread_id, ToolCall(one, "pay", {one: canary}, key))
        await cp.record_result(thread_id, one, {"paid": canary, "by": one})


def run(folder: Path, sql: str, *values: object) -> None:
    """Change the raw file, as an attacker with access to it can."""
    with closing(sqlite3.connect(folder / "a.db")) as db, db:
        assert db.execute(sql, values).rowcount > 0, f"{sql} changed nothing"


def rows(folder: Path, sql: str, *values: object) -> Sequence[Any]:
    with closing(sqlite3.connect(folder / "a.db")) as db:
        return db.execute(sql, values).fetchall()
