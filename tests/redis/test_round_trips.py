"""An operation is one round trip, and concurrent writes share one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator

from conformance.operations import LATER
from cpkit import ToolCall
from cpkit_redis import RedisCheckpointer
from tests.redis.proxy import Proxy

Store = RedisCheckpointer[Any]

Operation = Callable[[Store], Coroutine[Any, Any, Any]]

OPERATIONS: dict[str, Operation] = {
    "load": lambda cp: cp.load("t"),
    "load nothing": lambda cp: cp.load("none"),
    "append": lambda cp: cp.append("t", [{"n": 1}]),
    "append to a new thread": lambda cp: cp.append("new", [{"n": 1}]),
    "append nothing": lambda cp: cp.append("t", [], expected_version=3),
    "save_extra": lambda cp: cp.save_extra("t", {"a": 1}),
    "record_issued": lambda cp: cp.record_issued("t", ToolCall("c2", "x", {}, "k2")),
    "record_issued again": lambda cp: cp.record_issued(
        "t", ToolCall("c", "x", {}, "k")
    ),
    "record_result": lambda cp: cp.record_result("t", "c", 1),
    "find_completed": lambda cp: cp.find_completed("k"),
    "find_call": lambda cp: cp.find_call("k"),
    "list_calls": lambda cp: cp.list_calls("t"),
    "list_threads": lambda cp: cp.list_threads(prefix="t"),
    "list_threads, erased too": lambda cp: cp.list_threads(erased=True),
    "read": lambda cp: cp.read("t", -2, -1),
    "load_range": lambda cp: cp.load_range("t", 1),
    "dump_thread": lambda cp: cp.dump_thread("t"),
    "append with extra": lambda cp: cp.append("t", [{"n": 1}], extra={"a": 1}),
    "erase_calls": lambda cp: cp.erase_calls("t", LATER),
    "trim": lambda cp: cp.trim("t", 2),
    "trim expecting": lambda cp: cp.trim("t", 2, expected_version=3),
    "delete_thread": lambda cp: cp.delete_thread("t"),
    "delete_thread, keys too": lambda cp: cp.delete_thread("t", forget_keys=True),
}


_LOAD = ["HGETALL", "LLEN", "LRANGE", "HGETALL", "HGETALL", "HGETALL", "GET"]


@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_operation_is_one_round_trip(
    proxy: Proxy, prefix: str, name: str
) -> None:
    """However many keys it reads and writes."""
    async with Store(proxy.url, notify=False, prefix=prefix) as cp:
        await cp.append("t", [{"n": n} for n in range(3)])
        await cp.save_extra("t", {"a": 0})
        await cp.record_issued("t", ToolCall("c", "x", {}, "k"))
        await OPERATIONS[name](cp)  # so that the server knows the script
        proxy.forget()
        await OPERATIONS[name](cp)
        assert proxy.trips == 1


async def test_opening_is_two_round_trips(proxy: Proxy, prefix: str) -> None:
    """The first reads the settings, the second tries the permissions."""
    for _ in range(2):  # the first time, the server may not know the script
        proxy.forget()

        async with Store(proxy.url, notify=False, prefix=prefix) as cp:
            assert await cp.load("t") is None

    names = [name for name in proxy.commands if name not in ("CLIENT", "CONFIG")]
    assert names == ["GET", "INFO", "EVALSHA", *_LOAD]


async def test_writes_that_wait_share_a_call(proxy: Proxy, prefix: str) -> None:
    """Sixty-four appends at once are a few calls."""
    async with Store(proxy.url, notify=False, prefix=prefix) as cp:
        await cp.append("warm", [{}])
        proxy.forget()
        versions = await asyncio.gather(
            *(cp.append(f"t{i % 16}", [{"i": i}]) for i in range(64))
        )
        assert sorted(versions) == sorted([1, 2, 3, 4] * 16)
        assert len(proxy.commands) <= 6


async def test_a_mixed_batch_is_one_round_trip(proxy: Proxy, prefix: str) -> None:
    """One call of the script makes every kind of write, in order."""
    async with Store(proxy.url, notify=False, prefix=prefix) as cp:
        await cp.append("moved", [{}])
        dump = await cp.dump_thread("moved")
        assert dump is not None
        await cp.delete_thread("moved", forget_keys=True)
        proxy.forget()
        outcomes = await asyncio.gather(
            cp.append("t", [{"n": 0}]),
            cp.save_extra("t", {"a": 1}),
            cp.record_issued("t", ToolCall("c", "x", {}, "k")),
            cp.record_result("t", "c", 1),
            cp.append("t", [{"n": 1}], expected_version=1),
            cp.trim("t", 1, expected_version=2),
            cp.append("gone", [{}]),
            cp.delete_thread("gone", expected_version=1),
            cp.restore_thread(dump),
        )
        assert proxy.commands == ["EVALSHA"]
        assert (outcomes[0], *outcomes[4:6]) == (1, 2, 1)
        assert await cp.load("gone") is None
        assert await cp.dump_thread("moved") == dump


async def test_a_range_costs_what_it_returns(proxy: Proxy, prefix: str) -> None:
    """The end of a thread is read without the rest of it."""
    async with Store(proxy.url, notify=False, prefix=prefix) as cp:
        await cp.append("t", [{"n": n, "text": "x" * 1000} for n in range(2000)])
        proxy.forget()
        assert [m["n"] for m in await cp.read("t", -2)] == [1998, 1999]
        assert proxy.received < 5000


async def test_a_trimmed_thread_is_read_in_one_round_trip(
    proxy: Proxy, prefix: str
) -> None:
    """Two, if the range begins or ends at a position: where is it in the list?"""
    from_the_ends = {(0, None): 1990, (-5, -1): 1995, (0, 0): 1990}
    at_positions = {(10, None): 1990, (0, 10): 1990, (1995, 1999): 1995}

    async with Store(proxy.url, notify=False, prefix=prefix) as cp:
        await cp.append("t", [{"n": n, "text": "x" * 1000} for n in range(2000)])
        assert await cp.trim("t", 1990) == 1990

        for trips, ranges in ((1, from_the_ends), (2, at_positions)):
            for (start, stop), first in ranges.items():
                proxy.forget()
                data = await cp.load_range("t", start, stop)
                assert data is not None
                assert (data.first, proxy.trips) == (first, trips)
                assert proxy.received < 15_000


async def test_a_large_load_is_decoded_in_a_worker_thread(
    url: str, prefix: str
) -> None:
    """So it does not block the event loop; a small load does not use a thread."""
    threads: set[int] = set()

    def noted(message: dict[str, Any]) -> dict[str, Any]:
        threads.add(threading.get_ident())
        return message

    kind = Annotated[dict[str, Any], AfterValidator(noted)]

    async with RedisCheckpointer[Any](url, prefix=prefix, message_type=kind) as cp:
        await cp.append("t", [{"n": n} for n in range(2000)])
        uses: dict[bool, list[Operation]] = {
            True: [lambda cp: cp.load("t"), lambda cp: cp.read("t")],
            False: [lambda cp: cp.read("t", -3)],
        }

        for large, operations in uses.items():
            for use in operations:
                threads.clear()
                await use(cp)
                assert ({threading.get_ident()} != threads) == large
