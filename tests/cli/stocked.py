"""Fill a store with everything that a copy must keep, and read it for comparison."""

from __future__ import annotations

from typing import Any

from cpkit import ToolCall
from cpkit.cli.stores import Store
from tests.cli.command import call

__all__ = ["CUT", "everything", "stock", "stock_cut"]

CUT: list[Any] = ["cut \ud83d", "\ud83d\ude00", "😀 \ude00", {"n": r"\ud83d"}]
"""Text as people have it: halves of characters, also two that follow each other."""


async def stock(cp: Store) -> None:
    """Fill a store: values, attempts across threads, deleted and recreated threads."""
    await cp.append("plain", [{"n": n, "x": 1.0, "big": 10**30} for n in range(1200)])
    await cp.save_extra("plain", {"a": None, "é\u2028": [1, 1.0, True]})
    await cp.append("values", ["text", 3, None, [1, {"k": "\x00"}]])
    await cp.save_extra("only-extra", {"state": {"plan": []}})

    # Attempts at one key in three threads, whose ids sort in another order.
    await call(cp, "z-first", "one", "across", success=False)
    await call(cp, "a-second", "two", "across", success=False)
    await call(cp, "m-third", "three", "across", success=True)

    await call(cp, "plain", "waits", "open")
    await call(cp, "plain", "fails", "failed", success=False)
    await call(cp, "plain", "pays", "paid", success=True)

    # Attempt 1 is deleted with its key; attempt 2 keeps its number.
    await call(cp, "forgotten", "lost", "later", success=False)
    await call(cp, "plain", "again", "later", success=True)
    await cp.delete_thread("forgotten", forget_keys=True)

    await call(cp, "reborn", "gone", "erased", success=True)
    await call(cp, "reborn", "gone-open", "erased-open")
    await cp.delete_thread("reborn")
    await cp.append("reborn", [{"new": True}])

    await call(cp, "pruned", "paid-once", "kept", success=True)
    await cp.delete_thread("pruned")


async def stock_cut(cp: Any, thread_id: str) -> None:
    """Store `CUT` in each place of a thread that holds text."""
    await cp.append(thread_id, [{"role": "user", "content": one} for one in CUT])
    await cp.save_extra(thread_id, {CUT[1]: CUT, CUT[0]: CUT[0]})
    await cp.record_issued(thread_id, ToolCall("done", "cut", {CUT[0]: CUT}, "done"))
    await cp.record_result(thread_id, "done", CUT)
    await cp.record_issued(thread_id, ToolCall("waits", "cut", {"by": CUT}, "waits"))


async def everything(cp: Any) -> dict[str, Any]:
    """Return every thread as it is listed and dumped, with all times."""
    found: dict[str, Any] = {}

    for info in await cp.list_threads(limit=10_000, erased=True):
        dump = await cp.dump_thread(info.thread_id)
        # 1 == 1.0, but their texts differ.
        found[info.thread_id] = (info, dump, repr(dump.messages[:1]))

    return found
