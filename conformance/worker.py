"""The process that `conformance.workers` starts: one client of the store.

It may be killed at any moment. So it prints and flushes one line for each operation, as
soon as the operation is acknowledged and before the next one starts.
"""

from __future__ import annotations

import asyncio
import json
import sys
from random import Random
from typing import Any

__all__ = ["main"]


def emit(value: Any) -> None:
    """Print one line of JSON and flush it."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the job that is read from standard input."""
    job = json.loads(sys.stdin.readline())
    sys.path[:] = job["path"]
    asyncio.run(work(job))


async def work(job: dict[str, Any]) -> None:
    # Imported here, because the job sets sys.path first.
    from conformance.harness import rebuild
    from conformance.history.client import use_keys, use_threads
    from conformance.history.op import Op
    from conformance.history.recorder import Recorder

    def sink(op: Op) -> None:
        emit(op.to_json())

    harness = rebuild(job["harness"])
    emit("opening")

    async with harness.open() as cp:
        emit("ready")
        sys.stdin.readline()
        random = Random(job["seed"])
        clients = []

        for name in job["clients"]:
            client = Recorder(cp, name, sink)  # type: ignore[arg-type]  # a store may lack optional methods
            chance = Random(random.random())
            clients.append(
                use_keys(client, chance, job["threads"], job["keys"], job["count"])
                if "keys" in job
                else use_threads(client, chance, job["threads"], job["count"])
            )

        await asyncio.gather(*clients)


if __name__ == "__main__":
    main()
