"""A store over the slots of a real cluster: layout, lists, watching, and URLs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from redis.asyncio import ConnectionPool
from redis.crc import key_slot

import cpkit_redis.cluster
from cpkit import (
    BackendUnavailable,
    CorruptThread,
    InvalidURL,
    ToolCall,
    open_checkpointer,
)
from cpkit.driver import Append, StoreFailure, handle_over
from cpkit_redis import ClusterStore
from cpkit_redis.cluster import ClusterOptions, SpreadStore
from cpkit_redis.schema import SHARDS, Layout
from tests.model import check_moves, check_outcomes
from tests.redis.test_access import documented, everything
from tests.redis.test_keys import HOSTILE, fill
from tests.servers.redis import RedisServer, no_tls
from tests.servers.redis_cluster import RedisCluster, shared_cluster

NEVER = 86_400.0


@pytest.fixture(scope="session")
def cluster() -> RedisCluster:
    return shared_cluster()


@pytest.fixture
async def cp(cluster: RedisCluster, prefix: str) -> AsyncIterator[Any]:
    async with open_checkpointer(cluster.url(prefix=prefix)) as handle:
        yield handle


def needs_redis_7(cluster: RedisCluster) -> None:
    """Skip a test of listening: Redis 6 has no channels of a slot."""
    version = cluster.ask(cluster.nodes[0], "INFO", "server")["redis_version"]

    if version.startswith("6."):
        pytest.skip("needs Redis 7")


def keys_of(cluster: RedisCluster, prefix: str) -> dict[RedisServer, list[str]]:
    """Return the keys that each primary has of a store."""
    found = {}

    for node in cluster.nodes:
        if cluster.ask(node, "ROLE")[0] == b"master":
            keys = cluster.ask(node, "KEYS", f"{prefix}:*")
            found[node] = sorted(key.decode() for key in keys)

    return found


@pytest.mark.parametrize(
    ("tag", "seed"),
    [
        pytest.param(tag, seed, marks=() if seed == 12 else pytest.mark.long)
        for tag in (False, True)
        for seed in range(20)
    ],
)
async def test_every_outcome_is_that_of_the_store_in_memory(
    cluster: RedisCluster, prefix: str, tag: bool, seed: int
) -> None:
    """Random writes give equal outcomes, and leave equal states."""
    name = f"{{{prefix}}}" if tag else prefix
    options = ClusterOptions(prefix=name)
    await check_outcomes(ClusterStore.from_url(cluster.url(), options), seed)


async def test_a_thread_is_moved_exactly(cluster: RedisCluster, prefix: str) -> None:
    """Between the slots, and to a store in one slot."""

    def handle(name: str) -> Any:
        options = ClusterOptions(prefix=name)
        return handle_over(ClusterStore.from_url(cluster.url(), options))

    async with handle(prefix) as there, handle(f"{{{prefix}}}") as third:
        await check_moves(there, third)
        await there.delete_thread("t", forget_keys=True)
        dump = await third.dump_thread("t")
        assert dump is not None
        await there.restore_thread(dump)
        assert await there.dump_thread("t") == dump


async def test_attempts_in_any_order_are_restored(cp: Any) -> None:
    """A dump lists calls in the order of claims; another tool may order them."""
    for n in range(3):
        await cp.record_issued("t", ToolCall(f"c{n}", "pay", {}, "key"))
        await cp.record_result("t", f"c{n}", "declined", success=False)

    dump = await cp.dump_thread("t")
    mixed = replace(dump, calls=[dump.calls[n] for n in (1, 0, 2)])
    await cp.delete_thread("t", forget_keys=True)
    await cp.restore_thread(mixed)
    again = await cp.record_issued("u", ToolCall("d", "pay", {}, "key"))
    assert again is None
    assert (await cp.find_call("key")).attempt == 4


@pytest.mark.parametrize("is_refreshing", [False, True])
async def test_a_write_that_was_not_sent_in_time_says_so(
    cluster: RedisCluster,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    is_refreshing: bool,
) -> None:
    """Nodes that are not reached in time, alone or in one batch, got nothing."""

    async def hang(*_: object) -> None:
        await asyncio.sleep(60)

    async with open_checkpointer(cluster.url(prefix=prefix, timeout=0.5)) as handle:
        cp: Any = handle
        nodes = cp.store._server
        await asyncio.gather(*(cp.append(f"t{n}", [{}]) for n in range(9)))

        with monkeypatch.context() as patch:
            patch.setattr(ConnectionPool, "ensure_connection", hang)

            for server in nodes._servers.values():
                while server._idle:
                    await server._idle.pop().disconnect()

            if is_refreshing:
                await nodes.reconnect()

            failures = await asyncio.gather(
                cp.record_issued("t", ToolCall("c", "pay", {}, "key")),
                *(cp.append(f"t{n}", [{}]) for n in range(9)),
                return_exceptions=True,
            )

        for failed in failures:
            assert isinstance(failed, BackendUnavailable)
            assert not failed.maybe_applied, failed

        for n in range(9):
            assert await cp.append(f"t{n}", [], expected_version=1) == 1


async def test_threads_spread_over_all_nodes(
    cp: Any, cluster: RedisCluster, prefix: str
) -> None:
    """The keys of a thread are in one slot, and each primary has threads."""
    await asyncio.gather(*(fill(cp, thread) for thread in HOSTILE))
    found = keys_of(cluster, prefix)
    assert len(found) == 3
    assert all(len(keys) > 20 for keys in found.values())
    listed = await cp.list_threads(limit=1000)
    assert [info.thread_id for info in listed] == sorted(HOSTILE)

    for thread in HOSTILE:
        await cp.delete_thread(thread, forget_keys=True)

    assert await cp.list_threads(erased=True) == []
    left = [key for keys in keys_of(cluster, prefix).values() for key in keys]
    assert left == [f"{prefix}:{{0}}:schema"]


async def test_a_tag_keeps_the_store_in_one_slot(
    cluster: RedisCluster, prefix: str
) -> None:
    """Every key has the slot of the tag, and an operation is one call."""
    tagged = f"{{{prefix}}}x"

    async with open_checkpointer(cluster.url(prefix=tagged)) as handle:
        cp: Any = handle
        await asyncio.gather(*(fill(cp, thread) for thread in HOSTILE))
        keys = [key for keys in keys_of(cluster, tagged).values() for key in keys]
        assert len(keys) > 4 * len(HOSTILE)
        assert {key_slot(key.encode()) for key in keys} == {key_slot(prefix.encode())}
        assert type(cp.store) is ClusterStore


async def test_the_list_is_in_order_by_page(cp: Any) -> None:
    """Pages of any size have the same threads in the same order."""
    names = [f"t{n:04}" for n in range(600)]
    await asyncio.gather(*(cp.append(name, [{}]) for name in names))

    for limit in (1, 2, 63, 64, 65, 599, 600, 5000):
        listed = await cp.list_threads(limit=limit)
        assert [info.thread_id for info in listed] == names[:limit]

    listed = await cp.list_threads(prefix="t01", after="t0150", limit=5000)
    assert [info.thread_id for info in listed] == names[151:200]
    await asyncio.gather(*(cp.delete_thread(name) for name in names[::2]))
    assert [info.thread_id for info in await cp.list_threads(limit=9)] == names[1:19:2]


async def test_notifications_wake(cluster: RedisCluster, prefix: str) -> None:
    """A change of another handle wakes without a poll: the channel is of one node."""
    url = cluster.url(prefix=prefix)

    async with (
        open_checkpointer(url, poll=NEVER) as handle,
        open_checkpointer(url) as other,
    ):
        cp: Any = handle
        channel = f"{prefix}:changes"
        node = cluster.primary_of(channel)

        async with cp.watch("t") as changes:
            needs_redis_7(cluster)

            while not cluster.ask(node, "PUBSUB", "SHARDNUMSUB", channel)[1]:  # noqa: ASYNC110  # the server has no event
                await asyncio.sleep(0.01)

            for n in range(3):
                await other.append("t", [{"n": n}])
                assert await anext(changes) == "t"


async def test_a_listener_ends_while_it_waits_for_the_map_of_slots(
    cluster: RedisCluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing cancels it, and a cancelled listener does not listen again."""
    channel, hangs = f"{prefix}:changes", asyncio.Event()
    node = cluster.primary_of(channel)

    needs_redis_7(cluster)

    async def hang(*_: object) -> None:
        hangs.set()
        await asyncio.sleep(60)

    async with open_checkpointer(cluster.url(prefix=prefix), poll=NEVER) as handle:
        cp: Any = handle

        async with cp.watch("t"):
            while not cluster.ask(node, "PUBSUB", "SHARDNUMSUB", channel)[1]:  # noqa: ASYNC110  # the server has no event
                await asyncio.sleep(0.01)

            [listener] = [
                task
                for task in asyncio.all_tasks()
                if "Watching._listen" in repr(task.get_coro())
            ]

            for server in cp.store._server._servers.values():
                for connection in server._idle:
                    await connection.disconnect()

            monkeypatch.setattr(ConnectionPool, "ensure_connection", hang)
            cluster.ask(node, "CLIENT", "KILL", "TYPE", "pubsub")
            await hangs.wait()

    monkeypatch.undo()
    await asyncio.wait([listener], timeout=5)
    assert listener.cancelled()


async def test_connections_to_nodes_that_left_are_closed(
    cluster: RedisCluster, prefix: str
) -> None:
    """When the map of slots is read again; those in use are left."""
    store = SpreadStore(cluster.url(), ClusterOptions(prefix=prefix))

    async with handle_over(store) as cp:
        nodes: Any = store._server
        await cp.append("t", [{}])
        [(_, port), *_] = nodes._servers
        left = nodes._server(("localhost", port))
        await left.ask(b"", ("PING",))
        in_use = left._idle.pop()
        await left.ask(b"", ("PING",))
        nodes._is_old = True
        await cp.append("t", [{}])
        assert [one.is_connected for one in left._idle] == [False]
        assert in_use.is_connected
        left._idle.append(in_use)
        assert all(
            one.is_connected
            for place, server in nodes._servers.items()
            if place != ("localhost", port)
            for one in server._idle
        )


async def test_a_node_that_left_the_cluster_has_no_map_of_slots(
    cluster: RedisCluster,
    servers: Callable[..., RedisServer],
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers with an empty map, and the next node is asked."""
    left = ("127.0.0.1", servers(settings={"cluster-enabled": "yes"}).port)
    asked = []

    def ask_it_first(places: list[tuple[str, int]]) -> None:
        places.sort(key=lambda place: place != left)
        asked.append(places[0])

    monkeypatch.setattr("cpkit_redis.nodes.random.shuffle", ask_it_first)

    async with open_checkpointer(cluster.url(prefix=prefix, timeout=5)) as handle:
        cp: Any = handle
        nodes = cp.store._server
        nodes._seeds = [left]  # the only node of the URL
        asked.clear()
        await nodes.reconnect()
        assert await cp.append("t", [{}]) == 1
        assert asked == [left]


async def test_flushed_scripts_are_sent_again(cp: Any, cluster: RedisCluster) -> None:
    """On every node, in the middle of a claim too."""
    for n in range(10):
        for node in cluster.nodes:
            cluster.ask(node, "SCRIPT", "FLUSH")

        assert await cp.append("t", [{}], expected_version=n) == n + 1
        assert await cp.record_issued("t", ToolCall(f"c{n}", "x", {}, f"k{n}")) is None


async def test_a_call_that_is_not_sent_again_is_not_the_outcome_of_others(
    cluster: RedisCluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node has lost the script, and the time ends before it gets it again."""
    store = SpreadStore(cluster.url(), ClusterOptions(prefix=prefix))

    async with handle_over(store):
        shards = {one: store._layout.shard_of(one) for one in map(str, range(20))}
        nodes = {one: cluster.primary_of(shard) for one, shard in shards.items()}
        lost = nodes["0"]
        other = next(one for one, node in nodes.items() if node is not lost)
        await store.commit([Append(one, [b"{}"], None) for one in ("0", other)])
        cluster.ask(lost, "SCRIPT", "FLUSH")
        ask_each, calls = store._server.ask_each, 0

        async def once(*args: Any, **kwargs: Any) -> list[Any]:
            nonlocal calls
            calls += 1

            if calls > 1:
                raise StoreFailure("not sent", "no connection in time")

            return await ask_each(*args, **kwargs)

        monkeypatch.setattr(store._server, "ask_each", once)
        batch = [Append(one, [b"{}"], None) for one in ("0", other)]
        failed, version = await store.commit(batch)
        assert isinstance(failed, StoreFailure)
        assert failed.fate == "not sent"
        assert version == 2


async def test_a_claim_that_was_confirmed_and_deleted_is_not_made_again(
    cp: Any, cluster: RedisCluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another caller confirms it, and a third deletes the thread, before its answer."""
    store = SpreadStore(cluster.url(), ClusterOptions(prefix=prefix))
    confirm = store._confirm

    async def late(*args: Any) -> Any:
        monkeypatch.undo()
        record = await cp.find_call("k")
        assert record.status == "issued"
        await cp.delete_thread("t", forget_keys=True)
        return await confirm(*args)

    monkeypatch.setattr(store, "_confirm", late)

    async with handle_over(store) as claiming:
        with pytest.raises(BackendUnavailable) as caught:
            await claiming.record_issued("t", ToolCall("c", "pay", {}, "k"))

    assert caught.value.maybe_applied
    assert await cp.find_call("k") is None
    assert await cp.list_calls("t") == []


@pytest.mark.parametrize("member", [b"\xff\0c\0aa", b"nonsense"])
async def test_a_damaged_member_of_a_register_is_corruption(
    cp: Any, cluster: RedisCluster, prefix: str, member: bytes
) -> None:
    """It names no thread. It raises ``CorruptThread``, and stays as it is."""
    await cp.record_issued("t", ToolCall("c", "pay", {}, "k"))
    shard = Layout(prefix, SHARDS).shard_of("k")
    register, node = shard + b"k:k", cluster.primary_of(shard)
    cluster.ask(node, "ZADD", register, 5, member)

    with pytest.raises(CorruptThread, match="not a member"):
        await cp.find_call("k")

    with pytest.raises(CorruptThread, match="not a member"):
        await cp.record_issued("u", ToolCall("d", "pay", {}, "k"))

    assert cluster.ask(node, "ZSCORE", register, member) == 5


async def test_the_documented_permissions_are_enough(
    cluster: RedisCluster, prefix: str
) -> None:
    """A user with the rules of both manuals can use every operation and listen."""
    manual = cpkit_redis.cluster.__doc__ or ""
    found = re.search(r"ACL SETUSER agent ((?:.|\n)*?)\n\n", manual)
    assert found
    needs_redis_7(cluster)
    rules = ["on", ">password", *documented(), *found[1].split()]
    name = uuid4().hex
    own = [rule.replace("cpkit:", f"{prefix}:") for rule in rules]

    for node in cluster.nodes:
        cluster.ask(node, "ACL", "SETUSER", name, *own)

    url = cluster.url(prefix=prefix).replace("://", f"://{name}:password@")

    async with open_checkpointer(url, poll=NEVER) as handle:
        cp: Any = handle

        async with cp.watch("t") as changes:
            await everything(cp)
            assert await anext(changes) == "t"

    for node in cluster.nodes:
        denied = cluster.ask(node, "ACL", "LOG")
        mine = [entry for entry in denied if entry["username"] == name]
        # redis-py introduces itself, and does without.
        assert {str(one["object"]).partition("|")[0] for one in mine} <= {"client"}
        cluster.ask(node, "ACL", "DELUSER", name)


async def test_a_wrong_password_fails_at_once(cluster: RedisCluster) -> None:
    """The handle does not retry what would be refused again."""
    url = cluster.url(connect_timeout=60).replace("://", "://stranger:wrong@")

    with pytest.raises(BackendUnavailable, match="(?i)password") as caught:
        async with open_checkpointer(url):
            pytest.fail("it opened")

    assert not caught.value.maybe_applied


async def test_a_single_server_is_refused(
    servers: Callable[..., RedisServer],
) -> None:
    """And nothing is written."""
    server = servers()
    url = server.url.replace("redis://", "redis+cluster://").removesuffix("/0")

    with pytest.raises(BackendUnavailable, match="cluster support disabled"):
        async with open_checkpointer(url):
            pytest.fail("it opened")


async def test_a_cluster_is_not_opened_as_a_single_server(
    cluster: RedisCluster,
) -> None:
    """The message has the scheme to use."""
    with pytest.raises(BackendUnavailable, match=r"redis\+cluster://"):
        async with open_checkpointer(cluster.nodes[0].url):
            pytest.fail("it opened")


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("redis+cluster://", "one or more nodes"),
        ("redis+cluster://a:1,,b:2", "one or more nodes"),
        ("redis+cluster://a:1/3", "one database"),
        ("redis+cluster://a:1?db=3", "one database"),
        ("redis+cluster://a:1,b:99999", "redis-py"),
        ("redis+cluster://a:1?prefix={a", "prefix"),
        ("redis+cluster://a:1?prefix={a}{b}", "prefix"),
        ("redis+cluster://a:1?prefix={}", "prefix"),
    ],
)
def test_a_url_that_cannot_be_used_says_so(url: str, advice: str) -> None:
    """``InvalidURL`` is raised before any connection is made."""
    with pytest.raises(InvalidURL, match=re.escape(advice)):
        open_checkpointer(url)


def test_a_handle_shows_its_nodes_without_the_password() -> None:
    """Scheme, hosts, ports and prefix."""
    handle = open_checkpointer("rediss+cluster://u:secret@a,b:7000?prefix=p")
    assert repr(handle) == "<Handle rediss+cluster://a:6379,b:7000?prefix=p>"
    store: Any = handle
    assert type(store.store) is SpreadStore


@pytest.mark.long
async def test_tls_is_spoken_with_every_node(prefix: str) -> None:
    """With the new primary of a failover too; the certificates are checked."""
    if reason := no_tls():
        pytest.skip(f"needs TLS: {reason}")

    with RedisCluster(node_timeout=1.0, tls=True) as cluster:
        url = cluster.url(prefix=prefix)

        async with open_checkpointer(url) as handle:
            cp: Any = handle
            await asyncio.gather(*(fill(cp, thread) for thread in HOSTILE))
            await asyncio.to_thread(cluster.nodes[0].kill)
            await asyncio.gather(*(cp.append(thread, [{}]) for thread in HOSTILE))
            listed = await cp.list_threads(limit=1000)
            assert [info.thread_id for info in listed] == sorted(HOSTILE)

        unknown = f"rediss+cluster://127.0.0.1:{cluster.nodes[-1].tls_port}"

        with pytest.raises(BackendUnavailable, match=r"(?i)certificate"):
            async with open_checkpointer(f"{unknown}?connect_timeout=1"):
                pytest.fail("it opened")
