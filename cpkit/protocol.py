"""The contract: six methods, and the optional protocols beside them.

Every detail is in ``docs/contract.md``; this is the short form.

Terms
    A *thread* is an append-only list of messages, a small merged map (*extra*) and
    the calls claimed in it, under an opaque id. Its *version* is the number of messages
    that were appended. A *call* is one attempt at a side effect. Its *idempotency key*
    names the effect across the whole store, and at most one issued or completed call
    holds it.
    *Ids* are compared exactly: 1 to 512 bytes of UTF-8 without NUL.

All stores
    Every method is linearizable per thread (and per key for the three call methods),
    across tasks, handles, processes and machines that share the store. After any
    exception an operation is applied as a whole or not at all, the next writer is not
    blocked, and the handle still works. Checks of the handle, the ids and the values
    come first, for empty writes too.

Cancellation
    A cancelled call may still take effect after ``CancelledError`` was raised. It is
    ordered before every later operation of the same handle on the same thread or key:
    the later call waits until the cancelled one is decided, and so does ``aclose()``.

Time and size
    No operation waits for ever: it raises ``BackendUnavailable`` after the driver's
    ``timeout``. A write whose fate is unknown then may take effect later; no later
    operation waits for it. ``max_payload`` bounds one value, ``max_append`` one append.

Errors that every method may raise
    ``InvalidId``, ``BackendUnavailable``, ``CorruptThread``, ``Closed``,
    ``WrongEventLoop``; the writes ``SerializationError`` and ``PayloadTooLarge`` too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Protocol, TypeVar, runtime_checkable

from cpkit.records import (
    CallRecord,
    CheckpointData,
    Durability,
    JsonValue,
    ThreadDump,
    ThreadInfo,
    ToolCall,
)

__all__ = [
    "Checkpointer",
    "ErasesCalls",
    "ErasesThreads",
    "FullCheckpointer",
    "JsonCheckpointer",
    "KeepsReceipts",
    "ListsThreads",
    "MovesThreads",
    "ReadsRanges",
    "SearchesThreads",
    "StatesDurability",
    "TrimsThreads",
    "WatchesThreads",
]

MessageT = TypeVar("MessageT")


@runtime_checkable
class Checkpointer(Protocol[MessageT]):
    """The durable state of agents: messages, extra and calls, by thread."""

    async def load(self, thread_id: str) -> CheckpointData[MessageT] | None:
        """Return one snapshot of messages, extra and pending calls.

        ``None`` when nothing was ever recorded for the thread. The result is the
        caller's. Until the thread is deleted, a later load extends an earlier one, less
        what was trimmed.

        Raises ``SerializationError`` where a stored message does not fit the type.
        """
        ...

    async def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        *,
        expected_version: int | None = None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> int:
        """Add the messages at the end, all or none, and return the new version.

        Positions are dense, contiguous for one call, and in commit order. ``extra`` is
        merged in the same atomic step, as by `save_extra`: a reader sees both or
        neither. Without messages and extra nothing changes.

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

        ``None``: the call is on record now and holds the key. A record: nothing was
        written. The record is either the key's holder (issued or completed, of any
        thread) or this same call from an earlier try, whatever its status. A failed
        call does not hold its key: the next claim has ``attempt`` one higher.

        Raises ``CallMismatch`` where ``(thread_id, call.call_id)`` is on record with
        another key, tool or args (compared as canonical JSON).
        """
        ...

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: Any,
        *,
        success: bool = True,
    ) -> CallRecord:
        """Record the outcome, once, and return the record as it stands.

        The first outcome stays; act on what comes back, not on what was passed in.
        ``success=False`` says that the attempt did not have an effect and may be made
        again: it frees the key. A final error or a refusal is a *completed* result.

        Raises ``UnknownCall`` for a call that was never issued.
        """
        ...

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        """Return the completed record of the key, from any thread, or ``None``."""
        ...


@runtime_checkable
class ListsThreads(Protocol):
    """Can list its threads."""

    async def list_threads(
        self,
        *,
        prefix: str = "",
        after: str | None = None,
        limit: int = 100,
        erased: bool = False,
    ) -> list[ThreadInfo]:
        """Return threads ordered by code point of their ids, without payloads.

        ``after`` is exclusive: pass the last id of a page to get the next one. With
        ``erased`` the list includes ids of which nothing but erased calls is left.
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

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> CheckpointData[MessageT] | None:
        """Return what `load` returns, with ``messages[start:stop]`` only.

        The slice is Python's: ``start=-20`` gives the newest twenty, ``stop=0`` none.
        ``version`` is the thread's, and ``first`` the position where the range begins:
        that of the oldest message left, where an older one was asked for.
        """
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

    async def delete_thread(
        self,
        thread_id: str,
        *,
        expected_version: int | None = None,
        forget_keys: bool = False,
    ) -> None:
        """Erase messages, extra, args and results; keep the status of each key.

        The id starts again at version 0 and ``load`` gives ``None``. Each call stays
        on record, ``erased``, and holds its key as before; it shows in ``list_calls``
        and ``find_call``, not in ``load().pending``. With ``forget_keys`` the thread's
        records go too, and its keys are free. A missing thread is not an error.

        Raises ``VersionConflict``, and deletes nothing, unless the thread is at
        ``expected_version``; a missing thread is at version 0.
        """
        ...


@runtime_checkable
class TrimsThreads(Protocol):
    """Can remove the oldest messages of a thread."""

    async def trim(
        self, thread_id: str, before: int, *, expected_version: int | None = None
    ) -> int:
        """Remove the messages below position ``before``; return how many were removed.

        They are gone for good. The other messages keep their positions, and the thread
        its version, extra, calls and times. ``first`` of a load is the position of the
        oldest message left. A ``before`` beyond the version removes all messages. To
        repeat a trim is safe. A missing thread is not an error.

        Raises ``VersionConflict``, and removes nothing, unless the thread is at
        ``expected_version``; a missing thread is at version 0.
        """
        ...


@runtime_checkable
class ErasesCalls(Protocol):
    """Can erase the content of old calls, and keep what they did on record."""

    async def erase_calls(
        self,
        thread_id: str,
        before: datetime,
        *,
        expected_version: int | None = None,
    ) -> int:
        """Erase args and results of calls with an outcome from before a time.

        Returns how many calls were erased now. Their records stay, ``erased``, as after
        ``delete_thread``: ids, tool, status, attempt and times, and each key is held as
        before. Issued calls keep everything. Messages, extra, version and times of the
        thread stay. To repeat it is safe. A missing thread is not an error. ``before``
        is compared with ``resolved_at`` and has a time zone.

        Raises ``VersionConflict``, and erases nothing, unless the thread is at
        ``expected_version``; a missing thread is at version 0.
        """
        ...


@runtime_checkable
class MovesThreads(Protocol):
    """Can carry a thread exactly to another store."""

    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        """Return everything on record of the thread at one moment, or ``None``."""
        ...

    async def restore_thread(self, dump: ThreadDump) -> None:
        """Create the thread exactly as it was dumped, or change nothing.

        Raises ``VersionConflict`` where the id has a thread or a call on record, and
        ``KeyTaken`` where a call of another thread stands in the way of a key: of each
        key all attempt numbers must differ, and only the newest may be not failed.
        """
        ...


@runtime_checkable
class WatchesThreads(Protocol):
    """Can wake a waiter when a thread changes."""

    def watch(
        self, *thread_ids: str
    ) -> AbstractAsyncContextManager[AsyncIterator[str]]:
        """Yield a thread's id after it changed; without ids, that of any thread.

        Entering registers. Each append, change of extra, claim, result, deletion or
        restore that is committed after the entering is followed by a yield of its
        thread's id. Changes are coalesced, and an id may be yielded without a change,
        so look at the thread after each yield. A change that leaves the thread as it
        was may be skipped.

        A notification makes the yield quick. Where one is lost, the id is yielded
        within the poll interval. The iterator ends with the block, and raises
        ``Closed`` when the checkpointer closes.
        """
        ...


@runtime_checkable
class StatesDurability(Protocol):
    """Says what an acknowledged write survives."""

    @property
    def durability(self) -> Durability:
        """The promise of this handle, with the server's settings taken into account."""
        ...


@runtime_checkable
class SearchesThreads(Protocol):
    """Can find a text in messages by means of its engine, as SQLite and Postgres do."""

    async def search_threads(
        self, text: str, *, prefix: str = "", limit: int = 100, timeout: float = 10.0
    ) -> list[tuple[str, int]]:
        """Return threads that have the text, last changed first.

        Each comes with the position of its newest message whose JSON has the text.
        Upper and lower case are alike, as far as the engine knows them. ``text`` has 1
        to 1,000 characters.

        Reads all messages until ``limit`` threads are found. After ``timeout`` seconds
        the engine ends that, and it raises ``BackendUnavailable``.
        """
        ...


@runtime_checkable
class FullCheckpointer(
    Checkpointer[MessageT],
    ReadsRanges[MessageT],
    ListsThreads,
    KeepsReceipts,
    ErasesThreads,
    TrimsThreads,
    ErasesCalls,
    MovesThreads,
    WatchesThreads,
    StatesDurability,
    Protocol[MessageT],
):
    """The six methods and every optional protocol but ``SearchesThreads``.

    All stores of cpkit have them, so this is the type that ``open_checkpointer``
    returns. A store of another package may lack some: ask with ``isinstance``.
    """


@runtime_checkable
class JsonCheckpointer(FullCheckpointer[dict[str, Any]], Protocol):
    """A checkpointer of JSON objects: any mapping goes in, dicts come back."""

    async def append(
        self,
        thread_id: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        expected_version: int | None = None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> int:
        """Add the messages at the end, as `Checkpointer.append` does."""
        ...
