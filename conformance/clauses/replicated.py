"""A leader is lost under load: acknowledged writes survive, and no key has two holders.

The nodes are those of the harness. A client stops at its first error; after another
node has taken over, new clients go on with the same threads and keys.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.clauses.linearizable import check_keys, check_threads
from conformance.failure import Failure
from conformance.history.client import use_keys, use_threads
from conformance.history.op import Op
from conformance.history.recorder import Recorder
from conformance.nodes import Nodes
from conformance.slowdown import slowdown
from cpkit import BackendUnavailable, KeepsReceipts

REPLICATED = Level.REPLICATED

TIMEOUT = 4.0
"""Seconds: the option ``timeout`` of the clients."""

BEFORE, AFTER, PACE = 150, 40, 0.004
"""Operations of each client that begins before the fault, those of one that begins at
another time, and seconds between them. The leader fails while the first ones work."""

ROUNDS = 30
"""Writes that are read at every node."""

Fault = Callable[[Nodes, str], Awaitable[None]]


class _Load:
    """Clients of some threads and keys, and what they were told."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.threads = [case.id() for _ in range(2)]
        self.keys = [case.id("key") for _ in range(4)]
        self.places: dict[str, str] = {}
        self.on_threads: list[Recorder] = []
        self.on_keys: list[Recorder] = []
        self.by_checks: list[Op] = []  # a check claims the keys that are free

    def start(self, cps: list[Store], phase: str, count: int) -> asyncio.Task[None]:
        """Start a client of the threads and one of the keys on each handle."""
        chance = self.case.random
        names = [f"{phase} {n}" for n in range(len(cps))]
        self.places |= {name: self.case.id() for name in names}
        on_threads = [Recorder(cp, name) for cp, name in zip(cps, names, strict=True)]
        on_keys = [Recorder(cp, name) for cp, name in zip(cps, names, strict=True)]
        self.on_threads += on_threads
        self.on_keys += on_keys
        work = [
            use_threads(one, Random(chance.random()), self.threads, count, PACE)
            for one in on_threads
        ]
        work += [
            use_keys(one, Random(chance.random()), self.places, self.keys, count, PACE)
            for one in on_keys
        ]

        async def run() -> None:
            for answer in await asyncio.gather(*work, return_exceptions=True):
                assert isinstance(answer, (BackendUnavailable, type(None)))

        return asyncio.create_task(run())

    @property
    def history(self) -> list[Op]:
        return [op for one in (*self.on_threads, *self.on_keys) for op in one.history]

    async def check(self, cp: Store, unsure: tuple[str, ...] = ()) -> None:
        """Count the lost writes, and check the histories.

        Only clients of the phases ``unsure`` may have lost writes. Without such phases
        the histories must be linearizable.
        """
        lost = await self._lost(cp, may_lose=bool(unsure))
        acknowledged = sum(_is_acknowledged_write(op) for op in self.history)
        self.case.acknowledged += acknowledged
        self.case.lost += len(lost)
        wrong = [op for op in lost if not op.client.startswith(unsure)]

        if wrong:
            op = wrong[0]
            raise Failure(
                "every acknowledged write in the store"
                + (", but for those around the fault" if unsure else ""),
                f"{len(wrong)} of {acknowledged} are lost, the first one is "
                f"{op.kind}{op.args} by {op.client!r}",
            )

        if not unsure:
            await check_threads(
                cp, self.threads, [op for one in self.on_threads for op in one.history]
            )
            on_keys = [op for one in self.on_keys for op in one.history]
            history = [*on_keys, *self.by_checks]
            self.by_checks += await check_keys(cp, self.keys, history)

    async def _lost(self, cp: Store, *, may_lose: bool) -> list[Op]:
        """Return the acknowledged writes that are not stored.

        A claim is not lost if it is on record, and holds its key or has failed. If
        nothing may be lost, check that no key has two holders.
        """
        stored: dict[str, set[str]] = {}

        for thread in self.threads:
            loaded = await cp.load(thread)
            messages = loaded.messages if loaded else []
            stored[thread] = {message["token"] for message in messages}

        # First: a store may now complete a claim that it acknowledged before.
        found = [await cp.find_call(key) for key in self.keys]
        holders = {one.call.call_id for one in found if one is not None}
        records = [
            one for place in self.places.values() for one in await cp.list_calls(place)
        ]
        status = {one.call.call_id: one.status for one in records}
        held = Counter(
            one.call.idempotency_key for one in records if one.status != "failed"
        )
        attempts = Counter((one.call.idempotency_key, one.attempt) for one in records)

        for what, count in () if may_lose else (*held.items(), *attempts.items()):
            if count > 1:
                raise Failure("one holder of each key", f"{count} of {what}")

        ended = {
            op.args[0]
            for op in self.history
            if op.kind == "record_result" and op.args[1] == "failed"
        }
        lost = []

        for op in filter(_is_acknowledged_write, self.history):
            match op.kind:
                case "append":
                    kept = stored[op.subject].issuperset(op.args[0])
                case "record_issued":
                    call_id = op.args[0]
                    kept = call_id in status and call_id in holders | ended
                case _:
                    kept = status.get(op.args[0], "issued") != "issued"

            if not kept:
                lost.append(op)

        return lost


def _is_acknowledged_write(op: Op) -> bool:
    """Tell whether the store said that this operation changed something lasting."""
    match op.kind, op.out:
        case "append", ("version", *_):
            return bool(op.args[0])
        case "record_issued", ("claimed",):
            return True
        case "record_result", ("record", *_):
            return True

    return False


async def _lose_a_leader(case: Case, fault: Fault, *, wakes: bool = False) -> None:
    """Make the leader fail under load, several times, and check after each time."""
    nodes = case.harness.nodes()
    assert nodes is not None
    options = {}

    if "timeout" in case.harness.options:
        options["timeout"] = TIMEOUT * slowdown()

    for _ in range(case.times(2)):
        async with AsyncExitStack() as stack:
            cps = [
                await stack.enter_async_context(case.open(**options)) for _ in range(2)
            ]
            load = _Load(case)

            if nodes.may_lose:
                await load.start(cps, "first", AFTER)
                await nodes.restore()  # waits until all nodes are in sync

            before = load.start(cps, "before", BEFORE)
            await asyncio.sleep(0.05 + case.random.random() * 0.2)
            leader = await nodes.leader(load.threads[0])

            try:
                await fault(nodes, leader)
                await asyncio.sleep(0.05 + case.random.random() * 0.1)
                await nodes.take_over(leader)
                after = load.start(cps, "after", AFTER)

                if wakes:
                    await asyncio.sleep(case.random.random() * 0.1)
                    await nodes.resume(leader)
                    await load.start(cps, "late", AFTER)

                await asyncio.gather(before, after)
            finally:
                await nodes.restore()

            # A handle that lost its leader works with the new one.
            thread = case.id()

            for cp in cps:
                assert await cp.append(thread, [{}]) == len(await cp.read(thread))

            unsure = ("before", "after") if wakes else ("before",)
            await load.check(cps[0], unsure if nodes.may_lose else ())
            restored = _Load(case)
            await restored.start(cps, "restored", AFTER)
            await restored.check(cps[1])

        told = sum(_is_acknowledged_write(op) for op in load.history)
        assert told, "no write was acknowledged"


@clause(
    "replicated.leader-killed", "nodes", KeepsReceipts, level=REPLICATED, deadline=180
)
async def leader_killed(case: Case) -> None:
    """Acknowledged writes survive SIGKILL of the leader under load."""
    await _lose_a_leader(case, lambda nodes, leader: nodes.kill(leader))


@clause(
    "replicated.leader-wakes-late",
    "nodes",
    KeepsReceipts,
    level=REPLICATED,
    deadline=180,
)
async def leader_wakes_late(case: Case) -> None:
    """A leader that was paused and replaced acknowledges nothing when it wakes."""
    await _lose_a_leader(case, lambda nodes, leader: nodes.pause(leader), wakes=True)


@clause(
    "replicated.leader-cut-off", "nodes", KeepsReceipts, level=REPLICATED, deadline=180
)
async def leader_cut_off(case: Case) -> None:
    """What a leader acknowledges while it is cut off from the others survives."""

    async def cut_off(nodes: Nodes, leader: str) -> None:
        for other in await nodes.names():
            if other != leader:
                await nodes.cut(leader, other)

    await _lose_a_leader(case, cut_off)


@clause(
    "replicated.reads-at-other-nodes",
    "nodes",
    KeepsReceipts,
    level=REPLICATED,
    deadline=120,
)
async def reads_at_other_nodes(case: Case) -> None:
    """What one node acknowledged is in the next read at every other node."""
    nodes = case.harness.nodes()
    assert nodes is not None
    names, at_node = await nodes.names(), case.harness.at_node
    at = [found for name in names if (found := at_node(name))]

    if len(at) < 2:
        case.skip("the harness opens no handles at named nodes")

    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(one.open()) for one in at]
        cps: list[Any] = opened
        thread = case.id()

        for n in range(case.times(ROUNDS)):
            writer, call = cps[n % len(cps)], case.call()
            version = await writer.append(thread, [{"n": n}])
            await writer.record_issued(thread, call)

            for cp in cps:
                loaded = await cp.load(thread)
                assert loaded is not None, f"round {n}, at another node"
                assert loaded.version == version, f"round {n}, at another node"
                holder = await cp.find_call(call.idempotency_key)
                assert holder is not None, f"round {n}, at another node"

        load = _Load(case)
        await load.start(cps, "nodes", AFTER)

        for cp in cps:
            await load.check(cp)
