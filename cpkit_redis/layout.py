"""What is stored, under which keys, and the version of it.

::

    <prefix>:schema          string: the version of this layout, 1
    <prefix>:threads         sorted set, all scores 0: the ids of the threads
    <prefix>:{<thread>}:m    list: the messages
                       x     hash: extra's keys and values
                       t     hash: created, updated
                       i     hash: call id -> sequence, attempt, time of the claim,
                             idempotency key, tool
                       a     hash: call id -> args, but of erased calls
                       r     hash: call id -> status, time; of calls with an outcome
                       v     hash: call id -> result, but of erased calls
                       p     hash: call id -> what i and a have; of the calls that are
                             pending and not erased, for load
    <prefix>:{<key>}:k       sorted set: thread, call id; the score is the attempt

Messages, extra, args and results are JSON texts; ids are UTF-8; times are microseconds
since 1970 by the server's clock. Fields within a value are separated by NUL, which no
id and no JSON text holds. ``%``, ``{`` and ``}`` in ids are percent-encoded between the
braces, so that the braces hold the whole id: all keys of a thread share one slot of a
cluster, and no two ids share a key.
"""

from __future__ import annotations

from redis.exceptions import ResponseError

from cpkit.errors import SchemaMismatch
from cpkit_redis.faults import text_of, translated

__all__ = ["SCHEMA_VERSION", "check_version", "register_of", "slot_of"]

SCHEMA_VERSION = 1


def slot_of(prefix: str, thread_id: str) -> bytes:
    """Return what all keys of the thread start with; one letter follows.

    Scripts have the same rule for ids that they come upon (scripts/slots.lua).
    """
    escaped = thread_id.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return f"{prefix}:{{{escaped}}}:".encode()


def register_of(prefix: str, idempotency_key: str) -> bytes:
    """Return the key under which the attempts of an idempotency key are."""
    return slot_of(prefix, idempotency_key) + b"k"


def check_version(store: str, created: object, found: object) -> None:
    """Check the answers to SET NX and GET of the version.

    A server that takes no writes now is good for reading, if the store is there.
    Raises ``SchemaMismatch`` for another version or another thing in its place.
    """
    if isinstance(found, ResponseError):
        text = text_of(found)

        if text.startswith("WRONGTYPE"):
            raise SchemaMismatch(store, text, SCHEMA_VERSION) from found

        raise translated(text, store) from found

    if isinstance(found, bytes):
        version = int(found) if found.isdigit() else found.decode(errors="replace")

        if version != SCHEMA_VERSION:
            raise SchemaMismatch(store, version, SCHEMA_VERSION)
    elif isinstance(created, ResponseError):
        raise translated(text_of(created), store) from created
