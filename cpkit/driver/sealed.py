"""Encryption: a store whose values are sealed on the way in and opened on the way out.

A `SealedStore` stands between a `Handle` and any `Store`. Both are as without it: the
handle sees plain JSON, and the store keeps other JSON, in the form that
`cpkit.driver.seal` describes.

A message is bound to its position, which only a fenced append knows. So an unfenced
append becomes one at the version that this handle knows. Where another writer came
first, the outcome is `Conflict`, and the handle appends again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

from cpkit.driver.codec import Codec
from cpkit.driver.seal import (
    CUT,
    END,
    MARK,
    DataKey,
    Item,
    Sealer,
    as_bytes,
    decode_text,
    head_of,
    is_record,
    is_sealed,
    key_id_of,
    make_room,
)
from cpkit.driver.store import (
    Decode,
    Limits,
    Store,
    StoresDumps,
    StoresReceipts,
    limits_of,
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
from cpkit.records import Durability

__all__ = ["HASH_THREAD", "SealedStore", "args_place", "extra_key", "result_place"]

T = TypeVar("T")

HASH_THREAD = "cpkit:keyring"
"""The thread, and the key, of the one call that tells a store's hash key."""

_CODEC: Codec[Any] = Codec(Any)

# Bytes that a head may have, and how much longer base64 is.
_HEAD_BYTES = 1024
# Seconds between two looks whether the file of a keyring has changed.
_LOOK_PAUSE = 1.0
# Seconds for which a data key is taken to be that of the thread. Another process may
# delete the thread, and so destroy the key, which a writer should not go on with.
_KNOWN_FOR = 60.0
# Messages that are opened in one step.
_AT_ONCE = 256


class SealedStore(Sealer):
    """A store that keeps no readable value.

    It has the optional abilities of the store behind it, except the search.
    """

    def __init__(self, store: Store, keyring: Keyring | str | os.PathLike[str]) -> None:
        super().__init__(keyring)
        self._store: Any = store
        is_place = isinstance(keyring, str | os.PathLike)
        self._place: Any = keyring if is_place else None
        self._look_at = 0.0
        self._threads: dict[str, DataKey] = {}
        self.max_writes = store.max_writes
        self.timeout = store.timeout
        self.locks_threads = store.locks_threads
        self.erases = getattr(store, "erases", False)
        self.trims = getattr(store, "trims", False)
        self.erases_calls = getattr(store, "erases_calls", False)
        takes_bytes = getattr(store, "takes_bytes", False)
        self._sealed_body = self._sealed_bytes if takes_bytes else self._sealed

        # ``isinstance`` finds abilities on the instance too.
        for name in ("threads", "markers", "listen", "announce", "survives_by_default"):
            if hasattr(store, name):
                setattr(self, name, getattr(store, name))

        if isinstance(store, StoresReceipts):
            self.calls = self._calls

        if isinstance(store, StoresDumps):
            self.dump = self._dump

    @property
    def keyring(self) -> Keyring:
        ring: Keyring = self._ring
        return ring

    @property
    def name(self) -> str:
        name: str = self._store.name
        return name

    @property
    def limits(self) -> Limits:
        value, append = limits_of(self._store)
        return Limits((value - _HEAD_BYTES) * 3 // 4, append)

    async def open(self) -> None:
        if self._place is not None:
            self._ring = await asyncio.to_thread(keyring_at, self._place)

        self._reload = getattr(self._ring, "reload", None)
        await self._store.open()
        self._max_append = limits_of(self._store).max_append

    async def close(self) -> None:
        await self._store.close()

    def durability(self) -> Durability:
        found: Durability = self._store.durability()
        return found

    # Writes

    async def commit(self, batch: Sequence[Write]) -> Sequence[Outcome]:
        now = time.monotonic()

        if self._reload is not None and now > self._look_at:
            self._look_at = now + _LOOK_PAUSE
            await asyncio.to_thread(self._reload)

        newest = self._ring.newest
        ends: dict[str, int] = {}
        sealed: list[Write] = []

        for write in batch:
            thread = self._threads.get(write.thread_id)

            if thread is None or thread.key_id != newest or thread.until < now:
                thread = await self._thread(write)

            sealed += [self._seal(write, thread, ends)]

        try:
            outcomes = [*await self._store.commit(sealed)]
        except BaseException:
            for write in batch:
                self._threads.pop(write.thread_id, None)

            raise

        for i, write in enumerate(batch):
            outcome = outcomes[i]

            if type(outcome) is int:
                if type(write) is Append and write.thread_id in self._threads:
                    self._threads[write.thread_id].version = outcome
            elif outcome is not None:
                outcomes[i] = await self._outcome(write, outcome)

        return outcomes

    async def _thread(self, write: Write) -> DataKey:
        """Return what seals the values of a thread: its newest key, or a new one.

        Reading the thread first shows a wrong keyring before anything is written.
        """
        thread_id = write.thread_id

        if type(write) in (Trim, Erase, EraseCalls, Restore):
            return self._new(thread_id, 0)

        self._threads.pop(thread_id, None)

        try:
            found = await self.snapshot(thread_id, -1, None, lambda rows, _: [*rows])

            if (
                found is not None
                and not (found.messages or found.items or found.pending)
                and hasattr(self, "calls")
            ):
                heads: list[bytes] = []
                await self._calls(thread_id, heads)
                self._adopt(thread_id, heads, found.version)
        except CorruptThread:  # which a reader hears of
            found = await self._store.snapshot(thread_id, 0, 0, lambda rows, _: [*rows])
        except StoreFailure as exc:
            raise StoreFailure("not sent", exc.reason) from exc

        version = 0 if found is None else found.version
        return self._threads.get(thread_id) or self._begin(thread_id, version)

    def _adopt(self, thread_id: str, heads: Iterable[bytes], version: int) -> None:
        """Go on with the data key of a value that was read, unless it is an old one."""
        newest = self._ring.newest

        for head in heads:
            if key_id_of(head) == newest:
                cipher = self._cipher(head, thread_id, "its newest value")
                thread = DataKey(newest, head, cipher, self._bound(head, thread_id))
                thread.version = version
                self._remember(thread_id, thread)
                return

    def _begin(self, thread_id: str, version: int) -> DataKey:
        """Make a data key for a thread, and remember it."""
        thread = self._new(thread_id, version)
        self._remember(thread_id, thread)
        return thread

    def _remember(self, thread_id: str, thread: DataKey) -> None:
        make_room(self._threads)
        thread.until = time.monotonic() + _KNOWN_FOR
        self._threads[thread_id] = thread

    def _seal(self, write: Write, thread: DataKey, ends: dict[str, int]) -> Write:
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
                    bodies += [self._sealed_body(thread, body, place)]
                    end += 1

                if expected == version:
                    ends[thread_id] = end

            if write.items:
                items = self._sealed_items(thread, write.items)

            # Sealed, a message of a kilobyte or more is at most twice as long.
            if items or bodies[1:] or write.size > self._max_append // 2 - _HEAD_BYTES:
                self._check_size(bodies, items)

            return Append(thread_id, bodies, expected, items, write.size)

        if isinstance(write, Merge):
            items = self._sealed_items(thread, write.items)
            self._check_size((), items)
            return write._replace(items=items)

        if isinstance(write, Claim):
            sealed: Claim = self._sealed_args(thread, write)
            return sealed

        if isinstance(write, Resolve):
            place = result_place(write.call_id, write.status)
            result = self._sealed(thread, write.result, thread.bound + place)
            return write._replace(result=result)

        if isinstance(write, Restore):
            return self._sealed_thread(write, ends)

        if isinstance(write, Erase):
            # What comes after it is another thread, with a key of its own.
            self._begin(thread_id, 0)
            ends[thread_id] = 0

        return write

    def _sealed_items(
        self, thread: DataKey, items: Iterable[tuple[bytes, bytes]]
    ) -> list[tuple[bytes, bytes]]:
        place = thread.bound + b"x"
        return [
            (key, value)
            if is_record(key, value)
            else (key, self._sealed(thread, value, place + key))
            for key, value in items
        ]

    def _sealed_args(self, thread: DataKey, call: Any) -> Any:
        """Seal the args of a claim or a stored call, and hash its key if keys are."""
        hashed = self._hashed(call.idempotency_key)
        place = args_place(call.call_id, hashed, call.tool_name)
        sealed = self._sealed(thread, as_bytes(call.args), thread.bound + place)
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

            sealed = self._sealed_args(thread, call)

            if call.result is not None:
                place = result_place(call.call_id, call.status)
                text = self._sealed(thread, as_bytes(call.result), thread.bound + place)
                sealed = sealed._replace(result=text)

            calls.append(sealed)

        bodies = [
            self._sealed_body(
                thread, as_bytes(body), b"%bm%d" % (thread.bound, position)
            )
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
        return self._ring.hashed(key) or key

    async def _outcome(self, write: Write, outcome: Outcome) -> Any:
        """Return an outcome as the handle gets it; an error is that of one write."""
        if isinstance(outcome, Conflict):
            self._threads.pop(write.thread_id, None)
            return outcome

        if isinstance(outcome, KeyHeld):
            key = self._ring.unhashed(outcome.idempotency_key)
            return outcome._replace(idempotency_key=key)

        if isinstance(outcome, StoredCall):
            is_same = outcome[:2] == (write.thread_id, getattr(write, "call_id", None))

            if isinstance(write, Claim):
                hashed = self._hashed(write.idempotency_key)
                is_same = is_same or outcome.idempotency_key == hashed

            try:
                _check_asked(is_same, outcome)
                return await self._opened_call(outcome)
            except CheckpointerError as exc:
                return exc
            except StoreFailure as exc:  # the write may have been applied
                return StoreFailure("unknown", exc.reason)

        return outcome

    # Reads

    async def snapshot(
        self, thread_id: str, start: int, stop: int | None, decode: Decode
    ) -> Snapshot | None:
        heads: list[bytes] = []

        def opened(rows: Iterable[bytes | str], first: int) -> list[Any]:
            return decode(self._messages(rows, thread_id, first, heads), first)

        async def read() -> Snapshot | None:
            found: Snapshot | None = await self._store.snapshot(
                thread_id, start, stop, opened
            )

            if found is None:
                return None

            values = [value for _, value in found.items]
            values += [call.args for call in found.pending]

            if not values:
                return found

            heads.extend([head_of(as_bytes(one)) for one in values])
            items = self._items(found.items, thread_id)
            pending = self._opened_calls(found.pending, thread_id)
            return found._replace(items=items, pending=pending)

        found = await self._retried(thread_id, read)

        thread = self._threads.get(thread_id)

        if found is None:
            self._threads.pop(thread_id, None)
        elif thread is None:
            self._adopt(thread_id, heads, found.version)
        else:
            thread.version = max(thread.version, found.version)

            if thread.head in heads:
                thread.until = time.monotonic() + _KNOWN_FOR

        return found

    async def holder(self, key: str) -> StoredCall | None:
        hashed = self._hashed(key)
        found: StoredCall | None = await self._store.holder(hashed)

        if found is None:
            return None

        _check_asked(found.idempotency_key == hashed, found)
        return await self._opened_call(found)

    async def _calls(
        self, thread_id: str, heads: list[bytes] | None = None
    ) -> list[StoredCall]:
        """Return the calls of a thread; ``heads`` gets the heads of their args."""

        async def read() -> list[StoredCall]:
            stored = await self._store.calls(thread_id)
            opened = self._opened_calls(stored, thread_id)

            if heads is not None:
                heads[:] = [head_of(as_bytes(one.args)) for one in stored]

            return opened

        return await self._retried(thread_id, read)

    async def _dump(self, thread_id: str) -> StoredDump | None:
        async def read() -> StoredDump | None:
            found: StoredDump | None = await self._store.dump(thread_id)

            if found is None:
                return None

            bodies = list(self._messages(found.bodies, thread_id, found.first, []))
            items = self._items(found.items, thread_id)
            calls = self._opened_calls(found.calls, thread_id)
            return found._replace(bodies=bodies, items=items, calls=calls)

        return await self._retried(thread_id, read)

    async def _retried(self, thread_id: str, read: Callable[[], Awaitable[T]]) -> T:
        """Read; where a key is not in the ring any more, learn the records first."""
        try:
            return await read()
        except KeyMissing:
            found = await self._store.snapshot(thread_id, 0, 0, lambda rows, _: [*rows])
            self._learn(() if found is None else found.items, thread_id)

            if self._reload is not None:
                await asyncio.to_thread(self._reload)

        return await read()

    async def _opened_call(self, stored: StoredCall) -> StoredCall:
        async def read() -> StoredCall:
            return self._call(stored)

        return await self._retried(stored.thread_id, read)

    def _messages(
        self,
        rows: Iterable[bytes | str],
        thread_id: str,
        first: int,
        heads: list[bytes],
    ) -> Iterator[bytes]:
        """Yield messages as they were appended; ``heads`` gets the head of the last."""
        parts = self._parts(iter(rows), thread_id, first, heads)
        return chain.from_iterable(parts)

    def _parts(
        self, rows: Iterator[Any], thread_id: str, position: int, heads: list[bytes]
    ) -> Iterator[list[bytes]]:
        """Yield lists of messages; no function of Python is called for each of them."""
        is_encrypted = self._ring.sealed_only

        while some := list(islice(rows, _AT_ONCE)):
            if type(some[0]) is str:
                some = [row.encode() for row in some]

            opened = self._opened_alike(some, thread_id, position)

            if opened is None:
                opened = []

                for i, row in enumerate(some, position):
                    if is_encrypted and not is_sealed(row):
                        fault = "it is not encrypted"
                        raise CorruptThread(thread_id, f"message {i}", fault)

                    is_encrypted = is_encrypted or is_sealed(row)
                    place, where = b"m%d" % i, f"message {i}"
                    opened.append(self._opened(row, thread_id, place, where))

            is_encrypted = is_encrypted or is_sealed(some[-1])
            position += len(some)
            heads[:] = [head_of(some[-1])] if is_encrypted else []
            yield opened

    def _opened_alike(
        self, rows: list[bytes], thread_id: str, position: int
    ) -> list[bytes] | None:
        """Open messages of one head; ``None`` if one of them needs a closer look."""
        head = head_of(rows[0])
        start = len(head) + 1
        is_text = rows[0][start : start + 1] == b'"'
        begins = head + (b',"-_-_' if is_text else b"," + MARK)
        cut = len(begins)

        if not (
            is_sealed(rows[0])
            and [row[:cut] for row in rows].count(begins) == len(rows)
            and [row[CUT:] for row in rows].count(END) == len(rows)
        ):
            return None

        decrypt = self._cipher(head, thread_id, f"message {position}").decrypt
        bound = self._bound(head, thread_id) + b"m"
        stop: int | None = CUT

        try:
            if is_text:
                rows = [*map(decode_text, [row[start:CUT] for row in rows])]
                cut, stop = len(MARK), None

            text = cut + 12
            return [
                decrypt(row[cut:text], row[text:stop], bound + b"%d" % i)
                for i, row in enumerate(rows, position)
            ]
        except (ValueError, self._wrong):
            return None

    def _items(self, items: Iterable[Item], thread_id: str) -> list[Any]:
        self._learn(items, thread_id)
        found = []

        for given, value in items:
            key = as_bytes(given)

            if not is_record(key, as_bytes(value)):
                text = self._opened(value, thread_id, b"x" + key, extra_key(key))
                found.append((key, text))

        return found

    def _opened_calls(
        self, stored: Sequence[StoredCall], thread_id: str
    ) -> list[StoredCall]:
        """Open calls of a thread; ``CorruptThread`` of one of them has the others."""
        opened: list[StoredCall] = []
        damage: CorruptThread | None = None

        for one in stored:
            try:
                _check_asked(one.thread_id == thread_id, one)
                opened.append(self._call(one))
            except CorruptThread as exc:
                damage = damage or exc

        if damage is not None:
            damage.calls = _CODEC.records(opened)
            raise damage

        return opened

    def _call(self, stored: StoredCall) -> StoredCall:
        """Return a stored call as it was claimed and resolved."""
        thread_id, call_id = stored.thread_id, stored.call_id
        where = f"call {call_id!r}"
        has_result = stored.result is not None
        is_whole = has_result == (stored.status != "issued")

        if stored.erased:
            is_whole = as_bytes(stored.args) == b"{}" and not has_result

        if not is_whole:
            fault = "args and result are not those of its status"
            raise CorruptThread(thread_id, where, fault)

        try:
            key = self._ring.unhashed(stored.idempotency_key)
        except ValueError:
            raise CorruptThread(thread_id, where, "its key is damaged") from None

        # A copy would hash what an attacker has added.
        is_hashed = self._hashed(key) == stored.idempotency_key

        if self._ring.sealed_only and not is_hashed and thread_id != HASH_THREAD:
            raise CorruptThread(thread_id, where, "its key is not hashed")

        if stored.erased:
            return stored._replace(idempotency_key=key)

        place = args_place(call_id, stored.idempotency_key, stored.tool_name)
        args = self._opened(stored.args, thread_id, place, where)
        result = stored.result

        if result is not None:
            place = result_place(call_id, stored.status)
            result = self._opened(result, thread_id, place, where)

        return stored._replace(args=args, result=result, idempotency_key=key)


def _check_asked(is_asked: bool, stored: StoredCall) -> None:
    """Refuse a call of another thread, id or key than the store was asked for."""
    if not is_asked:
        where = f"call {stored.call_id!r}"
        raise CorruptThread(stored.thread_id, where, "it is not the call in this place")


def args_place(call_id: str, key: str, tool_name: str) -> bytes:
    return b"a%b\0%b\0%b" % (call_id.encode(), key.encode(), tool_name.encode())


def result_place(call_id: str, status: str) -> bytes:
    return b"r%b\0%b" % (call_id.encode(), status.encode())


def extra_key(key: bytes) -> str:
    return f"extra key {key.decode(errors='backslashreplace')}"
