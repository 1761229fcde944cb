"""A view over an ordered key-value engine, and the engine that handles share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import pytest

from cpkit import (
    BackendUnavailable,
    Durability,
    ListsThreads,
    SchemaMismatch,
    SerializationError,
    Survives,
)
from cpkit.driver import (
    DriverOptions,
    KeyValueStore,
    StoreFailure,
    View,
    handle_over,
)

T = TypeVar("T")


def _view(rows: dict[bytes, bytes]) -> View:
    def stored(first: bytes) -> Iterable[tuple[bytes, bytes]]:
        return sorted(row for row in rows.items() if row[0] >= first)

    return View(rows.get, stored)


class _Dict(KeyValueStore):
    """An engine of a dict, which counts how often it is opened."""

    Options = DriverOptions

    def __init__(self, rows: dict[bytes, bytes], name: str) -> None:
        self.name = name
        self.rows = rows
        self.log: list[str] = []
        self.failures: list[StoreFailure] = []

    def open_engine(self) -> None:
        self.log.append("open")

        if self.failures:
            raise self.failures.pop()

    def close_engine(self) -> None:
        self.log.append("close")

    def transact(self, work: Callable[[View], T], write: bool) -> T:
        view = _view(self.rows)
        result = work(view)
        assert write or not view.changes
        self.rows |= {k: v for k, v in view.changes.items() if v is not None}

        for key in [key for key, value in view.changes.items() if value is None]:
            self.rows.pop(key, None)

        return result

    def durability(self) -> Durability:
        return Durability(Survives.NONE, {})


def test_rows_are_those_of_the_engine_and_of_the_batch() -> None:
    """In the order of the keys; changed ones once, and deleted ones not."""
    view = _view({b"a1": b"1", b"a2": b"2", b"a4": b"4", b"b1": b"5"})
    view.put(b"a2", b"new")
    view.put(b"a3", b"3")
    view.put(b"c", b"6")
    view.delete(b"a4")

    found = [(b"a1", b"1"), (b"a2", b"new"), (b"a3", b"3")]
    assert list(view.rows(b"a")) == found
    assert list(view.rows(b"a", b"2")) == found[1:]
    assert view.get(b"a4") is None


class _Iterating(_Dict):
    """An engine that tells when an iterator of its rows has ended."""

    def transact(self, work: Callable[[View], T], write: bool) -> T:
        def rows(first: bytes) -> Iterator[tuple[bytes, bytes]]:
            try:
                yield from sorted(row for row in self.rows.items() if row[0] >= first)
            finally:
                self.log.append("iterator closed")

        if write:
            return super().transact(work, write)

        return work(View(self.rows.get, rows))


async def test_an_error_keeps_no_iterator_of_the_engine() -> None:
    """A caller keeps the exception of a load that meets another type."""
    store = _Iterating({}, "iterating")
    handle: Any = handle_over(store, message_type=int, options=DriverOptions())

    async with handle as cp:
        await cp.append("t", [1, 2])
        place = next(key for key in store.rows if key[:1] == b"m")
        store.rows[place] = b'"text"'

        with pytest.raises(SerializationError) as kept:
            await cp.load("t")

        assert store.log == ["open", "iterator closed"]
        assert "message [0]" in str(kept.value)


def test_long_ids_are_listed_in_their_order() -> None:
    """Ids that differ only at their ends are in the order of hashes in the engine."""
    ids = sorted(["x" * 400, *("x" * 400 + end for end in "abcdefgh"), "x" * 399 + "y"])

    async def main() -> None:
        store = _Dict({}, "long ids")

        async with handle_over(store) as handle:
            assert isinstance(handle, ListsThreads)

            for one in reversed(ids):
                await handle.append(one, [{}])

            pages: list[str] = []

            while page := await handle.list_threads(
                prefix="x" * 399, after=pages[-1] if pages else None, limit=2
            ):
                pages += [info.thread_id for info in page]

            assert pages == ids
            found = await handle.list_threads(prefix="x" * 400 + "c")
            assert [info.thread_id for info in found] == ["x" * 400 + "c"]

    asyncio.run(main())


def test_handles_of_one_name_share_the_engine() -> None:
    """The first one opens it, and the last one closes it."""

    async def main() -> None:
        rows: dict[bytes, bytes] = {}
        one, other = _Dict(rows, "shared"), _Dict(rows, "shared")

        async with handle_over(one) as first:
            async with handle_over(other) as second:
                await second.append("t", [{}])

            assert await first.load("t") is not None

        assert (one.log, other.log) == (["open", "close"], [])

    asyncio.run(main())


def test_a_handle_that_did_not_open_closes_nothing() -> None:
    """Another handle of the name opened the engine meanwhile, and goes on."""

    async def main() -> None:
        failing, other = _Dict({}, "failing"), _Dict({}, "failing")
        failing.failures = [StoreFailure("rejected", "a lock")]
        handle = handle_over(failing)

        with pytest.raises(BackendUnavailable, match="a lock"):
            await handle.__aenter__()

        async with handle_over(other) as second:
            await failing.close()
            await second.append("t", [{}])

        assert other.log == ["open", "close"]

    asyncio.run(main())


def test_another_layout_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(SchemaMismatch, match="version 2"):
            async with handle_over(_Dict({b"s": b"2"}, "newer")):
                raise AssertionError("it opened")

    asyncio.run(main())
