"""A process that appends through the wrapper until it is killed.

``python -m tests.cadence.agent URL THREAD CADENCE``: each turn has a user message,
an assistant message with a tool call, its result, and an answer. The process prints a
line for each acknowledged append, and for each claim.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import count
from uuid import uuid4

from cpkit import ToolCall, open_checkpointer
from cpkit.cadence import Cadence, is_turn_end, with_cadence
from tests.sessions.talk import Message, assistant, result, user

CADENCES = {
    "message": Cadence(1),
    "tool call": Cadence(),
    "turn": Cadence(ends_turn=is_turn_end),
    "messages": Cadence(5),
    # Too many messages to reach: only the timer writes.
    "seconds": Cadence(10**6, seconds=0.01),
}


async def talk(url: str, thread_id: str, cadence: str) -> None:
    async with (
        open_checkpointer(url) as store,
        with_cadence(store, CADENCES[cadence]) as cp,
    ):

        async def say(message: Message) -> None:
            await cp.append(thread_id, [message])
            report(f"said {message['role']}")

        for number in count():
            await say(user(f"turn {number}"))
            await say(assistant("thinking", "think"))
            await say(result("think"))

            if cadence in ("message", "tool call"):
                call = ToolCall(uuid4().hex, "pay", {}, uuid4().hex)
                await cp.record_issued(thread_id, call)
                report("claimed")
                await cp.record_result(thread_id, call.call_id, "paid")

            if cadence == "seconds":
                # Let the event loop run the timer; no other call writes.
                await asyncio.sleep(0.002)

            await say(assistant("done"))


def report(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(talk(sys.argv[1], sys.argv[2], sys.argv[3]))
