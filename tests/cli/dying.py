"""A copy whose process is killed: ``python -m tests.cli.dying SRC DST WRITES``.

The process kills itself right after that many writes to the destination.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from cpkit import open_checkpointer
from cpkit.tools.copying import copy_store

WRITES = {"restore_thread", "delete_thread"}


class Dying:
    """A store whose process dies at its n-th write, before or after applying it.

    ``end`` kills the process, or returns an exception in place of its death: the
    handle writes nothing afterwards.
    """

    def __init__(
        self,
        cp: Any,
        writes: int,
        end: Callable[[], BaseException],
        *,
        is_applied: bool = True,
    ) -> None:
        self._left = writes
        self._end = end
        self._is_applied = is_applied

        for name in (*WRITES, "dump_thread", "list_threads"):
            method = getattr(cp, name)
            setattr(self, name, self._counted(method) if name in WRITES else method)

    def _counted(self, method: Any) -> Any:
        async def write(*args: Any, **options: Any) -> Any:
            self._left -= 1

            if self._left < 0 or (self._left == 0 and not self._is_applied):
                raise self._end()

            answer = await method(*args, **options)

            if self._left <= 0:
                raise self._end()

            return answer

        return write


def killed() -> BaseException:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived SIGKILL")


async def main(src: str, dst: str, writes: int) -> None:
    async with (
        open_checkpointer(src, message_type=Any) as source,
        open_checkpointer(dst, message_type=Any) as destination,
    ):
        dying: Any = Dying(destination, writes, killed)
        await copy_store(source, dying)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
