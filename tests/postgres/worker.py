"""What another process does with a store: the commands of `tests.processes`."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from cpkit import (
    CallRecord,
    FullCheckpointer,
    ToolCall,
    UnknownCall,
    open_checkpointer,
)
from tests.processes import serve
from tests.worker import append_one


async def ready() -> bool:
    """Return when the process has started."""
    return True


async def append_many(url: str, thread_id: str, name: str, count: int) -> list[int]:
    """Append messages by four tasks at a time; return the versions."""
    async with open_checkpointer(url) as cp:

        async def some(part: int) -> list[int]:
            return [
                await cp.append(thread_id, [{"by": name, "part": part, "i": i}])
                for i in range(count)
            ]

        parts = await asyncio.gather(*(some(part) for part in range(4)))
        return [version for part in parts for version in part]


async def change_and_delete(url: str, seed: int, count: int) -> int:
    """Write to three threads and two keys at random, and delete the threads."""
    async with open_checkpointer(url) as cp:
        assert isinstance(cp, FullCheckpointer)

        async def some(part: int) -> None:
            order = random.Random(seed * 4 + part)

            for i in range(count):
                thread = f"t{order.randrange(3)}"
                name = f"{seed} {part} {i}"
                size = order.randrange(1, 5)

                match order.randrange(10):
                    case 0:
                        forget = order.random() < 0.5
                        await cp.delete_thread(thread, forget_keys=forget)
                    case 1:
                        await cp.save_extra(thread, {name: i, "last": name})
                    case 2:
                        await cp.trim(thread, order.randrange(50))
                    case 3 | 4:
                        call = ToolCall(name, "x", {}, f"k{order.randrange(2)}")
                        holder = await cp.record_issued(thread, call) or call

                        if isinstance(holder, CallRecord):
                            thread, call = holder.thread_id, holder.call

                        with suppress(UnknownCall):  # forgotten by a deletion
                            await cp.record_result(
                                thread, call.call_id, None, success=False
                            )
                    case _:
                        await cp.append(thread, [{"by": name}] * size)

        await asyncio.gather(*(some(part) for part in range(4)))
        return count


if __name__ == "__main__":
    serve(ready, append_one, append_many, change_and_delete)
