"""What is stored, under which keys.

::

    <prefix>:{0}:schema        string: the version of this layout, 1
    <prefix>:{n}:threads       sorted set, all scores 0: the ids of the shard's threads
                 erased        the same: ids that have nothing but erased calls
                 m:<thread>    list: the messages
                 x:<thread>    hash: extra's keys and values
                 t:<thread>    hash: created, updated; of an id that has nothing but
                               erased calls first, last; late: the time of the last
                               result of an erased call, for watchers; restored: a
                               random token of the restore that wrote it, for watchers
                 p:<thread>    hash: call id -> record; of the calls that are pending
                 c:<thread>    hash: call id -> record; of the other calls
                 k:<key>       sorted set: members; the score is the attempt

A *record* is: sequence, attempt, time of the claim, idempotency key, tool, token,
status, time of the result, args, result. The args of an erased call are empty, and so
is what an issued call does not have yet. A *member* is: thread, call id, token. NUL
separates fields: no id and no JSON text has one. Messages, extra, args and results are
JSON texts; ids are UTF-8; times are microseconds since 1970 by the server's clock.

A store on one server, or in one slot of a cluster, is one shard, number 0, and its
tokens are empty. A store over a cluster has 64 shards, each in the slot of its number;
an id is in the shard of its CRC-32 modulo 64. Three more things are for the claims that
`cpkit_redis.cluster` describes: ``w:<thread>``, a hash of prepared claims (call id ->
token, key, tool, args); ``v:<token>``, a string that expires, for one that was removed
before it was confirmed; and the field ``begun`` of ``t``, the token of a restore.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from cpkit.driver import StoredCall, from_micros
from cpkit.errors import CorruptThread
from cpkit.records import ThreadInfo

SCHEMA_VERSION = 1

SHARDS = 64
"""Shards of a store over all slots of a cluster."""

KINDS = (b"m", b"x", b"t", b"p", b"c")
"""Kinds of keys that every thread has."""


class Layout:
    """Names the keys of a store with a prefix and a number of shards."""

    def __init__(self, prefix: str, shards: int) -> None:
        self.shards = [f"{prefix}:{{{n}}}:".encode() for n in range(shards)]
        self.schema = self.shards[0] + b"schema"

    def shard_of(self, one_id: str) -> bytes:
        """Return what all keys of a thread or an idempotency key start with."""
        if len(self.shards) == 1:
            return self.shards[0]

        return self.shards[zlib.crc32(one_id.encode()) % len(self.shards)]

    def key(self, kind: bytes, thread_id: str) -> bytes:
        """Return a thread's key. operations.lua has the same rule."""
        return b"%b%b:%b" % (self.shard_of(thread_id), kind, thread_id.encode())


def decode_call(thread_id: bytes, call_id: bytes, record: bytes) -> StoredCall:
    """Return a stored call; raise ``CorruptThread`` for a damaged record."""
    try:
        *numbers, key, tool, _, status, resolved, args, result = record.split(b"\0")
        _, attempt, issued = map(int, numbers)
        is_issued = status == b"issued"

        if status not in (b"issued", b"completed", b"failed"):
            raise ValueError(f"{status!r} is not a status")

        if is_issued == bool(resolved) or (is_issued or not args) == bool(result):
            raise ValueError("it has a result too many or too few")

        return StoredCall(
            thread_id.decode(),
            call_id.decode(),
            tool.decode(),
            args or b"{}",
            key.decode(),
            status.decode(),  # type: ignore[arg-type]  # one of the three
            attempt,
            issued,
            result or None,
            int(resolved) if resolved else None,
            not args,
        )
    except ValueError as exc:
        where = f"call {_shown(call_id)!r}"
        raise CorruptThread(_shown(thread_id), where, str(exc)) from exc


def decode_calls(thread_id: str, *hashes: Mapping[bytes, bytes]) -> list[StoredCall]:
    """Return the calls of a thread's hashes p and c, in the order of claims."""
    records = [pair for found in hashes for pair in found.items()]
    calls = [(decode_call(thread_id.encode(), *pair), pair[1]) for pair in records]
    calls.sort(key=lambda pair: int(pair[1].partition(b"\0")[0]))
    return [call for call, _ in calls]


def decode_thread(name: bytes, version: int, *times: bytes | None) -> ThreadInfo:
    """Return one thread of a list."""
    try:
        thread_id = name.decode()
    except UnicodeDecodeError as exc:
        raise CorruptThread(_shown(name), "its id", str(exc)) from exc

    try:
        created, updated = (from_micros(int(time or b"missing")) for time in times)
    except (ValueError, OverflowError) as exc:
        raise CorruptThread(thread_id, "its times", str(exc)) from exc

    return ThreadInfo(thread_id, version, created, updated)


def _shown(stored: bytes) -> str:
    """Return a stored id for an error, which may be damaged."""
    return stored.decode(errors="backslashreplace")
