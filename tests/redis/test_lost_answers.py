"""A write whose answer is lost is sent once; a read is repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, ToolCall, VersionConflict
from cpkit_redis import RedisCheckpointer
from tests.redis.proxy import Proxy

Store = RedisCheckpointer[Any]

WRITES: dict[str, Callable[[Store], Coroutine[Any, Any, Any]]] = {
    "append": lambda cp: cp.append("t", [{"n": 1}]),
    "save_extra": lambda cp: cp.save_extra("t", {"a": 1}),
    "record_issued": lambda cp: cp.record_issued("t", ToolCall("c2", "x", {}, "k2")),
    "record_result": lambda cp: cp.record_result("t", "c", 1),
    "delete_thread": lambda cp: cp.delete_thread("t"),
}
READS: dict[str, Callable[[Store], Coroutine[Any, Any, Any]]] = {
    "load": lambda cp: cp.load("t"),
    "read": lambda cp: cp.read("t"),
    "find_call": lambda cp: cp.find_call("k"),
    "list_calls": lambda cp: cp.list_calls("t"),
    "list_threads": lambda cp: cp.list_threads(),
}


async def filled(cp: Store) -> None:
    await cp.append("t", [{"n": 0}])
    await cp.save_extra("t", {"a": 0})
    await cp.record_issued("t", ToolCall("c", "x", {}, "k"))


@pytest.mark.parametrize("how", ["cut", "swallow"])
@pytest.mark.parametrize("name", WRITES)
async def test_a_write_without_an_answer_is_sent_once(
    proxy: Proxy, prefix: str, name: str, how: Any
) -> None:
    """Neither the driver nor the client library repeats it, and it may be applied."""
    async with Store(
        proxy.url, notify=False, prefix=prefix, timeout=0.5 * slowdown()
    ) as cp:
        await filled(cp)
        await WRITES[name](cp)  # so that the server knows the script
        proxy.forget()
        proxy.answers = how

        with pytest.raises(BackendUnavailable) as caught:
            await WRITES[name](cp)

        assert caught.value.maybe_applied
        assert "may have been applied" in str(caught.value)
        assert proxy.commands == ["EVALSHA"]


@pytest.mark.parametrize("how", ["cut", "swallow"])
async def test_the_same_append_again_does_not_duplicate(
    proxy: Proxy, prefix: str, how: Any
) -> None:
    """The caller repeats it with the same expected version, and gets a conflict."""
    async with Store(
        proxy.url, notify=False, prefix=prefix, timeout=0.5 * slowdown()
    ) as cp:
        await cp.append("t", [{"n": 0}])
        proxy.answers = how

        with pytest.raises(BackendUnavailable):
            await cp.append("t", [{"n": 1}], expected_version=1)

        proxy.answers = "pass"

        with pytest.raises(VersionConflict) as caught:
            await cp.append("t", [{"n": 1}], expected_version=1)

        assert caught.value.actual == 2
        assert await cp.read("t") == [{"n": 0}, {"n": 1}]


async def test_the_same_claim_again_finds_itself(proxy: Proxy, prefix: str) -> None:
    """The caller repeats the claim, and gets its own record."""
    call = ToolCall("c", "pay", {"amount": 1}, "k")

    async with Store(proxy.url, notify=False, prefix=prefix) as cp:
        proxy.answers = "cut"

        with pytest.raises(BackendUnavailable):
            await cp.record_issued("t", call)

        proxy.answers = "pass"
        record = await cp.record_issued("t", call)
        assert record is not None
        assert record.call == call
        assert record.attempt == 1


@pytest.mark.parametrize("name", READS)
async def test_a_read_is_repeated_where_the_connection_broke(
    proxy: Proxy, prefix: str, name: str
) -> None:
    """The caller gets the answer."""
    async with Store(proxy.url, notify=False, prefix=prefix) as cp:
        await filled(cp)
        proxy.forget()
        expected = await READS[name](cp)
        once = proxy.commands
        proxy.forget()
        proxy.answers, proxy.once = "cut", True
        assert await READS[name](cp) == expected
        # A new connection says who it is, and asks for its number.
        sent = [one for one in proxy.commands if one not in ("CLIENT", "INFO")]
        assert sent == 2 * once


async def test_a_read_without_answers_gives_up(proxy: Proxy, prefix: str) -> None:
    """It raises after ``timeout``, and never says that it may be applied."""
    async with Store(
        proxy.url,
        notify=False,
        prefix=prefix,
        timeout=0.05 * slowdown(),
        connect_timeout=0.2 * slowdown(),
    ) as cp:
        await filled(cp)
        proxy.answers = "swallow"

        with pytest.raises(BackendUnavailable) as caught:
            await cp.load("t")

        assert not caught.value.maybe_applied
        proxy.answers = "pass"
        data = await cp.load("t")
        assert data is not None
        assert data.version == 1


async def test_a_swallowed_answer_is_not_taken_for_the_next(
    proxy: Proxy, prefix: str
) -> None:
    """The driver does not use that connection again."""
    async with Store(
        proxy.url, notify=False, prefix=prefix, timeout=0.1 * slowdown(), pool_size=1
    ) as cp:
        await cp.append("t", [{"n": 0}])
        proxy.answers = "swallow"

        with pytest.raises(BackendUnavailable):
            await cp.append("t", [{"n": 1}])

        proxy.answers = "pass"
        assert await cp.append("other", [{"n": 0}]) == 1
        assert await cp.append("t", [{"n": 2}]) == 3


async def test_a_connection_cut_while_idle_costs_nothing(
    proxy: Proxy, prefix: str
) -> None:
    """Nothing was sent on it, so the write goes out on a new connection."""
    async with Store(proxy.url, notify=False, prefix=prefix) as cp:
        for version in range(1, 10):
            assert await cp.append("t", [{}]) == version
            proxy.cut()
            await proxy.hung_up()


async def test_each_caller_of_a_lost_group_has_an_error_of_its_own(
    proxy: Proxy, prefix: str
) -> None:
    """Each error has its own traceback and cause."""
    async with Store(proxy.url, notify=False, prefix=prefix) as cp:
        await asyncio.gather(*(cp.append("t", [{}]) for _ in range(2)))
        proxy.answers = "cut"
        errors = await asyncio.gather(
            *(cp.append("t", [{}]) for _ in range(8)), return_exceptions=True
        )
        errors_seen = [
            error for error in errors if isinstance(error, BackendUnavailable)
        ]
        assert len({id(error) for error in errors_seen}) == 8
        assert all(error.maybe_applied and error.__cause__ for error in errors_seen)
