"""The interface of a backend: bytes in, bytes out.

A `Store` keeps bytes for one URL. It knows nothing of JSON, message types, ids or event
loops: a `cpkit.driver.Handle` in front of it checks, encodes, batches, retries, limits
time and orders. What a store has to get right is one thing: each write is atomic, and
a read sees one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from cpkit.driver.writes import Outcome, Snapshot, StoredCall, StoredDump, Write
from cpkit.records import Durability, ThreadInfo

__all__ = [
    "MAX_APPEND",
    "MAX_PAYLOAD",
    "AnnouncesChanges",
    "Decode",
    "DriverOptions",
    "Findings",
    "Heard",
    "Limits",
    "ListensForChanges",
    "SearchesMessages",
    "ServerOptions",
    "Store",
    "StoreDriver",
    "StoreInfo",
    "StoresDumps",
    "StoresMarkers",
    "StoresReceipts",
    "StoresThreadLists",
    "limits_of",
]

# Bytes of JSON, where neither the options nor the engine say less.
MAX_PAYLOAD = 16 * 1024 * 1024
MAX_APPEND = 64 * 1024 * 1024

Decode: TypeAlias = Callable[[Iterable[bytes | str], int], list[Any]]
"""``decode(bodies, first)``: stored messages to the caller's type.

``bodies`` are all ``bytes`` or all ``str``, in order; ``first`` is the position of the
first one. It may run in any thread. It raises the contract's own errors.
"""

Heard: TypeAlias = Callable[[str | None], None]
"""``heard(thread_id)``: look at this thread, or at all of them where it is ``None``.

Call it on the event loop. Too many calls do no harm, because the handle compares
markers before it wakes a watcher.
"""


class Limits(NamedTuple):
    """What the engine can hold, in bytes: one value, and all of one write."""

    max_value: int = 2**63 - 1
    max_append: int = 2**63 - 1


def limits_of(store: Store) -> Limits:
    """Return what the store's engine can hold; any size where it does not say."""
    limits: Limits = getattr(store, "limits", Limits())
    return limits


class Store(Protocol):
    """Keeps bytes for one URL.

    The handle calls ``open`` first and ``close`` last, all in one event loop, and
    checks ids and values before it calls anything. Calls may overlap. A read may be
    cancelled at any ``await``, and ends then with ``CancelledError``; ``commit`` is
    cancelled only by the time limit and by an event loop that shuts down.

    A store raises `StoreFailure` in place of its client's errors. It raises
    ``CorruptThread`` for a stored row that cannot be decoded, and, in ``open``,
    ``SchemaMismatch`` or ``InvalidURL``.

    An ability that a store does not name is off. ``limits``, a `Limits`, is
    what the engine can hold, read after ``open``. With ``erases = True`` ``commit``
    takes `Erase`, with ``trims = True`` `Trim`, with ``erases_calls = True``
    `EraseCalls`, and with a method ``dump`` `Restore`. With ``takes_bytes = True`` a
    message may be any bytes; with a keyring it takes less room and time then.
    """

    @property
    def name(self) -> str:
        """How errors call the store: scheme, host and database, never a password."""

    @property
    def max_writes(self) -> int:
        """How many writes one call of ``commit`` takes; 256 serves most stores."""

    @property
    def timeout(self) -> float | None:
        """How many seconds an operation may take, with all its repeats.

        The handle cancels an operation that takes longer, and repeats one that is
        proven not to have run. ``None`` is for a store whose calls cannot be cancelled,
        because they run in a thread; such a store limits its own waiting.
        """

    @property
    def locks_threads(self) -> bool:
        """Whether the store locks each thread for itself, and not all of them.

        All writes of one ``commit`` are of one thread then, and ``commit`` may be
        called for several threads at once. Otherwise one call follows the other.
        """

    async def open(self) -> None:
        """Connect, create or migrate what is missing, and check what exists.

        Safe when many processes open the same store at once. It may be called again
        after it failed.
        """

    async def close(self) -> None:
        """Release everything. The handle calls it once, after a failed ``open`` too."""

    def durability(self) -> Durability:
        """Return what an acknowledged write survives, and the settings that say so."""

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        """Apply the writes, each one atomic, and return an outcome for each.

        The result is as if the writes ran one after another in the order given. A
        write that is refused changes nothing. When ``commit`` returns, everything that
        was applied is as durable as `durability` says. What it raises is the outcome
        of every write of the batch. It raises an error of the contract, or a
        ``StoreFailure`` of the fate "rejected", only if nothing was written: the handle
        then repeats the writes one at a time, so that a bad one cannot fail others.
        Cancelled before it sent anything, it may raise ``StoreFailure("not sent", …)``
        in place of ``CancelledError``.
        """

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        """Return the thread as it is at one moment; ``None`` for a missing thread.

        Of the messages it has ``messages[start:stop]``, with the meaning of a Python
        slice. Their price is that of the messages returned, not of the thread.
        """

    async def holder(self, key: str) -> StoredCall | None:
        """Return the key's newest attempt, whatever its status."""


@runtime_checkable
class StoresThreadLists(Protocol):
    """A store that can list its threads; the handle is then a ``ListsThreads``."""

    async def threads(
        self, prefix: str, after: str | None, limit: int, erased: bool
    ) -> list[ThreadInfo]:
        """Return threads whose ids start with ``prefix``, in the order of code points.

        The page begins behind ``after``. With ``erased`` it includes ids that have
        nothing but erased calls: version 0, created with the first of the calls and
        updated with the last change of any.
        """


@runtime_checkable
class StoresReceipts(Protocol):
    """A store that can list a thread's calls; the handle is a ``KeepsReceipts``."""

    async def calls(self, thread_id: str) -> list[StoredCall]:
        """Return every call of the thread in the order of claims, erased ones too."""


@runtime_checkable
class StoresDumps(Protocol):
    """A store that can move threads; its ``commit`` takes `Restore` as well."""

    async def dump(self, thread_id: str) -> StoredDump | None:
        """Return the whole thread at one moment; ``None`` where nothing is stored."""


@runtime_checkable
class SearchesMessages(Protocol):
    """A store whose engine finds text; the handle is then a ``SearchesThreads``."""

    async def search(
        self, patterns: Sequence[str], prefix: str, limit: int, seconds: float
    ) -> list[tuple[str, int]]:
        """Return the threads with a message that is ``LIKE`` one of the patterns.

        Last changed first, each with the position of its newest such message. ``\\`` is
        the escape in a pattern. Upper and lower case are alike, of ASCII at least.
        After ``seconds`` the engine ends the search, and it raises ``StoreFailure``.
        """


@runtime_checkable
class StoresMarkers(Protocol):
    """A store that can tell cheaply whether threads changed.

    For a store without it, a watch reads the whole of each watched thread at every
    poll.
    """

    async def markers(self, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
        """Return a marker for each of these threads; of all, where it is ``None``.

        Each change gives a thread another marker: an append, a change of extra, a
        claim, a result, a deletion, a restore. It must not rest on a clock that may
        step back. An id of which nothing is on record has no marker.
        """


@runtime_checkable
class ListensForChanges(Protocol):
    """A store that hears of changes, those of other processes too."""

    async def listen(self, heard: Heard) -> None:
        """Call ``heard`` for changes until cancelled.

        Call ``heard(None)`` when listening begins, and whenever changes may have been
        missed. The handle calls ``listen`` again after it raised ``StoreFailure``. It
        returns where nothing can be heard; the handle then only polls.
        """


@runtime_checkable
class AnnouncesChanges(Protocol):
    """A store whose listeners must be told of changes by the process that writes."""

    async def announce(self, thread_ids: Sequence[str]) -> bool:
        """Notify listeners, and return whether there are any.

        The handle calls it in the background after commits, with all ids that changed
        since the last call, at most every 10 ms, or every 500 ms where no process
        listens.
        """


class DriverOptions(BaseModel):
    """What every driver can be told, in the URL's query or by keyword.

    A driver adds its own by a subclass. ``docs/drivers.md`` has the meanings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_payload: PositiveInt = MAX_PAYLOAD
    max_append: PositiveInt = MAX_APPEND
    strict_roundtrip: bool = False
    poll: float = Field(default=1.0, gt=0, le=86_400)
    notify: bool = True


class ServerOptions(DriverOptions):
    """The options of a driver that talks to a server, in seconds."""

    timeout: float = Field(default=30.0, gt=0, le=86_400)
    connect_timeout: float = Field(default=10.0, gt=0, le=86_400)


class StoreInfo(NamedTuple):
    """What ``inspect`` finds without creating anything.

    ``version`` is the schema's, ``size`` the bytes that the store takes, ``path`` its
    file or folder; each is ``None`` where it is not known. ``dead`` says for people to
    read what of the bytes holds nothing, and the command that frees it.
    """

    exists: bool
    version: object = None
    size: int | None = None
    path: str | None = None
    dead: Mapping[str, str] = {}


class Findings(NamedTuple):
    """What an examination finds: damage, advice, and facts for people to read.

    ``advice`` is a sentence for each thing to change, with its cure.
    """

    damaged: Sequence[str] = ()
    advice: Sequence[str] = ()
    facts: Mapping[str, str] = {}


class StoreDriver(Protocol):
    """What an entry point of the group ``cpkit.drivers`` names: a store's class.

    A driver may also have ``async def inspect(url, options) -> StoreInfo | None``, a
    class or static method that tells whether a store exists, and creates nothing;
    ``None`` means that it cannot tell. ``async def examine(url, options, whole) ->
    Findings`` looks around the store and for damage: at a part that takes a moment, or
    at the whole store with the engine's own check. ``survives_by_default``, a
    `Survives`, is what a write has to survive: ``cpkit doctor`` exits with 1 where it
    survives less. A driver of an engine that only one process may open sets
    ``one_process = True``; the suite then skips clauses with many processes, and
    expects that a second process is refused and harms nothing.
    """

    Options: ClassVar[type[DriverOptions]]
    """The model that the options are checked against."""

    client_options: ClassVar[frozenset[str]]
    """Query parameters to leave in the URL, for the client library's own parser."""

    @classmethod
    def from_url(cls, url: str, options: Any) -> Store:
        """Return an unopened store, or raise ``InvalidURL``; do no I/O.

        ``options`` is an instance of ``Options``; what it took from the query is not
        in the URL any more.
        """
