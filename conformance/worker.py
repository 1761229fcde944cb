"""The process that `conformance.workers` starts: one client of the store.

Nothing here trusts that it will live: each operation is printed, and the line flushed,
when it is acknowledged and before the next one begins.
"""

from __future__ import annotations

import asyncio
import json
import sys
from random import Random
from typing import Any

__all__ = ["main"]


def say(value: Any) -> None:
    """Print one line of JSON, at once."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Do the job that comes on standard input."""
    job = json.loads(sys.stdin.readline())
    sys.path[:] = job["path"]
    asyncio.run(work(job))


async def work(job: dict[str, Any]) -> None:
    # Late: the job says where to look for modules.
    from conformance.harness import rebuild
    from conformance.history.client import use_keys, use_threads
    from conformance.history.op import Op
    from conformance.history.recorder import Recorder

    def sink(op: Op) -> None:
        say(op.to_json())

    harness = rebuild(job["harness"])
    say("opening")

    async with harness.open() as cp:
        say("ready")
        sys.stdin.readline()
        random = Random(job["seed"])
        clients = []

        for name in job["clients"]:
            client = Recorder(cp, name, sink)  # type: ignore[arg-type]  # see Store
            chance = Random(random.random())
            clients.append(
                use_keys(client, chance, job["threads"], job["keys"], job["count"])
                if "keys" in job
                else use_threads(client, chance, job["threads"], job["count"])
            )

        await asyncio.gather(*clients)


if __name__ == "__main__":
    main()
