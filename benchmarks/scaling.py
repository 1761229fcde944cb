"""Figures beyond one server: ``python -m benchmarks.scaling``, for docs/scaling.md.

``nodes``
    Operations on threads that are spread over several prefixes of a Redis Cluster, of 1
    and 3 primaries without replicas. All nodes share this machine.
``failover``
    The seconds in which a thread takes no writes after its leader was killed.

Stores take turns operation by operation, so that a disturbance affects all of them. A
part is measured several times; a figure is the median of these runs, with the smallest
and the largest one. The output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from hashlib import sha256
from itertools import count
from statistics import median
from time import monotonic, perf_counter
from typing import Any
from uuid import uuid4

from conformance import Harness
from cpkit import BackendUnavailable, ThreadInfo, ToolCall, open_checkpointer
from cpkit.tools.benchmark.messages import message
from tests.servers import postgres_pair
from tests.servers.galera import GaleraCluster, GaleraHarness
from tests.servers.redis_cluster import ClusterHarness, RedisCluster

PRIMARIES = (1, 3)
PREFIXES = 12

# Seconds: cluster-node-timeout of Redis Clusters that lose a primary.
NODE_TIMEOUTS = (1, 5, 15)

# Seconds: evs.suspect_timeout of Galera clusters that lose a node. 5 is the default.
SUSPECT_TIMEOUTS = (1, 5)

# Turns of one operation at a time, and of a crowd of tasks.
TURNS, CROWDS, TASKS = 200, 30, 64

# Threads whose list is read, ids of a page, messages of the thread that is loaded.
LISTED, PAGE, LOADED = 2_000, 100, 100

Figures = dict[str, dict[str, float]]
Measure = Callable[[], Coroutine[Any, Any, Figures]]


def main() -> None:
    """Measure the parts that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(_PARTS))
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    found = {}

    for part in options.parts or _PARTS:
        if part not in _PARTS:
            parser.error(f"unknown part {part!r}; known are: {', '.join(_PARTS)}")

        with _PARTS[part]() as measure:
            runs = [asyncio.run(measure()) for _ in range(options.runs)]

        found[part] = _summary(runs)

    sys.stdout.write(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def _summary(runs: Sequence[Figures]) -> dict[str, dict[str, str]]:
    """Return each figure as its median, with the smallest and the largest one."""

    def told(values: list[float]) -> str:
        return f"{median(values):.3g} ({min(values):.3g} – {max(values):.3g})"

    return {
        name: {what: told([run[name][what] for run in runs]) for what in runs[0][name]}
        for name in runs[0]
    }


@contextmanager
def _nodes() -> Iterator[Measure]:
    with ExitStack() as stack:
        clusters = {
            f"{n} primaries": RedisCluster(primaries=n, replicas=0) for n in PRIMARIES
        }
        stores = {
            name: prefixes_of(stack.enter_context(cluster))
            for name, cluster in clusters.items()
        }
        yield lambda: _compared(stores)


@contextmanager
def _failover() -> Iterator[Measure]:
    with ExitStack() as stack:
        engines = {"postgres-pair": postgres_pair.harness()}

        for seconds in NODE_TIMEOUTS:
            # As a setting: `RedisCluster` makes its own longer on a busy machine.
            milliseconds = f"{seconds * 1000}"
            cluster = RedisCluster(links=True, cluster_node_timeout=milliseconds)
            stack.enter_context(cluster)
            name = f"redis-cluster, cluster-node-timeout {seconds} s"
            engines[name] = ClusterHarness(cluster.url(), cluster)

        for seconds in SUSPECT_TIMEOUTS:
            galera = stack.enter_context(GaleraCluster(seconds))
            name = f"galera, evs.suspect_timeout {seconds} s"
            engines[name] = GaleraHarness(galera.url(), galera)

        async def measure() -> Figures:
            return {
                name: {"seconds": await _outage(harness)}
                for name, harness in engines.items()
            }

        yield measure


_PARTS = {"nodes": _nodes, "failover": _failover}


def prefixes_of(cluster: RedisCluster) -> list[str]:
    """Return the URLs of the stores over which threads are spread."""
    return [cluster.url(prefix=f"part-{n}") for n in range(PREFIXES)]


class Spread:
    """Threads over several stores, by the recipe of docs/scaling.md."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    @classmethod
    async def opened(cls, urls: Sequence[str], stack: AsyncExitStack) -> Spread:
        return cls(
            [await stack.enter_async_context(open_checkpointer(u)) for u in urls]
        )

    def part_of(self, thread_id: str) -> Any:
        number = int.from_bytes(sha256(thread_id.encode()).digest()[:8], "big")
        return self.parts[number % len(self.parts)]

    async def append(self, thread_id: str, messages: Any) -> None:
        await self.part_of(thread_id).append(thread_id, messages)

    async def load(self, thread_id: str) -> Any:
        return await self.part_of(thread_id).load(thread_id)

    async def record_issued(self, thread_id: str, call: ToolCall) -> Any:
        return await self.part_of(thread_id).record_issued(thread_id, call)

    async def record_result(self, thread_id: str, call_id: str, result: Any) -> None:
        await self.part_of(thread_id).record_result(thread_id, call_id, result)

    async def list_threads(self, **page: Any) -> list[Any]:
        pages = await asyncio.gather(*(p.list_threads(**page) for p in self.parts))
        found = sorted((info for page in pages for info in page), key=_by_id)
        return found[: page["limit"]]


def _by_id(info: ThreadInfo) -> str:
    return info.thread_id


async def _compared(stores: Mapping[str, Sequence[str]]) -> Figures:
    """Return microseconds on the first store, and ratios of the others to them."""
    async with AsyncExitStack() as stack:
        opened = [
            await _Store.filled(await Spread.opened(urls, stack))
            for urls in stores.values()
        ]
        took: list[dict[str, float]] = [{} for _ in opened]

        for name, (turns, each) in _OPERATIONS.items():
            seconds: list[list[float]] = [[] for _ in opened]

            for turn in range(turns):
                for place in range(len(opened)):
                    at = (turn + place) % len(opened)
                    start = perf_counter()
                    await getattr(opened[at], name)()
                    seconds[at].append((perf_counter() - start) / each)

            for found, of_store in zip(took, seconds, strict=True):
                found[name] = median(of_store[len(of_store) // 10 :]) * 1e6

    first, *others = stores
    return {f"{first}, µs": took[0]} | {
        f"{other}, ratio": {name: found[name] / took[0][name] for name in found}
        for other, found in zip(others, took[1:], strict=True)
    }


class _Store:
    """The operations that are compared."""

    def __init__(self, cp: Any) -> None:
        self.cp = cp
        self.thread = uuid4().hex
        self.crowd = [uuid4().hex for _ in range(TASKS)]
        self.numbers = count()

    @classmethod
    async def filled(cls, cp: Any) -> _Store:
        """Return a store with a thread to load, and a list of threads."""
        store = cls(cp)
        await cp.append(store.thread, [message(n) for n in range(LOADED)])

        for _ in range(LISTED // TASKS):
            await store.new_threads_at_once()

        return store

    async def append(self) -> None:
        await self.cp.append(self.crowd[0], [message(0)])

    async def append_first(self) -> None:
        await self.cp.append(uuid4().hex, [message(0)])

    async def load(self) -> None:
        assert len((await self.cp.load(self.thread)).messages) == LOADED

    async def claim_and_result(self) -> None:
        name = f"call {next(self.numbers)}"
        call = ToolCall(name, "charge", {}, f"{self.thread} {name}")
        await self.cp.record_issued(self.crowd[0], call)
        await self.cp.record_result(self.crowd[0], name, {})

    async def page_of_threads(self) -> None:
        await self.cp.list_threads(after=uuid4().hex, limit=PAGE)

    async def appends_at_once(self) -> None:
        await self._appended(self.crowd)

    async def new_threads_at_once(self) -> None:
        await self._appended([uuid4().hex for _ in range(TASKS)])

    async def _appended(self, threads: Sequence[str]) -> None:
        await asyncio.gather(*(self.cp.append(t, [message(0)]) for t in threads))


# How many turns each operation has, and how many it counts for.
_OPERATIONS = {
    "append": (TURNS, 1),
    "append_first": (TURNS, 1),
    "load": (TURNS, 1),
    "claim_and_result": (TURNS, 1),
    "page_of_threads": (TURNS, 1),
    "appends_at_once": (CROWDS, TASKS),
    "new_threads_at_once": (CROWDS, TASKS),
}


async def _outage(harness: Harness) -> float:
    """Kill the leader of a thread; return how long no append to it is acknowledged."""
    nodes = harness.nodes()
    assert nodes is not None

    async with harness.open(timeout=60.0) as cp:
        thread = f"outage-{random.getrandbits(64):x}"
        acknowledged: list[float] = []

        async def write() -> None:
            for n in count():
                try:
                    await cp.append(thread, [message(n)])
                    acknowledged.append(monotonic())
                except BackendUnavailable:
                    await asyncio.sleep(0.01)

        async def more() -> None:
            wanted = len(acknowledged) + 20

            while len(acknowledged) < wanted:  # noqa: ASYNC110  # a task of this function
                await asyncio.sleep(0.01)

        writing = asyncio.create_task(write())
        await more()
        leader = await nodes.leader(thread)
        before = len(acknowledged)
        await nodes.kill(leader)
        await nodes.take_over(leader)
        await more()
        writing.cancel()
        await asyncio.wait([writing])
        await nodes.restore()

    times = acknowledged[before - 1 :]
    return max(b - a for a, b in zip(times, times[1:], strict=False))


if __name__ == "__main__":
    main()
