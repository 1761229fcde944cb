"""A thread whose messages, extra and pending calls fit each other at every moment.

A writer repeats four steps: append message ``n`` together with extra ``n``, merge
``n`` again under another key, claim call ``n``, and resolve it. So a load that
mixes two moments is visible, whichever of its fields is the older one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

from conformance.failure import Failure
from conformance.history.recorder import Recorder
from cpkit import CheckpointData, ToolCall

__all__ = ["check_moment", "write_moments"]


async def write_moments(
    recorder: Recorder, random: Random, thread: str, count: int
) -> None:
    """Repeat the four steps as the recorder's client."""
    cp, writer = recorder.cp, recorder.client

    for n in range(1, count + 1):
        call = ToolCall(f"{writer}.{n}", "pay", {"n": n}, f"{thread} {writer} {n}")
        await cp.append(thread, [{"by": writer, "n": n}], extra={f"{writer} sent": n})
        await asyncio.sleep(0)  # an in-memory store never yields to the event loop
        await cp.save_extra(thread, {f"{writer} saved": n})
        await asyncio.sleep(0)
        await cp.record_issued(thread, call)
        await asyncio.sleep(0)
        await cp.record_result(thread, call.call_id, random.random())


def check_moment(
    loaded: CheckpointData[Any], writers: Sequence[str], begin: int
) -> None:
    """Raise `Failure` if the fields are not of one moment.

    The thread has ``begin`` messages that the writers did not append.
    """
    pending = [record.call.call_id for record in loaded.pending]

    for writer in writers:
        sent = [m["n"] for m in loaded.messages[begin:] if m["by"] == writer]
        n = len(sent)
        extra = {
            name: loaded.extra.get(f"{writer} {name}", 0) for name in ("sent", "saved")
        }
        calls = [call_id for call_id in pending if call_id.startswith(f"{writer}.")]
        fits = (
            sent == list(range(1, n + 1))
            and extra["sent"] == n
            and extra["saved"] in (n - 1, n)
            and calls in ([], [f"{writer}.{n}"])
            and (extra["saved"] == n or not calls)
        )

        if not fits:
            raise Failure(
                f"messages, extra and pending of one moment: with {n} messages by "
                f"{writer}, extra has sent {n} and saved {max(0, n - 1)} or {n}, and "
                f"only the call {writer}.{n} can be pending",
                f"messages {sent[-3:]} at the end, extra {extra}, pending {calls}",
            )
