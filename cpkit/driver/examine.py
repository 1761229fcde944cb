"""How the values of a thread are sealed: what `rewrap` and ``cpkit doctor`` ask."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from cpkit.driver.seal import (
    Item,
    as_bytes,
    head_if_sealed,
    is_record,
    key_id_of,
    record_key,
)
from cpkit.driver.sealed import SealedStore, args_place, extra_key, result_place
from cpkit.errors import CorruptThread, KeyMissing

__all__ = ["Seals", "examine"]


class Seals(NamedTuple):
    """How a thread is sealed: how many of its values are, and how many are plain.

    ``records`` are to be merged into extra at this version: the data keys that an older
    key of the ring wrapped, under the newest key. ``faults`` says where values are that
    do not open, if no other value has the same data key. ``key_ids`` are those of the
    keys that wrapped the data keys of the values.
    """

    version: int
    records: list[tuple[bytes, bytes]]
    sealed: int
    plain: int
    faults: list[CorruptThread | KeyMissing]
    key_ids: set[str]


async def examine(cp: Any, thread_id: str, start: int = 0) -> Seals:
    """Return how the values of a thread are sealed; messages from ``start`` on.

    ``cp`` is a handle with a keyring; its errors are those of its reads. A data key of
    an older key of the ring gets a record only if a value opens in its place with it.
    Otherwise a value of a deleted thread that was put into another one would keep its
    data key alive.
    """
    seals: Seals = await cp._calls.read(_examine, cp.store, thread_id, start)
    return seals


async def _examine(store: SealedStore, thread_id: str, start: int) -> Seals:
    if store._reload is not None:
        await asyncio.to_thread(store._reload)

    look = _Look(store, thread_id)
    # The records first: messages may need them.
    found = await store._store.snapshot(thread_id, 0, 0, look.messages)

    if found is not None:
        store._learn(found.items, thread_id)
        found = await store._store.snapshot(thread_id, start, None, look.messages)

    if found is None:
        return Seals(0, [], 0, 0, [], set())

    for given, value in found.items:
        if not is_record(key := as_bytes(given), as_bytes(value)):
            look.value(value, b"x" + key, extra_key(key))

    calls = await store._store.calls(thread_id) if hasattr(store, "calls") else ()

    for call in calls:
        where = f"call {call.call_id!r}"

        if not call.erased:
            place = args_place(call.call_id, call.idempotency_key, call.tool_name)
            look.value(call.args, place, where)

        if call.result is not None:
            look.value(call.result, result_place(call.call_id, call.status), where)

    plain = look.counts.pop(None, 0)
    ids = {one for head in look.counts if (one := key_id_of(head or b"")) is not None}
    faults = [one for one in look.faults.values() if one is not None]
    records = look.missing_records(found.items)
    return Seals(found.version, records, look.counts.total(), plain, faults, ids)


class _Look:
    """Looks at the values of a thread, and opens one of each head of an older key."""

    def __init__(self, store: SealedStore, thread_id: str) -> None:
        self._store = store
        self._thread_id = thread_id
        self._newest = store.keyring.newest
        # For each head, and for the plain values: how many values, and what is wrong.
        self.counts: Counter[bytes | None] = Counter()
        self.faults: dict[bytes, CorruptThread | KeyMissing | None] = {}

    def value(self, value: bytes | str, place: bytes, where: str) -> None:
        head = head_if_sealed(value)
        self.counts[head] += 1

        if head is None or key_id_of(head) == self._newest:
            return

        if self.faults.get(head, head) is not None:
            try:
                self._store._opened(value, self._thread_id, place, where)
                self.faults[head] = None
            except (CorruptThread, KeyMissing) as exc:
                self.faults[head] = exc

    def messages(self, rows: Iterable[bytes | str], first: int) -> list[int]:
        seen = 0

        for seen, row in enumerate(rows, 1):
            position = first + seen - 1
            self.value(row, b"m%d" % position, f"message {position}")

        return [0] * seen  # a store counts what it gets back

    def missing_records(self, items: Iterable[Item]) -> list[tuple[bytes, bytes]]:
        store, thread_id, missing = self._store, self._thread_id, []
        present = {as_bytes(key): as_bytes(value) for key, value in items}

        for head, fault in self.faults.items():
            key = record_key(head)

            if fault is None and key_id_of(present.get(key, b"")[:-1]) != self._newest:
                data_key = store._data_key(head, thread_id, "one of its values")
                _, record = store._wrapped(data_key, thread_id, head)
                missing.append((key, record + b"]"))

        return missing
