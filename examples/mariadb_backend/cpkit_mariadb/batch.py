"""The writes of one transaction: what they read, what they decide, what they change.

One round trip locks and reads all that the writes look at. They are then applied in
memory, one after another, and a script of statements makes the same changes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from cpkit.driver import (
    Append,
    Claim,
    Conflict,
    Erase,
    KeyHeld,
    Merge,
    Outcome,
    Resolve,
    Restore,
    StoredCall,
    Trim,
    Write,
    erased_call,
    issued_call,
    key_is_held,
    resolved_call,
)
from cpkit_mariadb import queries
from cpkit_mariadb.queries import as_list, quoted


@dataclass
class _Thread:
    """A thread's row: its columns after the id, in their order, but the revision."""

    version: int = 0
    first: int = 0
    created_at: int | None = None
    updated_at: int | None = None
    claims: int = 0


def reads(writes: Sequence[Write]) -> list[str]:
    """Return the statements that lock and read what the writes look at."""
    claimed = [one.idempotency_key for one in writes if isinstance(one, Claim)]
    restored = [one.calls for one in writes if isinstance(one, Restore)]
    keys = {*claimed, *(one.idempotency_key for calls in restored for one in calls)}
    ids = {one.thread_id for one in writes}
    script = ["BEGIN", f"{queries.THREADS.format(ids=as_list(ids))} FOR UPDATE"]
    conditions = []

    if keys:
        rows = ", ".join(as_list((key, secrets.randbits(63))) for key in sorted(keys))
        script.append(f"REPLACE INTO cpkit_keys VALUES {rows}")  # locks them
        conditions.append(f"c.idempotency_key IN {as_list(keys)}")

    for one in writes:
        own = f"c.thread_id = {quoted(one.thread_id)}"

        if isinstance(one, Claim | Resolve):
            conditions.append(f"{own} AND c.call_id = {quoted(one.call_id)}")
        elif isinstance(one, Erase):
            conditions.append(own)

    return script + [queries.CALLS.format(condition=one) for one in conditions]


class Batch:
    """What the transaction sees, by the answers to `reads`; its script of changes."""

    def __init__(self, answers: Iterable[Sequence[Any]]) -> None:
        _, threads, *calls = answers
        self._threads = {name: _Thread(*row) for name, *row in threads}
        self._stored = {*self._threads}
        self._changed: set[str] = set()
        self._calls: dict[tuple[str, str], StoredCall] = {}
        self._attempts: dict[str, dict[int, StoredCall]] = {}  # by key and number
        # Statements that follow each other, or rows that are inserted, by table.
        self._steps: list[dict[str, list[str]]] = [{}]

        for row in chain.from_iterable(calls):
            self._put(StoredCall._make(row))

    def apply(self, write: Write) -> Outcome:
        """Apply a write in memory, and note the statements that do the same."""
        thread_id = write.thread_id
        own = f"thread_id = {quoted(thread_id)}"
        thread = self._threads.get(thread_id) or _Thread()
        expected = getattr(write, "expected_version", None)

        if expected not in (None, thread.version):
            return Conflict(thread.version)

        match write:
            case Append() if not write.bodies and not write.items:
                return thread.version
            case Append() | Merge():
                self._change(thread_id, thread)
                self._add(write, thread)
                return thread.version if isinstance(write, Append) else None
            case Claim():
                known = self._calls.get((thread_id, write.call_id))
                *_, newest = (None, *self._attempts_of(write.idempotency_key))

                if known or (newest and newest.status != "failed"):
                    return known or newest

                now = self._change(thread_id, thread)
                self._claim(issued_call(write, newest, now), thread)
            case Resolve():
                found = self._calls.get((thread_id, write.call_id))

                if found is not None and found.status == "issued":
                    now = time.time_ns() // 1000

                    if not found.erased:
                        now = self._change(thread_id, thread)

                    self._put(found := resolved_call(found, write, now))
                    status, result = quoted(found.status), quoted(found.result)
                    self._do(
                        f"UPDATE cpkit_calls SET status = {status}, result = {result}, "
                        f"resolved_at = {now} WHERE {own} "
                        f"AND call_id = {quoted(write.call_id)}"
                    )

                return found
            case Erase() if thread_id in self._threads:
                self._erase(write, own, thread.claims)
            case Trim():
                removed = max(0, min(write.before, thread.version) - thread.first)

                if removed:
                    thread.first += removed
                    self._changed.add(thread_id)
                    before = f"{own} AND position < {thread.first}"
                    self._do(f"DELETE FROM cpkit_messages WHERE {before}")

                return removed
            case Restore():
                if thread_id in self._threads:
                    return Conflict(thread.version)

                for call in write.calls:
                    others = self._attempts_of(call.idempotency_key)

                    if key_is_held(call, others):
                        return KeyHeld(call.idempotency_key, others[-1].thread_id)

                self._restore(write)

        return None

    def scripts(self, packet: int) -> list[list[str]]:
        """Return scripts of so many bytes at most; the last one commits."""
        if gone := self._changed - self._threads.keys():
            self._do(f"DELETE FROM cpkit_threads WHERE thread_id IN {as_list(gone)}")

        # A row of another writer's new thread is in the way of an INSERT, not of a
        # REPLACE. So the rows come first, also those that are deleted in the end.
        rows: dict[str, list[str]] = {}

        for one in sorted(self._changed):
            verb = "REPLACE" if one in self._stored else "INSERT"
            columns = vars(self._threads.get(one) or _Thread()).values()
            row = as_list((one, *columns, secrets.randbits(63)))
            rows.setdefault(f"{verb} INTO cpkit_threads", []).append(row)

        script: list[str] = []

        for head, some in chain(*(step.items() for step in (rows, *self._steps))):
            parts = [", ".join(part) for part in _divided(some, packet)]
            script += [f"{head} VALUES {part}" for part in parts] or [head]

        return _divided([*script, "COMMIT" if script else "ROLLBACK"], packet)

    def _change(self, thread_id: str, thread: _Thread) -> int:
        """Move a thread's time, and create it; return the time."""
        # Later than before, even if the clock is not: workers compare it.
        now = max(time.time_ns() // 1000, (thread.updated_at or 0) + 1)
        thread.created_at, thread.updated_at = thread.created_at or now, now
        self._threads[thread_id] = thread
        self._changed.add(thread_id)
        return now

    def _add(self, write: Append | Merge | Restore, thread: _Thread) -> None:
        """Insert messages and set keys of extra."""
        for body in () if isinstance(write, Merge) else write.bodies:
            row = write.thread_id, thread.version, body
            self._insert("INSERT INTO cpkit_messages", row)
            thread.version += 1

        for item in write.items:
            self._insert("REPLACE INTO cpkit_extra", (write.thread_id, *item))

    def _claim(self, call: StoredCall, thread: _Thread) -> None:
        self._insert("INSERT INTO cpkit_calls", (*call, thread.claims))
        thread.claims += 1
        self._put(call)

    def _erase(self, write: Erase, own: str, claims: int) -> None:
        thread_id = write.thread_id
        calls = [call for call in self._calls.values() if call.thread_id == thread_id]
        self._changed.add(thread_id)
        del self._threads[thread_id]
        self._do(f"DELETE FROM cpkit_messages WHERE {own}")
        self._do(f"DELETE FROM cpkit_extra WHERE {own}")

        if write.forget_keys:
            keys = as_list({"", *(call.idempotency_key for call in calls)})
            self._do(f"DELETE FROM cpkit_keys WHERE idempotency_key IN {keys}")
            self._do(f"DELETE FROM cpkit_calls WHERE {own}")

            for call in calls:
                del self._calls[thread_id, call.call_id]
                del self._attempts[call.idempotency_key][call.attempt]
        elif calls:
            columns = "args = '{}', result = NULL, erased = 1"
            self._do(f"UPDATE cpkit_calls SET {columns} WHERE {own}")
            self._threads[thread_id] = _Thread(claims=claims)

            for call in calls:
                self._put(erased_call(call))

    def _restore(self, write: Restore) -> None:
        thread_id, *_, created_at, updated_at, _, first = write
        thread = _Thread(first, first, created_at, updated_at)
        self._threads[thread_id] = thread
        self._changed.add(thread_id)
        self._add(write, thread)

        for call in write.calls:
            self._claim(call, thread)

    def _attempts_of(self, key: str) -> list[StoredCall]:
        return [call for _, call in sorted(self._attempts.get(key, {}).items())]

    def _put(self, call: StoredCall) -> None:
        self._calls[call.thread_id, call.call_id] = call
        self._attempts.setdefault(call.idempotency_key, {})[call.attempt] = call

    def _do(self, statement: str) -> None:
        """Note a statement between the rows before it and those after it."""
        self._steps += [{statement: []}, {}]

    def _insert(self, head: str, row: Iterable[str | bytes | int | None]) -> None:
        self._steps[-1].setdefault(head, []).append(as_list(row))


def _divided(texts: Iterable[str], limit: int) -> list[list[str]]:
    """Return lists of texts, each of no more than ``limit`` bytes, or of one text."""
    parts: list[list[str]] = []
    left = 0

    for text in texts:
        size = len(text.encode()) + 2

        if size > left:
            parts.append([])
            left = limit

        parts[-1].append(text)
        left -= size

    return parts
