"""What every layer reads and writes with, over a store of six methods."""

from __future__ import annotations

from typing import Any

from cpkit import MemoryCheckpointer, read_range


class SixMethods:
    """A checkpointer that can only load."""

    def __init__(self, inner: MemoryCheckpointer[Any]) -> None:
        self.load = inner.load


async def test_a_range_of_a_trimmed_thread_is_cut_by_position() -> None:
    """Also where a store without ``read`` loads the thread."""
    async with MemoryCheckpointer[Any]() as cp:
        six: Any = SixMethods(cp)
        await cp.append("t", [{"n": n} for n in range(6)])

        for before in (0, 2, 6):
            await cp.trim("t", before)

            for start, stop in ((0, None), (1, 4), (-2, None), (3, -1), (5, 2)):
                found = await read_range(six, "t", start, stop)
                assert found == await cp.read("t", start, stop)
                asked = range(6)[start:stop]
                assert [one["n"] for one in found] == [n for n in asked if n >= before]

        assert await read_range(six, "missing") == []
