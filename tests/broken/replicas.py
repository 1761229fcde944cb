"""Stores of two nodes that lose writes when their leader is lost."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, fields
from itertools import count
from typing import Any, ClassVar

from conformance import Harness, Nodes
from conformance.harness import find
from cpkit import BackendUnavailable
from tests.broken.reference import Reference, Tables
from tests.broken.store import breaks


def _copied(tables: Tables) -> Tables:
    kept = {one.name for one in fields(Tables)} - {"lock", "watchers"}
    return Tables(**{name: deepcopy(getattr(tables, name)) for name in kept})


class Pair(Nodes):
    """Two nodes that have the same tables, until one of them fails."""

    def __init__(self) -> None:
        self.tables = dict.fromkeys("ab", Tables())
        self.first = "a"
        self.lost = ""
        self.awake = False

    async def names(self) -> list[str]:
        return ["a", "b"]

    async def leader(self, thread_id: str) -> str:
        return self.first

    async def kill(self, node: str) -> None:
        self.lost, self.awake = node, False

    async def pause(self, node: str) -> None:
        await self.kill(node)

    async def resume(self, node: str) -> None:
        self.awake = True

    async def cut(self, one: str, other: str) -> None:
        self.lost, self.awake = one, True

    async def take_over(self, lost: str) -> None:
        self.first = "b" if lost == "a" else "a"
        self.awake = False

    async def restore(self) -> None:
        self.tables = dict.fromkeys("ab", self.tables[self.first])
        self.lost, self.awake = "", False


class Replicated(Reference):
    """A correct store: a leader whose follower does not answer refuses everything."""

    pair: ClassVar[Pair] = Pair()
    numbers = count()

    def __init__(self, *, timeout: float = 30, **options: Any) -> None:
        super().__init__(None, **options)
        self._number = next(self.numbers)

    def _check_usable(self) -> None:
        super()._check_usable()
        self._store = self.pair.tables[self._node()]

    def _node(self) -> str:
        if self.pair.first == self.pair.lost:
            raise BackendUnavailable("broken", "the leader is lost")

        return self.pair.first


@dataclass
class ReplicatedHarness(Harness):
    """Opens a `Replicated`, or a subclass, on its pair of nodes."""

    kind: str
    folder: str

    options = Harness.options | {"timeout"}

    def open(self, **options: Any) -> Replicated:
        opened: Replicated = find(self.kind)(**options)
        return opened

    def elsewhere(self) -> Harness | None:
        return None

    def at_node(self, node: str) -> Harness:
        return self  # both nodes have the same tables

    def nodes(self) -> Nodes:
        pair: Nodes = find(self.kind).pair
        return pair


class LaggingPair(Pair):
    """The follower does not have the last writes of the leader."""

    behind: ClassVar[list[Tables]] = []

    async def take_over(self, lost: str) -> None:
        await super().take_over(lost)
        self.tables[self.first] = self.behind[0]

    async def restore(self) -> None:
        await super().restore()
        self.behind.clear()


@breaks("replicated.leader-killed", harness=ReplicatedHarness)
class AcknowledgesAlone(Replicated):
    """The leader answers before its follower has the append."""

    pair = LaggingPair()

    async def append(self, *args: Any, **options: Any) -> int:
        self._check_usable()
        behind = LaggingPair.behind
        behind[:] = [*behind[-4:], _copied(self._store)]
        return await super().append(*args, **options)


class SplitPair(Pair):
    """A node that is cut off, or wakes late, goes on with tables of its own."""

    async def cut(self, one: str, other: str) -> None:
        await super().cut(one, other)
        self.tables[one] = _copied(self.tables[one])

    async def pause(self, node: str) -> None:
        await super().pause(node)
        self.tables[node] = _copied(self.tables[node])


@breaks(
    "replicated.leader-cut-off",
    "replicated.leader-wakes-late",
    harness=ReplicatedHarness,
)
class SplitBrained(Replicated):
    """A replaced leader still acknowledges the writes of every second handle."""

    pair = SplitPair()

    def _node(self) -> str:
        if self.pair.awake and (self._number % 2 or self.pair.first == self.pair.lost):
            return self.pair.lost

        return super()._node()


class LastingSplitPair(SplitPair):
    """A node that is cut off goes on beside the one that has taken over."""

    may_lose = True

    async def take_over(self, lost: str) -> None:
        await super().take_over(lost)
        self.awake = True


@breaks(
    "replicated.leader-cut-off",
    "replicated.leader-wakes-late",
    harness=ReplicatedHarness,
)
class SplitForGood(SplitBrained):
    """It may lose writes until another node has taken over, and loses later ones."""

    pair = LastingSplitPair()


class StalePair(Pair):
    """The follower has never been in sync."""

    may_lose = True

    async def take_over(self, lost: str) -> None:
        await super().take_over(lost)
        self.tables[self.first] = Tables()


@breaks("replicated.leader-killed", harness=ReplicatedHarness)
class LosesMoreThanTheLast(Replicated):
    """It may lose the last writes, and loses the first ones too."""

    pair = StalePair()


LOSSY = LaggingPair()
LOSSY.may_lose = True


class SaysThatItMayLose(AcknowledgesAlone):
    """Not broken: its engine promises less, and the certificate counts what it lost."""

    pair = LOSSY


def lossy() -> Harness:
    return ReplicatedHarness(f"{__name__}:{SaysThatItMayLose.__qualname__}", "")
