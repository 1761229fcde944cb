"""A cluster whose slot moves, and whose nodes are killed or paused, under load."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any
from uuid import uuid4

import pytest
from redis.crc import key_slot

from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, ToolCall, VersionConflict, open_checkpointer
from cpkit_redis.schema import base_of
from tests.servers.redis_cluster import RedisCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """A cluster of this module's own."""
    with RedisCluster(node_timeout=1.0) as started:
        yield started


class Load:
    """Tasks that append, claim and record results, and what was acknowledged."""

    def __init__(self, cp: Any, tasks: int = 12, keys: int = 40) -> None:
        self.cp = cp
        self.names = [f"t{n}" for n in range(tasks)]
        self.keys = [f"k{n}" for n in range(keys)]
        self.appended: dict[str, list[int]] = {name: [] for name in self.names}
        self.unsure: dict[str, set[int]] = {name: set() for name in self.names}
        self.held: dict[str, list[tuple[str, str]]] = {key: [] for key in self.keys}
        self.errors = 0
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._work(name)) for name in self.names]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    @property
    def count(self) -> int:
        return sum(map(len, self.appended.values()))

    async def more(self, count: int) -> None:
        """Return when so many more appends were acknowledged."""
        wanted = self.count + count

        while self.count < wanted:  # noqa: ASYNC110  # tasks of this test
            await asyncio.sleep(0.01)

    async def _work(self, name: str) -> None:
        n = 0

        while not self._stop.is_set():
            n += 1

            try:
                await self.cp.append(name, [{"n": n}])
                self.appended[name].append(n)
            except BackendUnavailable as exc:
                self.errors += 1

                if exc.maybe_applied:
                    self.unsure[name].add(n)

            key = self.keys[n % len(self.keys)]
            call = ToolCall(f"c{n}", "pay", {}, key)

            try:
                if await self.cp.record_issued(name, call) is None:
                    self.held[key].append((name, call.call_id))
            except BackendUnavailable:
                self.errors += 1

    async def lost_appends(self) -> int:
        """Check that no message is stored twice or half; count the lost ones."""
        lost = 0

        for name in self.names:
            found = [message["n"] for message in await self.cp.read(name)]
            assert len(found) == len(set(found)), "stored twice"
            assert found == sorted(found)
            assert set(found) <= {*self.appended[name], *self.unsure[name]}
            lost += len({*self.appended[name]} - {*found})

        return lost

    async def lost_claims(self) -> int:
        """Check that no key has two holders among the claims that are left."""
        lost = 0
        by_thread = {name: await self.cp.list_calls(name) for name in self.names}
        stored = {
            (c.thread_id, c.call.call_id) for some in by_thread.values() for c in some
        }

        for key, held in self.held.items():
            found = await self.cp.find_call(key)
            left = [one for one in held if one in stored]
            named = found and (found.thread_id, found.call.call_id)
            survived = [one for one in left if one == named]
            assert len(survived) <= 1
            lost += len(held) - len(survived)

        return lost


@pytest.mark.long
async def test_a_moved_slot_is_followed(cluster: RedisCluster) -> None:
    """While the slot of the store moves, no write fails or is lost."""
    prefix = f"moving-{uuid4().hex}"
    slot = key_slot(base_of(prefix))

    async with (
        open_checkpointer(cluster.url(prefix=prefix)) as cp,
        Load(cp, tasks=6) as load,
    ):
        for _ in range(6):
            await load.more(30)
            await asyncio.to_thread(cluster.move_slot, slot)

        await load.more(30)

    async with open_checkpointer(cluster.url(prefix=prefix)) as load.cp:
        assert load.errors == 0
        assert await load.lost_appends() == 0
        assert await load.lost_claims() == 0
        assert all(len(held) == 1 for held in load.held.values() if held)
        listed = await load.cp.list_threads()
        assert [info.thread_id for info in listed] == sorted(load.names)


async def test_a_slot_that_moves_lets_its_operations_wait(
    cluster: RedisCluster,
) -> None:
    """Nothing is written to either node until the slot has arrived."""
    prefix = f"waiting-{uuid4().hex}"
    slot = key_slot(base_of(prefix))

    async with open_checkpointer(cluster.url(prefix=prefix)) as handle:
        cp: Any = handle
        await cp.append("t", [{"n": 1}])
        move = cluster.begin_move(slot)
        writes = [
            asyncio.create_task(cp.append("t", [{"n": 2}])),
            asyncio.create_task(cp.save_extra("t", {"a": 1})),
            asyncio.create_task(cp.record_issued("t", ToolCall("c", "x", {}, "k"))),
            asyncio.create_task(cp.load("t")),
        ]
        await asyncio.sleep(0.3)
        assert cluster.move_keys(slot, move)
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in writes)

        while cluster.move_keys(slot, move):
            continue

        cluster.end_move(slot, move)
        assert await writes[0] == 2
        assert await writes[2] is None
        await asyncio.gather(*writes)
        data = await cp.load("t")
        assert (data.version, data.extra) == (2, {"a": 1})
        assert await cp.append("t", [{"n": 3}], expected_version=2) == 3


@pytest.mark.long
async def test_a_killed_primary_is_followed(cluster: RedisCluster) -> None:
    """Its replica takes over. Acknowledged writes may be lost, and none is doubled."""
    prefix = f"killed-{uuid4().hex}"
    seen: Counter[str] = Counter()

    async with (
        open_checkpointer(cluster.url(prefix=prefix)) as cp,
        Load(cp) as load,
    ):
        await load.more(200)
        node = cluster.primary_of(base_of(prefix))
        await asyncio.to_thread(node.kill)
        await cp.append("t0", [{"n": -1}])  # waits for the replica
        load.appended["t0"].append(-1)
        await load.more(200)

    await asyncio.to_thread(node.start)
    await asyncio.to_thread(cluster.wait_until_ok)

    async with open_checkpointer(cluster.url(prefix=prefix)) as load.cp:
        seen["appends lost"] = await lost_without_order(load)
        seen["claims lost"] = await load.lost_claims()

    print(f"{load.count} appends: {dict(seen)}, {load.errors} errors")  # noqa: T201  # the numbers of this run


async def lost_without_order(load: Load) -> int:
    """Count lost appends; the marker of the test has no place in the order."""
    found = [message["n"] for message in await load.cp.read("t0")]
    assert found.count(-1) <= 1
    load.appended["t0"].remove(-1)
    lost = 0

    for name in load.names:
        stored = [m["n"] for m in await load.cp.read(name) if m["n"] != -1]
        assert len(stored) == len(set(stored)), "stored twice"
        assert stored == sorted(stored)
        assert set(stored) <= {*load.appended[name], *load.unsure[name]}
        lost += len({*load.appended[name]} - {*stored})

    return lost


@pytest.mark.long
@pytest.mark.parametrize("first", ["read", "write"])
async def test_a_paused_primary_is_given_up(cluster: RedisCluster, first: str) -> None:
    """Later operations go to the node that took over; a write may be applied there."""
    prefix = f"paused-{uuid4().hex}"
    url = cluster.url(prefix=prefix, timeout=3 * slowdown())

    async with open_checkpointer(url) as handle:
        cp: Any = handle
        await cp.append("t", [{"n": 1}])
        node = cluster.primary_of(base_of(prefix))
        await asyncio.to_thread(node.pause)

        try:
            with pytest.raises(BackendUnavailable) as caught:
                await (cp.append("u", [{}]) if first == "write" else cp.load("t"))

            assert caught.value.maybe_applied == (first == "write")
            await asyncio.to_thread(cluster.wait_until_replaced, node)
            data = await cp.load("t")
            assert data.version == 1
            assert await cp.append("t", [{"n": 2}], expected_version=1) == 2
        finally:
            await asyncio.to_thread(node.resume)

        await asyncio.to_thread(cluster.wait_until_ok)

        with pytest.raises(VersionConflict):
            await cp.append("t", [{"n": 3}], expected_version=1)

        assert await cp.read("t") == [{"n": 1}, {"n": 2}]


@pytest.mark.long
async def test_a_paused_cluster_answers_within_the_timeout(
    cluster: RedisCluster,
) -> None:
    """The limit cancels once; a failure that comes of it ends all further tries."""
    prefix = f"silent-{uuid4().hex}"
    names = [f"t{n}" for n in range(60)]

    async with open_checkpointer(cluster.url(prefix=prefix, timeout=1)) as handle:
        cp: Any = handle
        await asyncio.gather(*(cp.append(name, [{"n": 1}]) for name in names))
        claims = [
            asyncio.create_task(claim_until_refused(cp, name)) for name in names[:8]
        ]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(cluster.pause)

        try:
            async with asyncio.timeout(40 * slowdown()):
                await asyncio.gather(*claims)

                for _ in range(2):  # the second time, the map of slots is old
                    uses = [cp.append(name, [{"n": 2}]) for name in names]
                    uses += [cp.load(name) for name in names]
                    answers = await asyncio.gather(*uses, return_exceptions=True)
                    assert {type(one) for one in answers} == {BackendUnavailable}
        finally:
            await asyncio.to_thread(cluster.resume)

    # Replicas may have taken over meanwhile, which takes longer than a second.
    async with open_checkpointer(cluster.url(prefix=prefix)) as handle:
        for name in names:
            data = await handle.load(name)
            assert data is not None
            assert data.version >= 1


async def claim_until_refused(cp: Any, name: str) -> None:
    """Claim new keys, one after another, until the store does not answer."""
    for number in count():
        key = f"{name}-{number}"

        try:
            await cp.record_issued(name, ToolCall(key, "pay", {}, idempotency_key=key))
        except BackendUnavailable:
            return
