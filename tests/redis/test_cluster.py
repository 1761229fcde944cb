"""A store in one slot of a real cluster: its node, watching, permissions, and URLs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import pytest

import cpkit_redis.cluster
from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, InvalidURL, open_checkpointer
from cpkit_redis import ClusterStore
from cpkit_redis.cluster import ClusterOptions
from cpkit_redis.schema import base_of
from tests.model import check_outcomes
from tests.redis.test_access import documented, everything
from tests.redis.test_keys import HOSTILE, fill
from tests.servers.redis import RedisServer, no_tls
from tests.servers.redis_cluster import RedisCluster, shared_cluster
from tests.sweeps import sweep

NEVER = 86_400.0


@pytest.fixture(scope="session")
def cluster() -> RedisCluster:
    return shared_cluster()


@pytest.fixture
async def cp(cluster: RedisCluster, prefix: str) -> AsyncIterator[Any]:
    async with open_checkpointer(cluster.url(prefix=prefix)) as handle:
        yield handle


@pytest.mark.parametrize("seed", sweep(range(20), [12]))
async def test_every_outcome_is_that_of_the_store_in_memory(
    cluster: RedisCluster, prefix: str, seed: int
) -> None:
    """Random writes give equal outcomes, and leave equal states."""
    store = ClusterStore(cluster.url(), ClusterOptions(prefix=prefix))
    await check_outcomes(store, seed)


async def test_a_store_is_on_one_node(
    cp: Any, cluster: RedisCluster, prefix: str
) -> None:
    """All of it, with any ids; another store may be on another node."""
    await asyncio.gather(*(fill(cp, thread) for thread in HOSTILE))
    listed = await cp.list_threads(limit=1000)
    assert [info.thread_id for info in listed] == sorted(HOSTILE)
    found = {
        node: len(cluster.ask(node, "KEYS", f"{{{prefix}}}:*"))
        for node in cluster.nodes
        if cluster.ask(node, "ROLE")[0] == b"master"
    }
    owner = cluster.primary_of(base_of(prefix))
    assert [node for node, keys in found.items() if keys] == [owner]
    assert found[owner] > 5 * len(HOSTILE)


async def test_a_write_that_was_not_sent_in_time_says_so(
    cluster: RedisCluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it looks for the node of its slot, and while it connects."""

    async def hang(*_: object) -> None:
        await asyncio.sleep(60)

    async with open_checkpointer(
        cluster.url(prefix=prefix, timeout=0.5 * slowdown())
    ) as handle:
        cp: Any = handle
        nodes = cp.store._server
        await cp.append("t", [{}])

        for name in ("_find", "_connect"):
            with monkeypatch.context() as patch:
                patch.setattr(nodes, name, hang)
                await nodes.reconnect()

                with pytest.raises(BackendUnavailable) as caught:
                    await cp.append("t", [{}])

                assert not caught.value.maybe_applied

        assert await cp.append("t", [], expected_version=1) == 1


async def test_notifications_wake(cluster: RedisCluster, prefix: str) -> None:
    """A change of another handle wakes without a poll: the channel is of one node."""
    url = cluster.url(prefix=prefix)

    async with (
        open_checkpointer(url, poll=NEVER) as handle,
        open_checkpointer(url) as other,
    ):
        cp: Any = handle
        channel = f"{{{prefix}}}:changes"
        node = cluster.primary_of(channel)

        async with cp.watch("t") as changes:
            while not cluster.ask(node, "PUBSUB", "NUMSUB", channel)[1]:  # noqa: ASYNC110  # the server has no event
                await asyncio.sleep(0.01)

            for n in range(3):
                await other.append("t", [{"n": n}])
                assert await anext(changes) == "t"


async def test_a_node_that_left_the_cluster_has_no_map_of_slots(
    cluster: RedisCluster,
    servers: Callable[..., RedisServer],
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers with an empty map, and the next node is asked."""
    left = ("127.0.0.1", servers(settings={"cluster-enabled": "yes"}).port)
    asked = []

    def ask_it_first(places: list[tuple[str, int]], _: int) -> list[tuple[str, int]]:
        places = sorted({left, *places}, key=lambda place: place != left)
        asked.append(places[0])
        return places

    monkeypatch.setattr("cpkit_redis.cluster.random.sample", ask_it_first)

    async with open_checkpointer(cluster.url(prefix=prefix, timeout=5)) as cp:
        assert await cp.append("t", [{}]) == 1
        assert asked == [left]


async def test_the_documented_permissions_are_enough(
    cluster: RedisCluster, prefix: str
) -> None:
    """A user with the rules of both manuals can use every operation and listen."""
    rules = ["on", ">password", *documented(), "+cluster|slots"]
    assert rules[-1] in (cpkit_redis.cluster.__doc__ or "")
    name = uuid4().hex
    own = [rule.replace("{cpkit}", f"{{{prefix}}}") for rule in rules]

    for node in cluster.nodes:
        cluster.ask(node, "ACL", "SETUSER", name, *own)

    url = cluster.url(prefix=prefix).replace("://", f"://{name}:password@")

    async with open_checkpointer(url, poll=NEVER) as handle:
        cp: Any = handle

        async with cp.watch("t") as changes:
            await everything(cp)
            assert await anext(changes) == "t"

    for node in cluster.nodes:
        denied = [
            {text(key): text(value) for key, value in entry.items()}
            for entry in cluster.ask(node, "ACL", "LOG")
        ]
        mine = [entry["object"] for entry in denied if entry["username"] == name]
        # redis-py introduces itself, and does without.
        assert {one.partition("|")[0] for one in mine} <= {"client"}
        cluster.ask(node, "ACL", "DELUSER", name)


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


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


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("redis+cluster://", "one or more nodes"),
        ("redis+cluster://a:1,,b:2", "one or more nodes"),
        ("redis+cluster://a:1/3", "one database"),
        ("redis+cluster://a:1?db=3", "one database"),
        ("redis+cluster://a:1,b:99999", "the port is a number"),
        ("redis+cluster://a:1?prefix={a}", "prefix"),
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
            owner = cluster.primary_of(base_of(prefix))
            await asyncio.to_thread(owner.kill)
            await asyncio.gather(*(cp.append(thread, [{}]) for thread in HOSTILE))
            listed = await cp.list_threads(limit=1000)
            assert [info.thread_id for info in listed] == sorted(HOSTILE)

        running = next(node for node in cluster.nodes if node.running)
        unknown = f"rediss+cluster://127.0.0.1:{running.tls_port}"

        with pytest.raises(BackendUnavailable, match=r"(?i)certificate"):
            async with open_checkpointer(f"{unknown}?connect_timeout=1"):
                pytest.fail("it opened")
