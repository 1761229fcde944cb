"""Everything that a checkpointer raises.

::

    CheckpointerError
    │   fix the call
    ├── InvalidId              an id is empty, too long, or not a str
    ├── InvalidURL             the store's URL or an option cannot be used
    ├── SerializationError     a value is not JSON, or does not fit message_type
    ├── PayloadTooLarge        a value or an append is over its limit
    ├── CallMismatch           the call id is on record for another call
    ├── UnknownCall            a result for a call that was never issued
    ├── Closed                 the handle is not open
    ├── WrongEventLoop         the handle belongs to another event loop
    │   load again
    ├── VersionConflict        the thread is not at the expected version
    ├── KeyTaken               a restored call's key belongs to another thread
    │   retry
    ├── BackendUnavailable     the store could not be reached; see maybe_applied
    │   look at the store
    ├── CorruptThread          a stored row is not what was written
    ├── KeyMissing             the keyring cannot open a value that is encrypted
    └── SchemaMismatch         the store has another schema, or is not cpkit's

The layers add errors of their own, which the named package exports::

    CheckpointerError
    │   fix the call
    ├── KeyReused              cpkit.effects: the key is recorded with other arguments
    ├── UnknownEntry           cpkit.sessions: the session has no entry with this id
    ├── TypeRefused            cpkit.integrations.langgraph: a type is not allowed
    ├── Unsupported            cpkit.integrations.langgraph: the store lacks an ability
    ├── NotASession            cpkit.sessions: the thread is a plain thread
    │   load again
    ├── Trimmed                cpkit.sessions: messages after a reader's cursor are gone
    ├── Superseded             cpkit.effects: another process recorded an outcome first
    ├── NotOwner               cpkit.integrations.langgraph: another run has the thread
    ├── LeaseLost              cpkit.lease: this runner may not write to the thread now
    │   retry
    ├── EffectTimeout          cpkit.effects: no result or decision came in time
    ├── LeaseTimeout           cpkit.lease: another runner holds the thread
    │   give up
    ├── EffectFailed           cpkit.effects: the effect's recorded outcome is a failure
    ├── EffectDenied           cpkit.effects: a person denied the effect
    │   ├── ApprovalExpired    cpkit.effects: no approval came, or was used, in time
    │   └── ApprovalWithdrawn  cpkit.effects: the approval request was withdrawn
    └── EffectErased           cpkit.effects: its content was erased

Any other mistake of a caller (a generator instead of a list, a limit of 0, a negative
``expected_version``) raises a plain ``TypeError`` or ``ValueError``.

Each error takes the facts and builds the sentence itself. So the facts are attributes,
and an error can be pickled and sent to another process. The client library's error is
always the ``__cause__``.
"""

from __future__ import annotations

from collections.abc import Sequence

from cpkit.records import CallRecord

__all__ = [
    "BackendUnavailable",
    "CallMismatch",
    "CheckpointerError",
    "Closed",
    "CorruptThread",
    "InvalidId",
    "InvalidURL",
    "KeyMissing",
    "KeyTaken",
    "PayloadTooLarge",
    "SchemaMismatch",
    "SerializationError",
    "UnknownCall",
    "VersionConflict",
    "WrongEventLoop",
]


class CheckpointerError(Exception):
    """The root of everything that cpkit raises about stored state."""


class InvalidId(CheckpointerError):
    """An id is not a string of 1 to 512 bytes of UTF-8 without NUL."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


class InvalidURL(CheckpointerError):
    """A store's URL or an option cannot be used; the message says what to write."""


class SerializationError(CheckpointerError):
    """A value cannot be stored, or a stored message does not fit the message type.

    ``path`` leads to the value: it starts with the message's index in the call (at
    load: its position in the thread) or with the extra key, ``"args"`` or
    ``"result"``. ``thread_id`` is set where a load failed.
    """

    def __init__(
        self,
        path: Sequence[str | int],
        reason: str,
        thread_id: str | None = None,
    ) -> None:
        super().__init__(tuple(path), reason, thread_id)
        self.path = tuple(path)
        self.reason = reason
        self.thread_id = thread_id

    def __str__(self) -> str:
        where = "".join(f"[{part!r}]" for part in self.path) or "the value"

        if self.thread_id is not None:
            return f"message {where} of thread {self.thread_id!r}: {self.reason}"

        return f"{where}: {self.reason}"


class PayloadTooLarge(CheckpointerError):
    """A value is larger than ``max_payload``, or one write than ``max_append``.

    ``limit`` is in bytes of JSON; ``option`` names it.
    """

    def __init__(
        self,
        path: Sequence[str | int],
        size: int,
        limit: int,
        option: str = "max_payload",
    ) -> None:
        super().__init__(tuple(path), size, limit, option)
        self.path = tuple(path)
        self.size = size
        self.limit = limit
        self.option = option

    def __str__(self) -> str:
        where = "".join(f"[{part!r}]" for part in self.path) or "the thread"
        advice = (
            "append in smaller parts"
            if self.option == "max_append"
            else "store the content elsewhere and keep a reference"
        )
        return (
            f"{where}: {self.size} bytes of JSON, and {self.option} is {self.limit}; "
            f"{advice}, or raise {self.option}"
        )


class CallMismatch(CheckpointerError):
    """A call id is on record for another call; ``differs`` names the fields."""

    def __init__(self, thread_id: str, call_id: str, differs: Sequence[str]) -> None:
        super().__init__(thread_id, call_id, tuple(differs))
        self.thread_id = thread_id
        self.call_id = call_id
        self.differs = tuple(differs)

    def __str__(self) -> str:
        return (
            f"call {self.call_id!r} of thread {self.thread_id!r} is on record with "
            f"another {' and '.join(self.differs)}; a call id names one attempt"
        )


class UnknownCall(CheckpointerError):
    """A result came for a call that was never issued."""

    def __init__(self, thread_id: str, call_id: str) -> None:
        super().__init__(thread_id, call_id)
        self.thread_id = thread_id
        self.call_id = call_id

    def __str__(self) -> str:
        return (
            f"call {self.call_id!r} was never issued in thread {self.thread_id!r}; "
            "record_issued comes first"
        )


class Closed(CheckpointerError):
    """The handle is not open: not entered yet, or closed already."""

    def __init__(self, store: str) -> None:
        super().__init__(store)
        self.store = store

    def __str__(self) -> str:
        return (
            f"{self.store} is not open; enter it once, with "
            "'async with open_checkpointer(...) as cp:', and use it inside"
        )


class WrongEventLoop(CheckpointerError):
    """The handle is not used on the asyncio event loop on which it was opened.

    ``is_running`` is ``False`` if no asyncio loop is running at all, as under trio.
    """

    def __init__(self, store: str, *, is_running: bool = True) -> None:
        super().__init__(store)
        self.store = store
        self.is_running = is_running

    def __str__(self) -> str:
        if not self.is_running:
            return (
                f"{self.store}: no asyncio event loop is running here; cpkit runs on "
                "asyncio (with anyio too), and not on trio"
            )

        return (
            f"{self.store} was opened on another event loop, or before os.fork(); open "
            "a handle in each loop and process (handles of one store see each other's "
            "writes)"
        )


class VersionConflict(CheckpointerError):
    """The thread is not at ``expected_version``; nothing was written.

    Another writer has the thread. Load it again before deciding anything.
    """

    def __init__(self, thread_id: str, expected: int, actual: int) -> None:
        super().__init__(thread_id, expected, actual)
        self.thread_id = thread_id
        self.expected = expected
        self.actual = actual

    def __str__(self) -> str:
        if self.expected == self.actual:  # a restore
            return (
                f"thread {self.thread_id!r} exists without messages: it has extra or "
                "calls on record"
            )

        if self.actual == 0:
            reason = "it was deleted, or never written"
        elif self.actual < self.expected:
            reason = "it was deleted and written again, or the number is wrong"
        else:
            reason = "another writer appended"

        return (
            f"thread {self.thread_id!r} is at version {self.actual}, "
            f"not {self.expected}: {reason}; load it again"
        )


class KeyTaken(CheckpointerError):
    """A restored call has an idempotency key that a call of another thread has.

    Nothing was restored.
    """

    def __init__(self, idempotency_key: str, thread_id: str) -> None:
        super().__init__(idempotency_key, thread_id)
        self.idempotency_key = idempotency_key
        self.thread_id = thread_id

    def __str__(self) -> str:
        return (
            f"key {self.idempotency_key!r} is on record in thread {self.thread_id!r}; "
            "nothing was restored"
        )


class BackendUnavailable(CheckpointerError):
    """The store could not be reached, or refused the operation.

    ``maybe_applied`` is ``False`` where the operation is proven not to have run. It is
    ``True`` where the answer was lost: the write was applied as a whole or not at all,
    and only the store knows. Repeating an append with the same ``expected_version``, or
    a call with the same ids, is safe.

    ``rejected`` is ``True`` where a repeat would be refused as well, until a person
    changes something: a missing permission, a full disk, a file that was moved.
    """

    def __init__(
        self,
        store: str,
        reason: str,
        *,
        maybe_applied: bool = False,
        rejected: bool = False,
    ) -> None:
        super().__init__(store, reason)
        self.store = store
        self.reason = reason
        self.maybe_applied = maybe_applied
        self.rejected = rejected

    def __str__(self) -> str:
        outcome = (
            "the operation may have been applied"
            if self.maybe_applied
            else "nothing was written"
        )
        return f"{self.store}: {self.reason} ({outcome})"


class CorruptThread(CheckpointerError):
    """A stored row is not what was written. Nothing was repaired or overwritten.

    ``where`` names the row, or the file and line. ``thread_id`` is empty if the damage
    is in a file of many threads, such as a database or an export. If single calls are
    damaged, ``calls`` has the other calls of the same read.
    """

    def __init__(
        self,
        thread_id: str,
        where: str,
        reason: str,
        calls: Sequence[CallRecord] = (),
    ) -> None:
        super().__init__(thread_id, where, reason, calls)
        self.thread_id = thread_id
        self.where = where
        self.reason = reason
        self.calls = calls

    def __str__(self) -> str:
        if not self.thread_id:
            return f"{self.where} is corrupt: {self.reason}"

        return f"thread {self.thread_id!r} is corrupt at {self.where}: {self.reason}"


class KeyMissing(CheckpointerError):
    """The keyring lacks the key of an encrypted value; ``key_id`` names it.

    Open the store with the keyring that wrote the value. Nothing was written, unless
    the value is in the answer of a write, which has happened then.
    """

    def __init__(self, thread_id: str, where: str, key_id: str, fault: str) -> None:
        super().__init__(thread_id, where, key_id, fault)
        self.thread_id = thread_id
        self.where = where
        self.key_id = key_id
        self.fault = fault

    def __str__(self) -> str:
        return (
            f"thread {self.thread_id!r}, {self.where}: key {self.key_id!r} "
            f"{self.fault}; open the store with the keyring that wrote it"
        )


class SchemaMismatch(CheckpointerError):
    """The store has another schema version, or was not made by cpkit."""

    def __init__(self, store: str, found: object, supported: int) -> None:
        super().__init__(store, found, supported)
        self.store = store
        self.found = found
        self.supported = supported

    def __str__(self) -> str:
        if isinstance(self.found, int) and self.found > self.supported:
            return (
                f"{self.store} has schema version {self.found}, and this cpkit knows "
                f"{self.supported}: upgrade cpkit"
            )

        return (
            f"{self.store} does not have a schema that this cpkit knows "
            f"({self.found}): use another place, or the cpkit that made it"
        )
