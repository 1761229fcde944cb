"""The linearizability checker, on histories with and without an order."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.clauses.linearizable import check_keys
from conformance.failure import Failure
from conformance.history.linear import (
    check_linearizable,
    is_linearizable,
    smallest,
)
from conformance.history.models import KEY, THREAD
from conformance.history.op import Op, listing, merged
from conformance.history.recorder import Recorder
from cpkit import MemoryCheckpointer

Out = tuple[Any, ...] | None


def op(client: str, start: int, end: int | None, kind: str, *args: Any, out: Out) -> Op:
    return Op(client, "subject", kind, args, out, start, end)


def append(
    client: str, start: int, end: int | None, tokens: str, version: int | None
) -> Op:
    given = tuple(f"{client}.{token}" for token in tokens)
    out = None if version is None else ("version", version)
    return op(client, start, end, "append", given, None, (), out=out)


def append_with_extra(
    start: int, end: int | None, token: str, expected: int | None, out: Out
) -> Op:
    extra = (("k", token),)
    return op("a", start, end, "append", (token,), expected, extra, out=out)


def load(start: int, end: int, *tokens: str, extra: tuple[Any, ...] = ()) -> Op:
    return op("reader", start, end, "load", out=("loaded", tokens, extra))


def claim(client: str, start: int, end: int | None, out: Out) -> Op:
    return op(client, start, end, "record_issued", f"{client}.1", out=out)


EMPTY = op("reader", 0, 1, "load", out=("nothing",))

EXPLAINED: dict[str, list[Op]] = {
    "nothing": [],
    "one after the other": [
        EMPTY,
        append("a", 2, 3, "x", 1),
        append("b", 4, 5, "yz", 3),
        load(6, 7, "a.x", "b.y", "b.z"),
    ],
    "concurrent, in the other order": [
        append("a", 1, 10, "x", 2),
        append("b", 2, 9, "y", 1),
        load(11, 12, "b.y", "a.x"),
    ],
    "a load in the middle of an append sees it": [
        append("a", 1, 10, "x", 1),
        load(2, 3, "a.x"),
    ],
    "a load in the middle of an append does not see it": [
        append("a", 1, 10, "x", 1),
        op("reader", 2, 3, "load", out=("nothing",)),
    ],
    "unknown outcome, applied late": [
        append("a", 1, None, "x", None),
        append("b", 2, 3, "y", 1),
        load(4, 5, "b.y"),
        load(6, 7, "b.y", "a.x"),
    ],
    "an append with extra": [
        append_with_extra(1, 2, "x", 0, ("version", 1)),
        append_with_extra(3, 4, "y", 0, ("conflict", 1)),
        load(5, 6, "x", extra=(("k", "x"),)),
    ],
    "unknown outcome, never applied": [
        append("a", 1, None, "x", None),
        append("b", 2, 3, "y", 1),
        load(9, 10, "b.y"),
    ],
}

UNEXPLAINED: dict[str, list[Op]] = {
    "a lost append": [
        append("a", 1, 2, "x", 1),
        append("b", 3, 4, "y", 1),
        load(5, 6, "b.y"),
    ],
    "two appends at one version": [
        append("a", 1, 10, "x", 1),
        append("b", 2, 9, "y", 1),
    ],
    "a partial batch": [append("a", 1, 10, "xy", 2), load(2, 3, "a.x")],
    "a stale load": [
        append("a", 1, 2, "x", 1),
        op("reader", 3, 4, "load", out=("nothing",)),
    ],
    "a load older than an earlier load": [
        append("a", 1, 10, "x", 1),
        load(2, 3, "a.x"),
        op("reader", 4, 5, "load", out=("nothing",)),
    ],
    "an append without its extra": [
        append_with_extra(1, 2, "x", 0, ("version", 1)),
        load(3, 4, "x"),
    ],
    "the extra of an append that conflicts": [
        append("b", 1, 2, "x", 1),
        append_with_extra(3, 4, "y", 0, ("conflict", 1)),
        load(5, 6, "b.x", extra=(("k", "y"),)),
    ],
    "an order that contradicts the versions": [
        append("a", 1, 10, "x", 2),
        append("b", 2, 9, "y", 1),
        load(11, 12, "a.x", "b.y"),
    ],
    "a message that no client sent": [
        append("a", 1, 2, "x", 1),
        load(3, 4, "a.x", "c.z"),
    ],
    "half of an append of unknown outcome": [
        append("a", 1, None, "xy", None),
        load(2, 3, "a.x"),
    ],
    "a conflict at the current version": [
        op("a", 1, 2, "append", ("a.x",), 0, (), out=("conflict", 0)),
    ],
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_history_with_an_order(name: str) -> None:
    """A history is linearizable if some order explains it."""
    assert is_linearizable(THREAD, EXPLAINED[name])
    check_linearizable(THREAD, EXPLAINED[name])


@pytest.mark.parametrize("name", UNEXPLAINED)
def test_a_history_without_an_order(name: str) -> None:
    """A history is not linearizable if no order explains it."""
    assert not is_linearizable(THREAD, UNEXPLAINED[name])

    with pytest.raises(Failure, match="operations without such an order"):
        check_linearizable(THREAD, UNEXPLAINED[name])


def test_two_holders_of_a_key() -> None:
    """Two claims of a key that both succeed have no order."""
    first, second = claim("a", 1, 10, ("claimed",)), claim("b", 2, 9, ("claimed",))
    held = ("record", "a.1", "issued", None, 1)
    assert not is_linearizable(KEY, [first, second])
    assert is_linearizable(KEY, [first, claim("b", 2, 9, held)])
    assert not is_linearizable(
        KEY, [claim("b", 0, 1, held), claim("a", 2, 3, ("claimed",))]
    )


def test_attempts_of_a_key() -> None:
    """A claim of a freed key is the next attempt; it cannot happen earlier."""
    failed = ("record", "a.1", "failed", "a.no", 1)
    history = [
        claim("a", 1, 2, ("claimed",)),
        op("a", 3, 6, "record_result", "a.1", "failed", "a.no", out=failed),
        claim("b", 4, 5, ("claimed",)),
        op("c", 7, 8, "find_call", out=("record", "b.1", "issued", None, 2)),
    ]
    assert is_linearizable(KEY, history)
    assert not is_linearizable(
        KEY, [history[0], history[2], history[1], history[3]][:2]
    )


@pytest.mark.long
def test_the_smallest_part_is_shown() -> None:
    """Only a few operations of a long history without an order are shown."""
    fine = [append("a", 10 * n, 10 * n + 5, "x", n + 1) for n in range(40)]
    reads = [load(10 * n + 6, 10 * n + 7, *["a.x"] * (n + 1)) for n in range(40)]
    wrong = append("b", 402, 404, "y", 3)
    after = [append("c", 410 + n, 411 + n, "z", 50) for n in range(10)]
    history = [*fine, *reads, wrong, *after]
    least = smallest(THREAD, history)
    assert not is_linearizable(THREAD, least)
    assert wrong in least
    assert not set(least) & {*reads, *after}
    assert listing(least).count("\n") == len(least) - 1


def test_the_output_of_a_killed_process() -> None:
    """An operation that started and did not end has an unknown outcome."""
    ended = append("a", 1, 2, "x", 1)
    begun = append("a", 3, None, "y", None)
    printed = [ended.unknown().to_json(), ended.to_json(), begun.to_json()]
    assert merged(printed) == [ended, begun]


async def test_a_key_that_is_free_at_the_end_is_checked_at_each_node() -> None:
    """The first check claims it, and the second one knows of that claim."""
    async with MemoryCheckpointer[Any]() as cp:
        client = Recorder(cp, "a")
        await client.record_issued("t", "a.0", "key")
        await client.record_result("t", "a.0", "key", "declined", success=False)
        first = await check_keys(cp, ["key"], client.history)
        await check_keys(cp, ["key"], [*client.history, *first])

        with pytest.raises(Failure, match="1 operations without such an order"):
            await check_keys(cp, ["key"], client.history)
