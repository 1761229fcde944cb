"""A process that appends to a session, for tests with several processes.

``python -m tests.sessions.writer URL SESSION NAME COUNT``: says ``ready``, waits for a
line, appends COUNT messages, and prints the id of each when it is acknowledged.
"""

from __future__ import annotations

import asyncio
import sys

from cpkit import VersionConflict, open_checkpointer
from cpkit.sessions import SessionLog


async def write(url: str, session_id: str, name: str, count: int) -> None:
    async with open_checkpointer(url) as cp:
        log = await SessionLog.open(cp, session_id)
        say("ready")
        await asyncio.to_thread(sys.stdin.readline)

        for number in range(count):
            message = {"role": "user", "content": f"{name} {number}"}

            while True:
                try:
                    say(await log.append_message(message))
                    break
                except VersionConflict:
                    await log.refresh()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(write(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
