"""A store that loses an answer, for adapters whose writes are stored once."""

from __future__ import annotations

from typing import Any

from cpkit import BackendUnavailable, MemoryCheckpointer

__all__ = ["LosesAnAnswer"]


class LosesAnAnswer:
    """A store whose first append is applied, and its answer lost."""

    def __init__(self, cp: MemoryCheckpointer[Any]) -> None:
        self._cp = cp
        self.is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cp, name)

    async def append(self, *args: Any, **options: Any) -> int:
        version = await self._cp.append(*args, **options)

        if not self.is_lost:
            self.is_lost = True
            raise BackendUnavailable("memory", "cut off", maybe_applied=True)

        return version
