"""Kill leaders of replicated stores under load, many times.

Run by hand; it prints a line for every ten kills, and a summary::

    python -m tests.leader_kills postgres-pair --kills 600
    python -m tests.leader_kills redis-cluster --kills 600 --seed 7

Each kill is one of the clause ``replicated.leader-killed``: two clients append, claim
and record results while the leader is killed, and two more after another node took
over. Every acknowledged write is then looked for, and no key may have two holders.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

from conformance import Harness, Nodes, Status, run_clause, select
from tests.servers import postgres_pair, redis_cluster

__all__ = ["ENGINES"]

ENGINES: dict[str, Callable[[], Harness]] = {
    "postgres-pair": postgres_pair.harness,
    "redis-cluster": redis_cluster.harness,
}
"""Each starts an engine, which ends with this process; its harness has `Nodes`."""

KILLS_OF_A_CASE = 2
"""How many leaders the clause kills in one round."""

LINE = 10


class Timed:
    """Measures how long each takeover of these nodes takes."""

    def __init__(self, nodes: Nodes) -> None:
        self.seconds: list[float] = []
        self._take_over = nodes.take_over
        nodes.take_over = self._timed  # type: ignore[method-assign]  # of this object alone

    async def _timed(self, lost: str) -> None:
        start = time.monotonic()
        await self._take_over(lost)
        self.seconds.append(time.monotonic() - start)


def main() -> int:
    """Kill as many leaders as the arguments say; return 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.leader_kills")
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    (clause,) = select(ids=["replicated.leader-killed"])
    failed = acknowledged = lost = 0

    harness = ENGINES[given.engine]()
    nodes = harness.nodes()
    assert nodes is not None
    timed = Timed(nodes)

    for done in range(0, given.kills, LINE):
        kills = min(LINE, given.kills - done)
        rounds = kills / KILLS_OF_A_CASE
        outcome = run_clause(clause, harness, seed=given.seed + done, rounds=rounds)
        acknowledged += outcome.acknowledged
        lost += outcome.lost
        word = "ok"

        if outcome.status is not Status.PASSED:
            failed += 1
            word = f"{outcome.status}: {outcome.trace or outcome.reason}"

        _print(
            f"{given.engine}: {len(timed.seconds)} kills, {acknowledged} acknowledged "
            f"writes, {lost} lost; {word}"
        )

    _print(
        f"{given.engine}: {len(timed.seconds)} kills in all; {acknowledged} "
        f"acknowledged writes, {lost} lost, {failed} checks failed. The next leader "
        f"was there after {median(timed.seconds):.2f} s (median), "
        f"{max(timed.seconds):.2f} s at most."
    )
    return 1 if failed else 0


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # a tool run by hand


if __name__ == "__main__":
    raise SystemExit(main())
