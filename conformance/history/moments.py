"""A thread whose messages, extra and pending calls fit each other at every moment.

A writer repeats four steps: append message ``n`` together with extra ``n``, merge
``n`` again under another key, claim call ``n``, and resolve it. So a load that
mixes two moments is visible, whichever of its fields is the older one.
"""

from __future__ import annotations

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
        await cp.save_extra(thread, {f"{writer} saved": n})
        await cp.record_issued(thread, call)
        await cp.record_result(thread, call.call_id, random.random())


def check_moment(
    loaded: CheckpointData[Any], writers: Sequence[str], begin: int
) -> None:
    """Raise `Failure` if the fields are not of one moment.

    The thread has ``begin`` messages that the writers did not append. Its newest
    messages may be enough, or none of them.
    """
    pending = [record.call.call_id for record in loaded.pending]
    total = 0

    for writer in writers:
        sent = [m["n"] for m in loaded.messages if m["by"] == writer]
        extra: dict[str, Any] = {
            name: loaded.extra.get(f"{writer} {name}", 0) for name in ("sent", "saved")
        }
        n = extra["sent"]
        total += n
        calls = [call_id for call_id in pending if call_id.startswith(f"{writer}.")]
        fits = (
            sent == list(range(n - len(sent) + 1, n + 1))
            and extra["saved"] in (n - 1, n)
            and calls in ([], [f"{writer}.{n}"])
            and (extra["saved"] == n or not calls)
        )

        if not fits:
            raise Failure(
                f"messages, extra and pending of one moment: if extra has sent {n}, "
                f"the last message by {writer} is {n}, extra has saved {max(0, n - 1)} "
                f"or {n}, and only the call {writer}.{n} can be pending",
                f"messages {sent[-3:]} at the end, extra {extra}, pending {calls}",
            )

    end = loaded.first + len(loaded.messages)

    if loaded.version != begin + total or (loaded.messages and end != loaded.version):
        raise Failure(
            f"version {begin + total}, as extra says how much was sent, and the "
            "messages up to there",
            f"version {loaded.version}, and messages up to {end}",
        )
