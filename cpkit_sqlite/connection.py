"""A connection in a thread of its own, and the copy of the write-ahead log."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")

_closing = Lock()


class Connection:
    """A connection of SQLite, and the thread that uses it.

    A call is one trip to the thread, however many statements it makes. A program that
    ends does not wait for the thread, because it is a daemon. A connection that was
    forgotten is closed, and its thread ends.
    """

    db: Any = None

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self.thread = Thread(target=_work, args=(self._jobs,), daemon=True)
        self.thread.start()

    def call(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Call the function in the thread; it runs even if its caller is cancelled."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._jobs.put((loop, answer, function, args))
        return answer

    def end(self) -> asyncio.Future[None]:
        """Close the connection and end the thread."""
        closed = self.call(self._close)
        self._jobs.put(None)
        return closed

    def _close(self) -> None:
        # Of two that close at once, neither is the last one, which copies the log.
        with _closing:
            if self.db is not None:
                self.db.close()

    def __del__(self) -> None:
        self._jobs.put(None)


def _work(jobs: SimpleQueue[Any]) -> None:
    """Do jobs in their order until one is ``None``."""
    while (job := jobs.get()) is not None:
        loop, answer, function, args = job

        try:
            outcome = answer.set_result, function(*args)
        except BaseException as exc:
            outcome = answer.set_exception, exc

        try:
            loop.call_soon_threadsafe(_settle, answer, *outcome)
        except RuntimeError:
            pass  # the loop is closed, and nothing waits any more

        # They refer to the connection, and a traceback to this frame.
        del job, loop, answer, function, args, outcome


def _settle(answer: Any, settle: Callable[[Any], None], outcome: Any) -> None:
    if not answer.done():  # cancelled
        settle(outcome)


def copy_log(db: sqlite3.Connection, uri: str) -> None:
    """Copy the ``-wal`` file into the database file, as far as readers let it.

    A second connection holds the write lock meanwhile; if another writer has it,
    nothing is copied. SQLite's own checkpoints run without it, and before 3.51.3 lose
    commits if one restarts the log then (sqlite.org/wal.html#walresetbug). Those that
    wait for the lock, such as FULL, go on without it after ``busy_timeout``.
    """
    with suppress(sqlite3.Error):
        with closing(sqlite3.connect(uri, uri=True, timeout=0)) as lock:
            lock.execute("BEGIN IMMEDIATE")
            db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
