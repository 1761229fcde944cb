"""Writes of several steps: stopped after each, continued late, or never.

A store whose process dies between two steps, or pauses there while others go on, never
lets two callers hold one key, and leaves nothing that blocks the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, KeyTaken, ToolCall, VersionConflict
from cpkit.driver import handle_over
from cpkit_redis.cluster import ClusterOptions, SpreadStore
from tests.redis.test_cluster import keys_of
from tests.servers.redis_cluster import RedisCluster, shared_cluster

Act = Callable[[Any], Awaitable[Any]]

KEY = "k"


@pytest.fixture(scope="session")
def cluster() -> RedisCluster:
    return shared_cluster()


class Stopping(SpreadStore):
    """Stops at a step: before it is sent, or when its answer has arrived.

    Every call of the script is a step. ``reached`` is set when the store stopped, and
    it goes on when ``resume`` is set. One that ``dies`` never sends anything again.
    """

    def __init__(self, url: str, prefix: str, timeout: float = 30.0) -> None:
        super().__init__(url, ClusterOptions(prefix=prefix, timeout=timeout))
        self.stop_at, self.after, self.dies = 0, False, False
        self.steps = 0
        self.reached, self.resume = asyncio.Event(), asyncio.Event()

    def stop(self, at: int, *, after: bool, dies: bool = False) -> None:
        self.stop_at, self.after, self.steps = at, after, 0
        self.dies = dies

    async def _run(self, calls: Any, *, once: bool = False) -> list[Any]:
        """Take a step, and stop."""
        if not calls or not self.stop_at:
            return await super()._run(calls, once=once)

        if self.dies and self.steps >= self.stop_at:
            raise RuntimeError("it died")

        self.steps += 1
        stops = self.steps == self.stop_at

        if stops and not self.after:
            await self._wait()

        found = await super()._run(calls, once=once)

        if stops and self.after:
            await self._wait()

        return found

    async def _wait(self) -> None:
        self.reached.set()

        if self.dies:
            raise RuntimeError("it died")

        await self.resume.wait()


async def claim(cp: Any, thread: str, call_id: str) -> bool:
    """Return whether the caller holds the key now."""
    return await cp.record_issued(thread, ToolCall(call_id, "pay", {}, KEY)) is None


async def holders(cp: Any) -> list[tuple[str, str]]:
    """Return the calls that hold the key, by the threads; the register must agree."""
    calls = [call for one in ("t", "u") for call in await cp.list_calls(one)]
    held = [
        (call.thread_id, call.call.call_id)
        for call in calls
        if call.call.idempotency_key == KEY and call.status != "failed"
    ]
    found = await cp.find_call(KEY)
    named = [] if found is None else [(found.thread_id, found.call.call_id)]
    assert held == named
    return held


async def forget(cp: Any) -> None:
    await cp.delete_thread("t", forget_keys=True)


async def erase(cp: Any) -> None:
    await cp.delete_thread("t")


async def begin(cp: Any) -> None:
    await cp.append("t", [{"n": 1}])


async def other(cp: Any) -> bool:
    return await claim(cp, "u", "d")


async def same(cp: Any) -> bool:
    return await claim(cp, "t", "c")


async def fail(cp: Any) -> bool:
    """Let another caller hold the key and fail, and claim it again."""
    if not await claim(cp, "u", "d"):
        return False

    await cp.record_result("u", "d", "declined", success=False)
    return await claim(cp, "u", "e")


ACTS: dict[str, list[Act]] = {
    "another claims": [other],
    "the same call is claimed again": [same],
    "another, then the same": [other, same],
    "the same, then another": [same, other],
    "the thread is deleted": [forget],
    "it is deleted, and another claims": [forget, other],
    "another claims, and it is deleted": [other, forget],
    "it is deleted, and claimed again": [forget, same],
    "it is erased, and another claims": [erase, other],
    "it is begun, and another claims": [begin, other],
    "another fails and claims again": [fail],
}

# Prepare, enter, confirm.
STOPS = [(step, after) for step in range(1, 4) for after in (False, True)]


QUICK = {"another claims", "it is deleted, and another claims"}


@pytest.mark.parametrize("resumes", [False, True], ids=["dies", "continues"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in ACTS],
)
async def test_a_stopped_claim_never_makes_two_holders(
    cluster: RedisCluster, prefix: str, name: str, resumes: bool
) -> None:
    """Stopped before or after each step, while others claim, delete or begin."""
    for n, (step, after) in enumerate(STOPS):
        one = f"{prefix}-{n}"
        store = Stopping(cluster.url(), one)
        plain = SpreadStore(cluster.url(), ClusterOptions(prefix=one))

        async with handle_over(store) as stopped, handle_over(plain) as cp:
            store.stop(step, after=after, dies=not resumes)
            writing = asyncio.create_task(claim(stopped, "t", "c"))
            await store.reached.wait()

            if not resumes:
                with pytest.raises(BackendUnavailable, match="died") as caught:
                    await writing

                assert caught.value.maybe_applied

            licensed = 0
            deleted = False

            for act in ACTS[name]:
                if await act(cp) is True:
                    licensed += 1
                elif act in (forget, erase):
                    # What was held by the thread may be free again.
                    licensed = licensed if act is erase or await holders(cp) else 0
                    deleted = True

            store.resume.set()

            if resumes:
                (answer,) = await asyncio.gather(writing, return_exceptions=True)

                if isinstance(answer, BackendUnavailable):
                    # The other caller confirmed it before it was deleted.
                    assert answer.maybe_applied
                    assert ACTS[name] == [other, forget]
                else:
                    assert isinstance(answer, bool)
                    licensed += answer

            held = await holders(cp)
            assert len(held) <= 1
            assert licensed <= 1 or deleted

            if not held:
                assert await claim(cp, "u", "last")
                assert len(await holders(cp)) == 1


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("callers", [2, 5])
async def test_callers_at_once_have_one_holder(
    cluster: RedisCluster, prefix: str, callers: int, failed: bool
) -> None:
    """Of many claims of one key one is told that it holds it, and all see that one.

    Also where each of them has to look first whether the last attempt failed. No
    prepared claim is left.
    """
    store = SpreadStore(cluster.url(), ClusterOptions(prefix=prefix))

    async with handle_over(store) as cp:
        for n in range(20):
            if failed:
                await cp.record_issued("f", ToolCall(f"f{n}", "pay", {}, f"k{n}"))
                await cp.record_result("f", f"f{n}", "declined", success=False)

            call = [ToolCall(f"c{n}-{i}", "pay", {}, f"k{n}") for i in range(callers)]
            found = await asyncio.gather(
                *(cp.record_issued(f"t{i}", call[i]) for i in range(callers))
            )
            assert found.count(None) == 1
            winner = found.index(None)
            assert {one.thread_id for one in found if one} == {f"t{winner}"}

    left = [key for keys in keys_of(cluster, prefix).values() for key in keys]
    assert not [key for key in left if "}:w:" in key]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("after", [False, True])
async def test_a_late_deletion_does_not_free_a_key_that_is_claimed_again(
    cluster: RedisCluster, prefix: str, step: int, after: bool
) -> None:
    """A deletion stops at each step, and the same call is deleted and claimed again."""
    store = Stopping(cluster.url(), prefix)
    plain = SpreadStore(cluster.url(), ClusterOptions(prefix=prefix))

    async with handle_over(store) as stopped, handle_over(plain) as cp:
        assert await same(cp)
        store.stop(step, after=after)
        deleting = asyncio.create_task(forget(stopped))
        await store.reached.wait()
        await forget(cp)
        assert await same(cp)
        store.resume.set()
        await deleting
        is_deleted_again = step == 1 and not after
        assert await holders(cp) == ([] if is_deleted_again else [("t", "c")])


@pytest.mark.parametrize("resumes", [False, True], ids=["dies", "continues"])
async def test_a_stopped_restore_leaves_its_keys_free_or_takes_them(
    cluster: RedisCluster, prefix: str, resumes: bool
) -> None:
    """While it is stopped another caller claims one of its keys."""
    source = SpreadStore(cluster.url(), ClusterOptions(prefix=f"{prefix}-source"))

    async with handle_over(source) as handle:
        cp: Any = handle
        assert await claim(cp, "t", "c")
        await cp.append("t", [{"n": 1}])
        dump = await cp.dump_thread("t")

    # Begin, enter, restore.
    for n, (step, after) in enumerate((s, a) for s in range(1, 4) for a in (0, 1)):
        one = f"{prefix}-{n}"
        store = Stopping(cluster.url(), one)
        plain = SpreadStore(cluster.url(), ClusterOptions(prefix=one))

        async with handle_over(store) as stopping, handle_over(plain) as handle:
            stopped: Any = stopping
            cp = handle
            store.stop(step, after=bool(after), dies=not resumes)
            restoring = asyncio.create_task(stopped.restore_thread(dump))
            await store.reached.wait()
            took = await claim(cp, "u", "d")
            store.resume.set()
            outcomes = await asyncio.gather(restoring, return_exceptions=True)
            held = await holders(cp)
            assert len(held) == 1
            assert held == ([("u", "d")] if took else [("t", "c")])

            if resumes:
                assert isinstance(outcomes[0], KeyTaken) == took

            # A refused restore can be repeated, and one that was made is there.
            if took:
                with pytest.raises(KeyTaken):
                    await cp.restore_thread(dump)

                assert await cp.load("t") is None
            else:
                with pytest.raises(VersionConflict):
                    await cp.restore_thread(dump)


@pytest.mark.parametrize("by_claim", [False, True])
async def test_a_late_restore_of_a_thread_that_was_begun_conflicts(
    cluster: RedisCluster, prefix: str, by_claim: bool
) -> None:
    """The writer of the thread wins, and the key of the restored call is its own."""
    store = Stopping(cluster.url(), prefix)
    plain = SpreadStore(cluster.url(), ClusterOptions(prefix=prefix))

    async with handle_over(store) as stopping, handle_over(plain) as handle:
        stopped: Any = stopping
        cp: Any = handle
        assert await claim(cp, "t", "c")
        dump = await cp.dump_thread("t")
        await cp.delete_thread("t", forget_keys=True)
        # Stop when the restore was begun, or when it has its key.
        store.stop(1 if by_claim else 2, after=True)
        restoring = asyncio.create_task(stopped.restore_thread(dump))
        await store.reached.wait()
        await (claim(cp, "t", "d") if by_claim else cp.append("t", [{"n": 1}]))
        store.resume.set()

        with pytest.raises(VersionConflict):
            await restoring

        assert await holders(cp) == ([("t", "d")] if by_claim else [])
        assert await claim(cp, "u", "d") is not by_claim
        left = [key for keys in keys_of(cluster, prefix).values() for key in keys]
        assert not [key for key in left if ":copy-" in key]


async def test_an_unknown_result_of_a_claim_is_said_to_be_unknown(
    cluster: RedisCluster, prefix: str
) -> None:
    """A claim that was granted may hold, so it is never reported as not applied."""
    store = Stopping(cluster.url(), prefix, timeout=0.5 * slowdown())

    async with handle_over(store) as cp:
        await cp.append("t", [{}])
        store.stop(2, after=True)

        with pytest.raises(BackendUnavailable) as caught:
            await claim(cp, "t", "c")

        assert caught.value.maybe_applied
        store.resume.set()
        # Repeated, the same call completes it.
        await claim(cp, "t", "c")
        assert await holders(cp) == [("t", "c")]
