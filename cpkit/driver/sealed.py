"""Encryption: a store whose values are sealed on the way in and opened on the way out.

A `SealedStore` stands between a `Handle` and any `Store`. Both are as without it: the
handle sees plain JSON, and the store keeps other JSON. A sealed value is::

    ["cpkit:1:<key id>:<wrapped data key>:<CRC-32>","<nonce, ciphertext, tag>","cpkit:"]

The first part is its *head*. The value is JSON, padded with spaces so that base64 has
no unused bits, and encrypted by AES-256-GCM with a random nonce of 96 bits. It is bound
to its place by associated data: the head, the keyring's name, the thread, the kind of
value, and the position of a message, the key of extra, or the id of a call, with its
key and tool (args) or its status (result).

The data key is in each head, wrapped by the keyring. So a value can be opened by
itself, and two processes that begin a thread at once make two data keys, which is fine.
For a head that an older key of the ring wrapped, extra can have a *record*: the same
data key under the newest key. ``cpkit rewrap`` adds records; the handle hides them.

A message is bound to its position, which only a fenced append knows. So an unfenced
append becomes one at the version that this handle knows. Where another writer came
first, the outcome is `Conflict`, and the handle appends again.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias, TypeVar
from zlib import crc32

from pydantic_core import CoreConfig, SchemaValidator, core_schema, to_json

from cpkit.driver.store import (
    Decode,
    Limits,
    Store,
    StoresDumps,
    StoresReceipts,
)
from cpkit.driver.writes import (
    Append,
    Claim,
    Conflict,
    Erase,
    EraseCalls,
    KeyHeld,
    Merge,
    Outcome,
    Resolve,
    Restore,
    Snapshot,
    StoredCall,
    StoredDump,
    StoreFailure,
    Trim,
    Write,
)
from cpkit.errors import CheckpointerError, CorruptThread, KeyMissing, PayloadTooLarge
from cpkit.keyring import Keyring, keyring_at
from cpkit.records import Durability, JsonValue

__all__ = ["SealedStore", "Seals", "is_sealed", "key_id_of", "record_key"]

T = TypeVar("T")

_Item: TypeAlias = "tuple[bytes | str, bytes | str]"

_START, _END = b'["cpkit:', b',"cpkit:"]'
_CUT = -len(_END)
_HEAD = re.compile(rb'\["cpkit:1:([\w.-]{1,64}):([\w=-]+):([0-9a-f]{8})"')
# The key in extra of a record, of which a part of the digest of the head is the name.
_RECORD = b'"cpkit:key:%b"'
_RECORDS = _RECORD[:-3]

# Bytes that no append has: an engine that takes so many has no limit.
_LARGE = 2**40
# Bytes that a head may have, and how much longer base64 is.
_HEAD_BYTES = 1024
# Seconds between two looks whether the file of a keyring has changed.
_LOOK_PAUSE = 1.0
# Threads, and data keys, that a handle remembers.
_REMEMBERED = 4096

# pydantic_core decodes base64 six times faster than the standard library.
_decode = SchemaValidator(
    core_schema.bytes_schema(strict=True), CoreConfig(val_json_bytes="base64")
).validate_json


class Seals(NamedTuple):
    """How a thread is sealed: how many of its values are, and how many are plain.

    ``records`` are to be merged into extra at this version: the data keys that an older
    key of the ring wrapped, under the newest key.
    """

    version: int
    records: dict[str, JsonValue]
    sealed: int
    plain: int


@dataclass(slots=True)
class _Thread:
    """What seals the next values of a thread, and the version as far as is known."""

    key_id: str
    head: bytes
    cipher: Any
    bound: bytes
    version: int = 0


class SealedStore:
    """A store that keeps no readable value.

    It has the optional abilities of the store behind it, except the search.
    """

    def __init__(self, store: Store, keyring: Keyring | str | os.PathLike[str]) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._store: Any = store
        is_place = isinstance(keyring, str | os.PathLike)
        self._place: Any = keyring if is_place else None
        self._ring: Any = keyring
        self._look_at = 0.0
        self._cipher_of: Callable[[bytes], Any] = AESGCM
        self._wrong: type[Exception] = InvalidTag
        self._threads: dict[str, _Thread] = {}
        self._ciphers: dict[bytes, Any] = {}  # by head
        self._records: dict[bytes, bytes] = {}  # the head of a record by its key
        self.max_writes = store.max_writes
        self.timeout = store.timeout
        self.locks_threads = store.locks_threads
        self.erases = store.erases
        self.trims = getattr(store, "trims", False)
        self.erases_calls = getattr(store, "erases_calls", False)

        # ``isinstance`` finds abilities on the instance too.
        for name in ("threads", "markers", "listen", "announce", "survives_by_default"):
            if hasattr(store, name):
                setattr(self, name, getattr(store, name))

        if isinstance(store, StoresReceipts):
            self.calls = self._calls

        if isinstance(store, StoresDumps):
            self.dump = self._dump

    @property
    def name(self) -> str:
        name: str = self._store.name
        return name

    @property
    def limits(self) -> Limits:
        value, append = self._store.limits
        return Limits((value - _HEAD_BYTES) * 3 // 4, append)

    async def open(self) -> None:
        if self._place is not None:
            self._ring = await asyncio.to_thread(keyring_at, self._place)

        self._reload = getattr(self._ring, "reload", None)
        await self._store.open()
        self._max_append = self._store.limits.max_append
        self._is_limited = self._max_append < _LARGE

    async def close(self) -> None:
        await self._store.close()

    def durability(self) -> Durability:
        found: Durability = self._store.durability()
        return found

    # Writes

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        if self._reload is not None and time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + _LOOK_PAUSE
            await asyncio.to_thread(self._reload)

        newest = self._ring.newest
        ends: dict[str, int] = {}
        sealed: list[Write] = []

        for write in batch:
            thread = self._threads.get(write.thread_id)

            if thread is None or thread.key_id != newest:
                thread = await self._thread(write)

            sealed.append(self._seal(write, thread, ends))

        outcomes = [*await self._store.commit(sealed)]

        for i, write in enumerate(batch):
            outcome = outcomes[i]

            if type(outcome) is int:
                if type(write) is Append and write.thread_id in self._threads:
                    self._threads[write.thread_id].version = outcome
            elif outcome is not None:
                outcomes[i] = await self._outcome(write, outcome)

        return outcomes

    async def _thread(self, write: Write) -> _Thread:
        """Return what seals the values of a thread: its newest key, or a new one.

        Reading the thread first shows a wrong keyring before anything is written.
        """
        thread_id = write.thread_id

        if type(write) in (Trim, Erase, EraseCalls, Restore):
            return self._begin(thread_id, 0)

        try:
            found = await self._store.snapshot(
                thread_id, -1, None, lambda rows, _: list(rows)
            )

            if found is None:
                return self._begin(thread_id, 0)

            args = [call.args for call in found.pending]
            values = [*found.messages, *(value for _, value in found.items), *args]
            self._learn(found.items)
            return self._adopt(thread_id, values, found.version)
        except StoreFailure as exc:
            raise StoreFailure("not sent", exc.reason) from exc

    def _adopt(
        self, thread_id: str, values: Sequence[bytes | str], version: int
    ) -> _Thread:
        """Go on with the key of a value, if the newest key of the ring wrapped it."""
        newest = self._ring.newest
        heads = [_head(_bytes(one)) for one in values if is_sealed(one)]

        for head in heads:
            try:
                cipher = self._cipher(head, thread_id, "its newest value")
            except CorruptThread:  # which whoever reads it hears of
                continue

            if key_id_of(head) == newest:
                return self._remember(thread_id, newest, head, cipher, version)

        return self._begin(thread_id, version)

    def _begin(self, thread_id: str, version: int) -> _Thread:
        """Make a data key for a thread."""
        data_key = os.urandom(32)
        key_id, head = self._wrapped(data_key)
        cipher = self._cipher_of(data_key)
        return self._remember(thread_id, key_id, head, cipher, version)

    def _remember(
        self, thread_id: str, key_id: str, head: bytes, cipher: Any, version: int
    ) -> _Thread:
        _make_room(self._threads)
        bound = self._bound(head, thread_id)
        thread = _Thread(key_id, head, cipher, bound, version)
        self._threads[thread_id] = thread
        return thread

    def _wrapped(self, data_key: bytes) -> tuple[str, bytes]:
        key_id, wrapped = self._ring.wrap(data_key)
        text = b'["cpkit:1:%b:%b' % (key_id.encode(), urlsafe_b64encode(wrapped))
        return key_id, b'%b:%08x"' % (text, crc32(text))

    def _bound(self, head: bytes, thread_id: str) -> bytes:
        # Neither names, ids nor the JSON of a key have a NUL.
        return b"%b\0%b\0%b\0" % (head, self._ring.name.encode(), thread_id.encode())

    def _seal(self, write: Write, thread: _Thread, ends: dict[str, int]) -> Write:
        """Return a write as the store gets it.

        ``ends`` has the versions of threads behind the writes of this batch.
        """
        thread_id = write.thread_id

        if type(write) is Append:
            bodies: list[bytes] = []
            items: Sequence[tuple[bytes, bytes]] = ()
            expected = write.expected_version

            if write.bodies:
                version = ends[thread_id] if thread_id in ends else thread.version
                expected = version if expected is None else expected
                end = expected

                for body in write.bodies:
                    place = b"%bm%d" % (thread.bound, end)
                    bodies += [self._sealed(thread, body, place)]
                    end += 1

                if expected == version:
                    ends[thread_id] = end

            if write.items:
                items = self._sealed_items(thread, write.items)

            if self._is_limited:
                self._check_size(bodies, items)

            return Append(thread_id, bodies, expected, items, write.size)

        if isinstance(write, Merge):
            items = self._sealed_items(thread, write.items)
            self._check_size((), items)
            return write._replace(items=items)

        if isinstance(write, Claim):
            sealed: Claim = self._sealed_args(thread, write, write.idempotency_key)
            return sealed

        if isinstance(write, Resolve):
            place = b"r%b\0%b" % (write.call_id.encode(), write.status.encode())
            result = self._sealed(thread, write.result, thread.bound + place)
            return write._replace(result=result)

        if isinstance(write, Restore):
            return self._sealed_thread(write, ends)

        if isinstance(write, Erase):
            # What comes after it is another thread, with a key of its own.
            self._begin(thread_id, 0)
            ends[thread_id] = 0

        return write

    def _sealed(self, thread: _Thread, value: bytes, place: bytes) -> bytes:
        nonce = os.urandom(12)
        padded = value + b"  "[: (2 - len(value)) % 3]
        sealed = nonce + thread.cipher.encrypt(nonce, padded, place)
        return b"%b,%b%b" % (thread.head, to_json(sealed, bytes_mode="base64"), _END)

    def _sealed_items(
        self, thread: _Thread, items: Iterable[tuple[bytes, bytes]]
    ) -> list[tuple[bytes, bytes]]:
        place = thread.bound + b"x"
        return [
            (key, value)
            if _is_record(key, value)
            else (key, self._sealed(thread, value, place + key))
            for key, value in items
        ]

    def _sealed_args(self, thread: _Thread, call: Any, key: str) -> Any:
        """Seal the args of a claim or a stored call; hash its key if keys are hashed.

        The key goes with the args then, so that a record can show it.
        """
        args = _bytes(call.args)
        hashed = self._hashed(key)

        if hashed != key:
            args = b"%b\0%b" % (key.encode(), args)

        place = _args_place(call.call_id, hashed, call.tool_name)
        sealed = self._sealed(thread, args, thread.bound + place)
        return call._replace(args=sealed, idempotency_key=hashed)

    def _sealed_thread(self, write: Restore, ends: dict[str, int]) -> Restore:
        end = write.first + len(write.bodies)
        thread = self._begin(write.thread_id, end)
        ends[write.thread_id] = end
        calls = []

        for call in write.calls:
            if call.erased:
                hashed = self._hashed(call.idempotency_key)
                calls.append(call._replace(idempotency_key=hashed))
                continue

            sealed = self._sealed_args(thread, call, call.idempotency_key)

            if call.result is not None:
                place = b"r%b\0%b" % (call.call_id.encode(), call.status.encode())
                text = self._sealed(thread, _bytes(call.result), thread.bound + place)
                sealed = sealed._replace(result=text)

            calls.append(sealed)

        bodies = [
            self._sealed(thread, _bytes(body), b"%bm%d" % (thread.bound, position))
            for position, body in enumerate(write.bodies, write.first)
        ]
        items = self._sealed_items(thread, write.items)
        self._check_size(bodies, items)
        return write._replace(bodies=bodies, items=items, calls=calls)

    def _check_size(
        self, bodies: Sequence[bytes], items: Sequence[tuple[bytes, bytes]]
    ) -> None:
        size = sum(map(len, bodies)) + sum(len(key) + len(one) for key, one in items)

        if size > self._max_append:
            raise PayloadTooLarge(("messages",), size, self._max_append, "max_append")

    def _hashed(self, key: str) -> str:
        """Return what the store gets for an idempotency key."""
        return key if key.startswith("cpkit:hash:") else self._ring.hashed(key) or key

    async def _outcome(self, write: Write, outcome: Outcome) -> Any:
        """Return an outcome as the handle gets it; an error is that of one write."""
        if isinstance(outcome, Conflict):
            self._threads.pop(write.thread_id, None)
            return outcome

        if isinstance(outcome, KeyHeld) and isinstance(write, Restore):
            keys = {self._hashed(one.idempotency_key): one for one in write.calls}
            found = keys.get(outcome.idempotency_key)
            return (
                outcome._replace(idempotency_key=found.idempotency_key)
                if found
                else outcome
            )

        if isinstance(outcome, StoredCall):
            key = write.idempotency_key if isinstance(write, Claim) else None

            try:
                return await self._opened_call(outcome, key)
            except CheckpointerError as exc:
                return exc
            except StoreFailure as exc:  # the write may have been applied
                return StoreFailure("unknown", exc.reason)

        return outcome

    # Reads

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        newest: list[bytes] = []

        def opened(rows: Iterable[bytes | str], first: int) -> list[Any]:
            return decode(self._messages(rows, thread_id, first, newest), first)

        async def read() -> Snapshot | None:
            found: Snapshot | None = await self._store.snapshot(
                thread_id, start, stop, opened
            )

            if found is None:
                return None

            items = self._items(found.items, thread_id)
            pending = [self._call(call) for call in found.pending]
            return found._replace(items=items, pending=pending)

        found = await self._retried(thread_id, read)

        if found is not None:
            if thread := self._threads.get(thread_id):
                thread.version = max(thread.version, found.version)
            elif newest:
                self._adopt(thread_id, newest, found.version)

        return found

    async def holder(self, key: str) -> StoredCall | None:
        found: StoredCall | None = await self._store.holder(self._hashed(key))
        return None if found is None else await self._opened_call(found, key)

    async def _calls(self, thread_id: str) -> list[StoredCall]:
        async def read() -> list[StoredCall]:
            return [self._call(one) for one in await self._store.calls(thread_id)]

        return await self._retried(thread_id, read)

    async def _dump(self, thread_id: str) -> StoredDump | None:
        async def read() -> StoredDump | None:
            found: StoredDump | None = await self._store.dump(thread_id)

            if found is None:
                return None

            bodies = list(self._messages(found.bodies, thread_id, found.first, []))
            items = self._items(found.items, thread_id)
            calls = [self._call(one) for one in found.calls]
            return found._replace(bodies=bodies, items=items, calls=calls)

        return await self._retried(thread_id, read)

    async def _retried(self, thread_id: str, read: Callable[[], Awaitable[T]]) -> T:
        """Read; where a key is not in the ring any more, learn the records first."""
        try:
            return await read()
        except KeyMissing:
            found = await self._store.snapshot(thread_id, 0, 0, lambda rows, _: [*rows])
            self._learn(() if found is None else found.items)

            if self._reload is not None:
                await asyncio.to_thread(self._reload)

        return await read()

    async def _opened_call(self, stored: StoredCall, key: str | None) -> StoredCall:
        async def read() -> StoredCall:
            return self._call(stored, key)

        return await self._retried(stored.thread_id, read)

    def _learn(self, items: Iterable[_Item]) -> None:
        """Note the records among the items of extra."""
        records = {
            _bytes(key): _bytes(value)[:-1]
            for key, value in items
            if _is_record(_bytes(key), _bytes(value))
        }

        for key, head in records.items():
            _make_room(self._records)
            self._records[key] = head

    def _messages(
        self,
        rows: Iterable[bytes | str],
        thread_id: str,
        first: int,
        newest: list[bytes],
    ) -> Iterator[bytes]:
        """Yield messages as they were appended; ``newest`` gets the last of them."""
        known: bytes | None = None
        row = b""
        wrong = self._wrong

        for position, stored in enumerate(rows, first):
            row = stored if type(stored) is bytes else _bytes(stored)
            head, _, text = row.partition(b",")

            if head != known:
                if not is_sealed(row):
                    if known is not None or self._ring.sealed_only:
                        fault = "it is not encrypted"
                        raise CorruptThread(thread_id, f"message {position}", fault)

                    yield row
                    continue

                cipher = self._cipher(head, thread_id, f"message {position}")
                bound = self._bound(head, thread_id)
                known = head

            try:
                data = _decode(text[:_CUT])
                place = b"%bm%d" % (bound, position)
                body = cipher.decrypt(data[:12], data[12:], place)
            except (ValueError, wrong):
                body = None

            if body is None or text[_CUT:] != _END:
                raise _corrupt(thread_id, f"message {position}")

            yield body

        newest[:] = [row] if known is not None else []

    def _items(self, items: Iterable[_Item], thread_id: str) -> list[Any]:
        self._learn(items)
        found = []

        for given, value in items:
            key = _bytes(given)

            if not _is_record(key, _bytes(value)):
                where = f"extra key {key.decode()}"
                text = self._opened(value, thread_id, b"x" + key, where)
                found.append((key, text))

        return found

    def _call(self, stored: StoredCall, key: str | None = None) -> StoredCall:
        """Return a stored call as it was claimed and resolved.

        ``key`` is what was asked for: of an erased call only the hash is left.
        """
        hashed = stored.idempotency_key

        if stored.erased:
            if key is not None and self._hashed(key) == hashed:
                return stored._replace(idempotency_key=key)

            return stored

        thread_id, call_id = stored.thread_id, stored.call_id
        where = f"call {call_id!r}"
        place = _args_place(call_id, hashed, stored.tool_name)
        args = self._opened(stored.args, thread_id, place, where)
        shown, separator, rest = args.partition(b"\0")

        if separator:
            stored = stored._replace(idempotency_key=shown.decode())
            args = rest

        result = stored.result

        if result is not None:
            place = b"r%b\0%b" % (call_id.encode(), stored.status.encode())
            result = self._opened(result, thread_id, place, where)

        return stored._replace(args=args, result=result)

    def _opened(
        self, value: bytes | str, thread_id: str, place: bytes, where: str
    ) -> bytes:
        """Return the JSON in a value of extra or of a call."""
        value = _bytes(value)

        if not is_sealed(value):
            if self._ring.sealed_only:
                raise CorruptThread(thread_id, where, "it is not encrypted")

            return value

        head, _, text = value.partition(b",")
        cipher = self._cipher(head, thread_id, where)

        try:
            data = _decode(text.removesuffix(_END))
            place = self._bound(head, thread_id) + place
            opened: bytes = cipher.decrypt(data[:12], data[12:], place)
        except (ValueError, self._wrong):
            raise _corrupt(thread_id, where) from None

        return opened

    def _cipher(self, head: bytes, thread_id: str, where: str) -> Any:
        """Return the cipher of a head.

        Raises ``KeyMissing`` if neither the ring nor a record has its key.
        """
        if (known := self._ciphers.get(head)) is not None:
            return known

        cipher = self._cipher_of(self._data_key(head, thread_id, where))
        _make_room(self._ciphers)
        self._ciphers[head] = cipher
        return cipher

    def _data_key(self, head: bytes, thread_id: str, where: str) -> bytes:
        try:
            return self._unwrapped(head, thread_id, where)
        except KeyMissing:
            if (record := self._records.get(record_key(head))) is None:
                raise

        return self._unwrapped(record, thread_id, where)

    def _unwrapped(self, head: bytes, thread_id: str, where: str) -> bytes:
        key_id, wrapped = _parts(head, thread_id, where)

        try:
            data_key: bytes = self._ring.unwrap(key_id, wrapped)
            return data_key
        except KeyError:
            fault = "is not in the keyring"
        except ValueError:
            fault = "of the keyring is not the one that wrapped the value's data key"

        raise KeyMissing(thread_id, where, key_id, fault)

    # For people

    async def examine(self, thread_id: str, start: int = 0) -> Seals:
        """Return how the values of a thread are sealed; messages from ``start`` on."""
        found = await self._store.snapshot(
            thread_id, start, None, lambda rows, _: [_looked_at(row) for row in rows]
        )

        if found is None:
            return Seals(0, {}, 0, 0)

        self._learn(found.items)
        items = {_bytes(key): _bytes(value) for key, value in found.items}
        records = {k: v for k, v in items.items() if _is_record(k, v)}
        values = [value for key, value in items.items() if key not in records]
        calls = await self._store.calls(thread_id) if hasattr(self, "calls") else []
        values += [_bytes(one.args) for one in calls if not one.erased]
        values += [_bytes(one.result) for one in calls if one.result is not None]
        heads = [*found.messages, *map(_looked_at, values)]
        newest = self._ring.newest
        missing: dict[str, JsonValue] = {}

        for head in dict.fromkeys(heads):
            if head is None or key_id_of(head) == newest:
                continue

            if key_id_of(records.get(key := record_key(head), b"")) != newest:
                data_key = self._data_key(head, thread_id, "one of its values")
                _, record = self._wrapped(data_key)
                missing[key[1:-1].decode()] = [record[2:-1].decode()]

        plain = heads.count(None)
        return Seals(found.version, missing, len(heads) - plain, plain)


def is_sealed(value: bytes | str) -> bool:
    """Tell whether a stored value is sealed.

    Start and end are alike in no plain value, so one changed byte hides neither.
    """
    value = _bytes(value)
    return value.startswith(_START) or value.endswith(_END)


def key_id_of(head: bytes) -> str | None:
    """Return the id of the key that wrapped the data key of a head."""
    found = _HEAD.match(head)
    return None if found is None else found[1].decode()


def record_key(head: bytes) -> bytes:
    """Return the key in extra of the record of a head."""
    return _RECORD % sha256(head).hexdigest()[:32].encode()


def _is_record(key: bytes, value: bytes) -> bool:
    """Tell whether an item of extra is a record, which is stored as it is."""
    return key.startswith(_RECORDS) and value.startswith(_START) and b"," not in value


def _looked_at(value: bytes | str) -> bytes | None:
    """Return the head of a value; ``None`` for a plain one."""
    return _head(_bytes(value)) if is_sealed(value) else None


def _head(value: bytes) -> bytes:
    return value.partition(b",")[0]


def _parts(head: bytes, thread_id: str, where: str) -> tuple[str, bytes]:
    """Return the key's id and the wrapped data key of a head that is not damaged."""
    found = _HEAD.fullmatch(head)

    if found is None or crc32(head[:-10]) != int(found[3], 16):
        raise CorruptThread(thread_id, where, "the head of the sealed value is damaged")

    try:
        return found[1].decode(), urlsafe_b64decode(found[2])
    except ValueError:
        raise _corrupt(thread_id, where) from None


def _args_place(call_id: str, key: str, tool_name: str) -> bytes:
    return b"a%b\0%b\0%b" % (call_id.encode(), key.encode(), tool_name.encode())


def _corrupt(thread_id: str, where: str) -> CorruptThread:
    fault = "not the value that was sealed for this place: changed, moved or exchanged"
    return CorruptThread(thread_id, where, fault)


def _bytes(value: bytes | str) -> bytes:
    return value if type(value) is bytes else bytes(value, "utf-8")  # type: ignore[arg-type]  # a str


def _make_room(known: dict[Any, Any]) -> None:
    """Forget the oldest entry of a full dictionary."""
    if len(known) >= _REMEMBERED:
        del known[next(iter(known))]
