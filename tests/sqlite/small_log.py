"""A harness whose log is so small that it is copied and restarted in each test."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from conformance import Harness
from cpkit import Checkpointer
from cpkit_sqlite import SQLiteCheckpointer, store

__all__ = ["LOG_BYTES", "SmallLogHarness"]

LOG_BYTES = 96 * 1024


@dataclass
class SmallLogHarness(Harness):
    """Sets `store.LOG_BYTES`, also in the processes that the suite starts."""

    path: str

    def open(self, **options: Any) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        store.LOG_BYTES = LOG_BYTES
        return SQLiteCheckpointer(self.path, **options)

    async def in_folder(self, folder: str) -> Harness:
        return SmallLogHarness(os.path.join(folder, "new", "store"))
