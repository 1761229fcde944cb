"""What is stored, under which keys.

::

    {<prefix>}:schema       string: the version of this layout, 1, and an id that every
                            store has for itself
               threads      sorted set, all scores 0: the ids of the threads
               erased       the same: ids that have nothing but erased calls
               t:<thread>   hash: created, updated; restored: the time of the restore
                            that wrote it; first: of a thread that was trimmed, the
                            position of the first message that is left
               m:<thread>   list: the messages; the version is first + its length
               x:<thread>   hash: extra's keys and values
               p:<thread>   hash: call id -> record; of the calls that are pending
               c:<thread>   hash: call id -> record; of the other calls
               k:<key>      sorted set: members; the score is the attempt

A *record* is: sequence, attempt, idempotency key, tool, time of the claim, status, time
of the result, args, result. The args of an erased call are empty, and so is what an
issued call does not have yet. A *member* is: thread, call id. NUL separates fields: no
id and no JSON text has one. Messages, extra, args and results are JSON texts; ids are
UTF-8; times are microseconds since 1970 by the server's clock.

``{<prefix>}`` is a hash tag: all keys of a store are in one slot of a Redis Cluster, so
that a script can use any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any
from uuid import uuid4

from cpkit.driver import StoredCall, from_micros
from cpkit.errors import CorruptThread
from cpkit.records import ThreadInfo

SCHEMA_VERSION = 1


def base_of(prefix: str) -> bytes:
    """Return what all keys of a store start with."""
    return f"{{{prefix}}}:".encode()


def new_schema() -> bytes:
    """Return what the key schema of a new store is."""
    return f"{SCHEMA_VERSION} {uuid4().hex}".encode()


def version_of(schema: bytes) -> int | str:
    """Return the version in a key schema, or the text if it has none."""
    version = schema.partition(b" ")[0]
    return int(version) if version.isdigit() else schema.decode(errors="replace")


def encode_call(call: StoredCall, sequence: int) -> bytes:
    """Return the record of a call."""
    fields = (
        *(sequence, call.attempt, call.idempotency_key, call.tool_name),
        *(call.issued_at, call.status, call.resolved_at or ""),
        *(b"" if call.erased else call.args, call.result or b""),
    )
    return b"\0".join(
        one if isinstance(one, bytes) else str(one).encode() for one in fields
    )


def decode_call(
    thread_id: bytes, call_id: bytes, record: bytes
) -> tuple[int, StoredCall]:
    """Return a call's sequence, and the call; or raise ``CorruptThread``."""
    try:
        *numbers, key, tool, issued, status, resolved, args, result = record.split(
            b"\0"
        )
        sequence, attempt = map(int, numbers)
        return sequence, StoredCall(
            thread_id.decode(),
            call_id.decode(),
            tool.decode(),
            args or b"{}",
            key.decode(),
            status.decode(),  # type: ignore[arg-type]  # one of the three
            attempt,
            int(issued),
            result or None,
            int(resolved) if resolved else None,
            not args,
        )
    except ValueError as exc:
        where = f"call {_shown(call_id)!r}"
        raise CorruptThread(_shown(thread_id), where, str(exc)) from exc


def decode_calls(thread_id: str, *hashes: Mapping[bytes, bytes]) -> list[StoredCall]:
    """Return the calls of a thread's hashes p and c, in the order of claims."""
    name = thread_id.encode()
    calls = [decode_call(name, *pair) for found in hashes for pair in found.items()]
    calls.sort(key=itemgetter(0))
    return [call for _, call in calls]


def decode_thread(name: bytes, version: int, created: Any, updated: Any) -> ThreadInfo:
    """Return one thread of a list."""
    try:
        times = from_micros(int(created)), from_micros(int(updated))
        return ThreadInfo(name.decode(), version, *times)
    except (ValueError, TypeError, OverflowError) as exc:
        raise CorruptThread(_shown(name), "its times", str(exc)) from exc


def _shown(stored: bytes) -> str:
    """Return a stored id for an error; the id may be damaged."""
    return stored.decode(errors="backslashreplace")
