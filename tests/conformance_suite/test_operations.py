"""The tables of all writes and reads, over which the clauses iterate."""

from __future__ import annotations

import inspect
from itertools import chain, combinations
from typing import Any

import pytest

from conformance.failure import Failure
from conformance.operations import (
    READS,
    WRITES,
    Place,
    Write,
    prepare,
    state,
    tell_outcome,
)
from cpkit import MemoryCheckpointer, protocol
from tests.broken.store import Broken

PROTOCOLS = [
    found
    for name in protocol.__all__
    if getattr(found := getattr(protocol, name), "_is_protocol", False)
    # What a search finds depends on the engine, so the suite does not certify it.
    if found is not protocol.SearchesThreads
]

METHODS = {
    name: method
    for one in PROTOCOLS
    for name, method in vars(one).items()
    if inspect.iscoroutinefunction(method)
}
"""Every operation of the protocols; ``watch`` and ``durability`` are not among them."""


def test_every_method_is_in_a_table() -> None:
    """A new method of a protocol is a write or a read that the clauses must try."""
    assert METHODS.keys() >= {"append", "delete_thread", "load_range"}
    assert METHODS.keys() == {
        *(row.method for row in WRITES),
        *(row.method for row in READS),
    }


def test_every_kind_of_write_is_in_the_table() -> None:
    """A write has a row for each set of its options that a caller can give."""
    for method in {row.method for row in WRITES}:
        parameters = inspect.signature(METHODS[method]).parameters.values()
        options = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        sizes = range(len(options) + 1)
        sets = chain.from_iterable(combinations(options, size) for size in sizes)
        rows = {row.options for row in WRITES if row.method == method}
        assert rows == {frozenset(one) for one in sets}, method


@pytest.mark.parametrize("write", WRITES, ids=lambda row: row.name)
async def test_a_write_leaves_another_state(write: Write) -> None:
    """The states before and after are told apart, for other ids and times too."""
    async with MemoryCheckpointer[Any]() as opened:
        cp: Any = opened
        place = await prepare(cp, Place("p-1"), write)
        assert not await tell_outcome(write, await state(cp, place, write.at), "")
        await write.do(cp, place)
        assert await tell_outcome(write, await state(cp, place, write.at), "")


async def test_a_part_of_a_write_is_a_failure() -> None:
    """The failure names the write, the read and the part that differs."""
    write = next(one for one in WRITES if one.name == "append with extra")

    async with Broken() as opened:
        cp: Any = opened
        place = await prepare(cp, Place("p-2"), write)
        await cp.append(place.thread, [{"n": 3}, {"n": 4}])

        with pytest.raises(Failure) as caught:
            await tell_outcome(write, await state(cp, place), "here")

    assert caught.value.where == "append with extra, here"
    assert ".extra" not in caught.value.expected
    assert "['extra']" in caught.value.expected
    assert "3 keys, with 'b'" in caught.value.expected
