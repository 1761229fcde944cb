"""Two kinds of write on one thread in one batch: as one after the other."""

from __future__ import annotations

import asyncio
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.difference import difference
from conformance.failure import Failure
from conformance.operations import WRITES, Place, Write, prepare, state, timeless
from cpkit import CheckpointerError, MemoryCheckpointer

KINDS = [
    "append with extra",
    "append at a version",
    "save_extra",
    "claim",
    "claim of a freed key",
    "result",
    "failed result",
    "deletion",
    "deletion with its keys",
    "trim",
]
"""One write of each meaning; a pair is two of them, also of the same kind."""

AFTER = [{"after": n} for n in range(6)]
"""Appended afterwards: more messages than any of the writes has left or removed."""

_EXPECTED: dict[tuple[str, str], list[Any]] = {}


async def _do(cp: Store, place: Place, write: Write) -> str:
    """Do a write; return the name of the error that refused it."""
    try:
        await write.do(cp, place)
    except CheckpointerError as exc:
        return type(exc).__name__

    return ""


async def _look(cp: Store, place: Place) -> list[Any]:
    """Return the state, and the one after a further append."""
    before = timeless(await state(cp, place))
    await cp.append(place.thread, AFTER, extra={"z": 1})
    return [before, timeless(await state(cp, place))]


async def _expected(first: Write, second: Write) -> list[Any]:
    """Return what the in-memory store has after them, one after the other."""
    pair = first.name, second.name

    if pair not in _EXPECTED:
        async with MemoryCheckpointer[Any]() as opened:
            memory: Any = opened
            place = await prepare(memory, Place("pair"))
            answers = [await _do(memory, place, one) for one in (first, second)]
            _EXPECTED[pair] = [answers, *await _look(memory, place)]

    return _EXPECTED[pair]


@clause("batch.pairs-of-writes", level=Level.CONCURRENT, deadline=120)
async def pairs_of_writes(case: Case) -> None:
    """Two writes of a thread in one batch are as one after the other, in any order."""
    writes = [
        one
        for one in WRITES
        if one.name in KINDS and (one.needs is None or isinstance(case.cp, one.needs))
    ]

    for first in writes:
        pairs = [(first, second, Place(case.id("p"))) for second in writes]
        await asyncio.gather(*(prepare(case.cp, place) for *_, place in pairs))

        answers = await asyncio.gather(
            *(_in_a_batch(case.cp, place, one, two) for one, two, place in pairs)
        )
        found = await asyncio.gather(*(_look(case.cp, place) for *_, place in pairs))

        for (one, two, _), answer, states in zip(pairs, answers, found, strict=True):
            other = await _expected(two, one)
            expected = [
                await _expected(one, two),
                [other[0][::-1], *other[1:]],
            ]
            _check([answer, *states], expected, f"{one.name}, and {two.name}")


async def _in_a_batch(
    cp: Store, place: Place, first: Write, second: Write
) -> list[str]:
    # The first write of a thread may be a batch alone: one of nothing.
    _, *answers = await asyncio.gather(
        cp.append(place.thread, []),
        _do(cp, place, first),
        _do(cp, place, second),
    )
    return answers


def _check(seen: list[Any], expected: list[list[Any]], where: str) -> None:
    """Raise `Failure` unless it is one of the two; a store may lack some reads."""
    if not any(_same(seen, one) for one in expected):
        likely = [_of(one, seen) for one in expected]
        place, one, other = difference(seen, likely[0]) or ("", "", "")
        raise Failure(
            f"what the two writes leave in one of both orders; in the first one "
            f"{place}: {other}",
            f"{place}: {one}",
            f"{where}, on one thread in one batch; [0] has their errors, [1] the state "
            "after them, and [2] the state after a further append",
        )


def _of(expected: list[Any], seen: list[Any]) -> list[Any]:
    """Return what is expected of the reads that the store has."""
    return [
        expected[0],
        *(
            {name: one[name] for name in found}
            for one, found in zip(expected[1:], seen[1:], strict=True)
        ),
    ]


def _same(seen: list[Any], expected: list[Any]) -> bool:
    return seen == _of(expected, seen)
