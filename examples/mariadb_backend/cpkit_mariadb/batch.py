"""The writes of one transaction: what they read, what they decide, what they change.

One round trip locks and reads all that the writes look at. They are then applied in
memory, one after another, and a script of statements makes the same changes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
from cpkit_mariadb.queries import as_list, quoted, size

__all__ = ["Batch", "call_of"]

# Bytes of an INSERT of many rows. Larger ones are not faster.
_MANY_BYTES = 2**20


@dataclass(slots=True)
class _Row:
    """A thread's row; without one nothing is on record of the thread."""

    version: int = 0
    first: int = 0
    created_at: int = 0
    updated_at: int = 0
    erased: bool = True
    claims: int = 0


@dataclass
class Batch:
    """``rows``, ``calls`` and ``attempts`` are what the transaction sees."""

    writes: Sequence[Write]
    rows: dict[str, _Row] = field(default_factory=dict)
    calls: dict[tuple[str, str], StoredCall] = field(default_factory=dict)
    # By idempotency key, then attempt number: thread id and call id.
    attempts: dict[str, dict[int, tuple[str, str]]] = field(default_factory=dict)
    _stored: set[str] = field(default_factory=set)
    _keys: set[str] = field(default_factory=set)
    _claimed: set[str] = field(default_factory=set)
    _changed: set[str] = field(default_factory=set)
    _script: list[str] = field(default_factory=list)
    _inserts: dict[str, list[str]] = field(default_factory=dict)

    def reads(self) -> list[str]:
        """Return the statements that lock and read what the writes look at."""
        writes = self.writes
        ids = sorted({one.thread_id for one in writes})
        claims = [one for one in writes if isinstance(one, Claim)]
        whole = {one.thread_id for one in writes if isinstance(one, Erase | Restore)}
        keys = {one.idempotency_key for one in claims}
        restored = [one for one in writes if isinstance(one, Restore)]
        keys |= {call.idempotency_key for one in restored for call in one.calls}
        # Where the newest attempt goes, the one before it counts.
        forgets = any(isinstance(one, Erase) and one.forget_keys for one in writes)
        script = [queries.LOCK_THREADS.format(ids=as_list(ids))]
        conditions = [f"c.thread_id = {quoted(one)}" for one in sorted(whole)]
        conditions += [
            f"(c.thread_id, c.call_id) = {as_list((one.thread_id, one.call_id))}"
            for one in writes
            if isinstance(one, Claim | Resolve) and one.thread_id not in whole
        ]

        if keys:
            listed = as_list(sorted(keys))
            script.append(queries.LOCK_KEYS.format(keys=listed))

            if forgets or restored:
                conditions.append(f"c.idempotency_key IN {listed}")
            else:
                script.append(queries.NEWEST_ATTEMPTS.format(keys=listed))

        script += [queries.CALLS.format(condition=one) for one in conditions]
        return script

    def fill(self, answers: Iterable[Sequence[Any]]) -> None:
        """Take the answers to `reads`."""
        threads, *others = answers

        for thread_id, *row in threads:
            self.rows[thread_id.decode()] = _Row(*row)

        self._stored = {*self.rows}

        for row in (row for rows in others for row in rows):
            if len(row) == 1:
                self._keys.add(row[0].decode())
            else:
                self._put(call_of(row))

    def apply(self, write: Write) -> Outcome:
        """Apply a write in memory, and note the statements that do the same."""
        thread_id = write.thread_id
        row = self.rows.get(thread_id) or _Row()

        match write:
            case Append() | Merge():
                if isinstance(write, Append):
                    if write.expected_version not in (None, row.version):
                        return Conflict(row.version)

                    if not write.bodies and not write.items:
                        return row.version

                self._change(thread_id, row)
                self._add(write, row)
                return row.version if isinstance(write, Append) else None
            case Claim():
                known = self.calls.get((thread_id, write.call_id))
                newest = self._newest(write.idempotency_key)

                if known or (newest and newest.status != "failed"):
                    return known or newest

                now = self._change(thread_id, row)
                self._claim(issued_call(write, newest, now), row)
            case Resolve():
                found = self.calls.get((thread_id, write.call_id))

                if found is None or found.status != "issued":
                    return found

                now = self._change(thread_id, row, found.erased)
                self._put(resolved := resolved_call(found, write, now))
                self._do(
                    f"UPDATE cpkit_calls SET status = {quoted(resolved.status)}, "
                    f"result = {quoted(resolved.result)}, resolved_at = {now} "
                    f"WHERE thread_id = {quoted(thread_id)} "
                    f"AND call_id = {quoted(write.call_id)}"
                )
                return resolved
            case Erase():
                if write.expected_version not in (None, row.version):
                    return Conflict(row.version)

                if thread_id in self.rows:
                    self._erase(thread_id, row.claims, write.forget_keys)
            case Trim():
                if write.expected_version not in (None, row.version):
                    return Conflict(row.version)

                before = min(write.before, row.version)
                removed = max(0, before - row.first)

                if removed:
                    row.first = before
                    self._changed.add(thread_id)
                    self._do(
                        f"DELETE FROM cpkit_messages WHERE "
                        f"thread_id = {quoted(thread_id)} AND position < {before}"
                    )

                return removed
            case Restore():
                if thread_id in self.rows:
                    return Conflict(row.version)

                for call in write.calls:
                    places = sorted(self.attempts.get(call.idempotency_key, {}).items())
                    others = [self.calls[place] for _, place in places]

                    if key_is_held(call, others):
                        return KeyHeld(call.idempotency_key, others[-1].thread_id)

                self._restore(write, row)

        return None

    def script(self, packet: int) -> Iterator[list[str]]:
        """Yield scripts for one packet of so many bytes each; the last one commits."""
        self._flush()
        rows = {one: self.rows.get(one) or _Row() for one in sorted(self._changed)}
        born = self._changed - self._stored
        gone = self._changed - self.rows.keys()
        script: list[str] = []

        # A row of another writer's new thread is in the way of an INSERT, not of a
        # REPLACE. So the rows come first.
        for verb, ids in (("INSERT", born), ("REPLACE", self._changed - born)):
            values = [_values(one, row) for one, row in rows.items() if one in ids]
            script += _statements(f"{verb} INTO cpkit_threads", values)

        script += self._script
        deletion = f"DELETE FROM cpkit_threads WHERE thread_id IN {as_list(gone)}"
        yield from _divided([*script, *([deletion] if gone else []), "COMMIT"], packet)

    def _change(self, thread_id: str, row: _Row, erased: bool = False) -> int:
        """Move a thread's time, and create it; return the time.

        The result of an erased call does not change the thread.
        """
        now = time.time_ns() // 1000
        self._changed.add(thread_id)

        if erased:
            if row.erased:
                row.updated_at = max(row.updated_at, now)

            return now

        if row.erased:
            row.created_at, row.erased = now, False
        else:
            # Later than before, even if the clock is not: workers compare it.
            now = max(now, row.updated_at + 1)

        row.updated_at = now
        self.rows[thread_id] = row
        return now

    def _add(self, write: Append | Merge | Restore, row: _Row) -> None:
        """Insert messages and set keys of extra."""
        thread_id = quoted(write.thread_id)

        for body in () if isinstance(write, Merge) else write.bodies:
            values = f"({thread_id}, {row.version}, {quoted(body)})"
            self._insert("INSERT INTO cpkit_messages", values)
            row.version += 1

        for name, value in write.items:
            values = f"({thread_id}, {quoted(name)}, {quoted(value)})"
            self._insert("REPLACE INTO cpkit_extra", values)

    def _claim(self, call: StoredCall, row: _Row) -> None:
        """Insert a call, after the row of its key."""
        key = call.idempotency_key

        # Once in a batch: an INSERT after a REPLACE of the same key would fail.
        if key not in self._claimed:
            verb = "REPLACE" if key in self._keys else "INSERT"
            revision = secrets.randbits(63)
            self._insert(f"{verb} INTO cpkit_keys", f"({quoted(key)}, {revision})")
            self._claimed.add(key)

        self._insert("INSERT INTO cpkit_calls", as_list((*call, row.claims)))
        row.claims += 1
        self._put(call)

    def _erase(self, thread_id: str, claims: int, forgets: bool) -> None:
        quoted_id = quoted(thread_id)
        calls = [call for call in self.calls.values() if call.thread_id == thread_id]
        self._changed.add(thread_id)
        del self.rows[thread_id]

        for table in ("cpkit_messages", "cpkit_extra"):
            self._do(f"DELETE FROM {table} WHERE thread_id = {quoted_id}")

        if not calls:
            return

        if forgets:
            keys = {call.idempotency_key for call in calls}
            self._keys -= keys
            self._claimed -= keys
            self._do(f"DELETE FROM cpkit_keys WHERE idempotency_key IN {as_list(keys)}")
            self._do(f"DELETE FROM cpkit_calls WHERE thread_id = {quoted_id}")

            for call in calls:
                del self.calls[thread_id, call.call_id]
                del self.attempts[call.idempotency_key][call.attempt]

            return

        self._do(
            "UPDATE cpkit_calls SET args = '{}', result = NULL, erased = 1 "
            f"WHERE thread_id = {quoted_id}"
        )
        created = min(call.issued_at for call in calls)
        updated = max(max(call.issued_at, call.resolved_at or 0) for call in calls)
        self.rows[thread_id] = _Row(0, 0, created, updated, True, claims)

        for call in calls:
            self._put(erased_call(call))

    def _restore(self, write: Restore, row: _Row) -> None:
        thread_id = write.thread_id
        issued = [call.issued_at for call in write.calls]
        resolved = [call.resolved_at or 0 for call in write.calls]
        row.first = row.version = write.first
        row.erased = write.created_at is None
        row.created_at = write.created_at or min(issued)
        row.updated_at = write.updated_at or max(issued + resolved)
        self._changed.add(thread_id)
        self.rows[thread_id] = row
        self._add(write, row)

        for call in write.calls:
            self._claim(call, row)

    def _newest(self, key: str) -> StoredCall | None:
        attempts = self.attempts.get(key)
        return self.calls[attempts[max(attempts)]] if attempts else None

    def _put(self, call: StoredCall) -> None:
        place = call.thread_id, call.call_id
        self.calls[place] = call
        self.attempts.setdefault(call.idempotency_key, {})[call.attempt] = place

    def _do(self, statement: str) -> None:
        self._flush()
        self._script.append(statement)

    def _insert(self, verb: str, values: str) -> None:
        self._inserts.setdefault(verb, []).append(values)

    def _flush(self) -> None:
        """Write the rows that were collected; those of keys come before their calls."""
        for verb in sorted(self._inserts, key=lambda one: "cpkit_keys" not in one):
            self._script += _statements(verb, self._inserts.pop(verb))


def call_of(row: Sequence[Any]) -> StoredCall:
    """Return a call's row, with its ids and its status as text."""
    call = StoredCall._make(row)
    return call._replace(
        thread_id=row[0].decode(),
        call_id=row[1].decode(),
        tool_name=row[2].decode(),
        idempotency_key=row[4].decode(),
        status=row[5].decode(),
        erased=bool(call.erased),
    )


def _values(thread_id: str, row: _Row) -> str:
    values = row.version, row.first, row.created_at, row.updated_at, row.erased
    return as_list((thread_id, *values, row.claims, secrets.randbits(63)))


def _statements(verb: str, values: Sequence[str]) -> list[str]:
    """Return statements for rows: few, and none much larger than a megabyte."""
    return [
        f"{verb} VALUES {', '.join(some)}" for some in _divided(values, _MANY_BYTES)
    ]


def _divided(texts: Iterable[str], limit: int) -> Iterator[list[str]]:
    """Yield lists of texts, each of no more than ``limit`` bytes, or of one text."""
    part: list[str] = []
    length = 0

    for text in texts:
        if part and length + size(text) > limit:
            yield part
            part, length = [], 0

        part.append(text)
        length += size(text) + 2

    if part:
        yield part
