"""The contract: six methods, and the optional abilities beside them.

Terms
    A *thread* is an append-only list of messages, a small merged map (*extra*) and
    the calls claimed in it, under an opaque id. Its *version* is how many messages it
    has. A *call* is one attempt at a side effect; its *idempotency key* names the
    effect across the whole store, and is held by at most one issued or completed call.
    *Ids* are compared exactly: 1 to 512 bytes of UTF-8 without NUL.

All stores
    Every method is linearizable per thread (and per key for the three call methods),
    across tasks, handles, processes and machines that share the store. After any
    exception, cancellation included, an operation is wholly done or wholly not done,
    the next writer is not blocked and the handle still works. Checks of the handle,
    the ids and the values come before everything, for empty writes too.

Errors that every method may raise
    ``InvalidId``, ``BackendUnavailable``, ``CorruptThread``, ``Closed``,
    ``WrongEventLoop``; the writes ``SerializationError`` and ``PayloadTooLarge`` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from cpkit.records import (
    CallRecord,
    CheckpointData,
    Durability,
    JsonValue,
    ThreadInfo,
    ToolCall,
)

__all__ = [
    "Checkpointer",
    "ErasesThreads",
    "KeepsReceipts",
    "ListsThreads",
    "ReadsRanges",
    "StatesDurability",
]

MessageT = TypeVar("MessageT")


@runtime_checkable
class Checkpointer(Protocol[MessageT]):
    """The durable state of agents: messages, extra and calls, by thread."""

    async def load(self, thread_id: str) -> CheckpointData[MessageT] | None:
        """Return one snapshot of messages, extra and pending calls.

        ``None`` when nothing was ever recorded for the thread. The result is the
        caller's. Until the thread is deleted, a later load extends an earlier one.

        Raises ``SerializationError`` where a stored message is none of the type.
        """
        ...

    async def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        *,
        expected_version: int | None = None,
    ) -> int:
        """Add the messages at the end, all or none, and return the new version.

        Positions are dense, contiguous for one call, and in commit order. No
        messages: nothing changes and the current version comes back.

        Raises ``VersionConflict``, and writes nothing, unless the thread is at
        ``expected_version``. It does not fence across ``delete_thread``.
        """
        ...

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        """Merge like ``dict.update``: shallow, atomic, the last writer wins per key.

        ``None`` is stored. An empty mapping changes nothing.
        """
        ...

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        """Claim the call's idempotency key, before its effect runs.

        ``None``: the call is on record now and holds the key. A record: it was there
        before and nothing was written. It is either the key's holder (issued or
        completed, of any thread) or this very call from an earlier try, whatever its
        status. A failed call holds no key: the next claim has ``attempt`` one higher.

        Raises ``CallMismatch`` where ``(thread_id, call.call_id)`` is on record with
        another key, tool or args (compared as canonical JSON).
        """
        ...

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        """Record the outcome, once, and return the record as it stands.

        The first outcome stays; act on what comes back, not on what was passed in.
        ``success=False`` says that the attempt had no effect and may be made again:
        it frees the key. A final error or a refusal is a *completed* result.

        Raises ``UnknownCall`` for a call that was never issued.
        """
        ...

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        """Return the completed record of the key, from any thread, or ``None``."""
        ...


@runtime_checkable
class ListsThreads(Protocol):
    """Can tell which threads there are."""

    async def list_threads(
        self, *, prefix: str = "", after: str | None = None, limit: int = 100
    ) -> list[ThreadInfo]:
        """Return threads ordered by code point of their ids, without payloads.

        ``after`` is exclusive: pass the last id of a page to get the next one.
        """
        ...


@runtime_checkable
class ReadsRanges(Protocol[MessageT]):
    """Can return a part of a thread for the price of that part."""

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[MessageT]:
        """Return ``messages[start:stop]``; a missing thread is ``[]``."""
        ...


@runtime_checkable
class KeepsReceipts(Protocol):
    """Can show every call on record."""

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        """Return every attempt of the thread in the order of claims, erased ones too.

        A failed attempt keeps its result as a receipt.
        """
        ...

    async def find_call(self, idempotency_key: str) -> CallRecord | None:
        """Return the issued or completed record that holds the key, or ``None``."""
        ...


@runtime_checkable
class ErasesThreads(Protocol):
    """Can delete a thread without undoing what its calls did."""

    async def delete_thread(self, thread_id: str, *, forget_keys: bool = False) -> None:
        """Erase messages, extra, args and results; keep the status of each key.

        The id starts again at version 0 and ``load`` gives ``None``. Each call stays
        on record, ``erased``, and holds its key as before; it shows in ``list_calls``
        and ``find_call``, not in ``load().pending``. With ``forget_keys`` the thread's
        records go too, and its keys are free. What is not there is no error.
        """
        ...


@runtime_checkable
class StatesDurability(Protocol):
    """Says what an acknowledged write survives."""

    @property
    def durability(self) -> Durability:
        """The promise of this handle, with the server's settings taken into account."""
        ...
