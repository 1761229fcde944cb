"""The floor of files: one trip to a thread, an O_APPEND write and an fdatasync."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic_core import from_json, to_json

from benchmarks.floors.decoding import decoded
from cpkit import JsonValue
from cpkit.tools.benchmark.contender import CALL_ARGS, CALL_RESULT, Contender

__all__ = ["FileFloor"]

T = TypeVar("T")

# The same number as in the driver.
WORKERS = 16

# More than the last twenty messages.
_TAIL = 64 * 1024


class FileFloor(Contender):
    """A log for each thread, kept open; a call is a line in the log, and a file.

    The file of a call's key exists while the key is held, and has the result in the
    end. Another process would read that file.
    """

    kind = "floor"
    abilities = frozenset({"append", "load", "tail", "calls", "extra", "open"})
    durability = "machine: fdatasync before it is answered"

    def __init__(self, path: str, name: str) -> None:
        super().__init__("file", name)
        self.folder = Path(path)
        self._logs: dict[str, int] = {}
        self._workers: ThreadPoolExecutor

    def another(self) -> FileFloor:
        return FileFloor(str(self.folder), self.name)

    async def open(self) -> None:
        self._workers = ThreadPoolExecutor(WORKERS)
        await self._hop(self._make_folder)

    async def close(self) -> None:
        while self._logs:
            os.close(self._logs.popitem()[1])

        await asyncio.to_thread(self._workers.shutdown)

    async def append(self, thread: str, message: Any) -> None:
        await self._hop(self._write, thread, to_json(message) + b"\n")

    async def fill(self, thread: str, messages: Sequence[Any]) -> None:
        lines = b"".join([to_json(message) + b"\n" for message in messages])
        await self._hop(self._write, thread, lines)

    async def forget(self, threads: Sequence[str]) -> None:
        for thread in threads:
            if thread in self._logs:
                os.close(self._logs.pop(thread))

    async def load(self, thread: str) -> list[Any]:
        return _decoded(await self._hop(self._path(thread).read_bytes))

    async def tail(self, thread: str, count: int) -> list[Any]:
        text = await self._hop(_end_of, self._path(thread))
        return _decoded(b"\n".join(text.split(b"\n")[-count - 1 :]))

    async def cycle(self, thread: str, name: str) -> JsonValue:
        claim = to_json({"call": name, "tool": "charge", "args": CALL_ARGS})
        await self._hop(self._write, f"{thread}:calls", claim + b"\n")
        result = to_json({"call": name, "result": CALL_RESULT})
        await self._hop(self._conclude, thread, name, result + b"\n")
        return await self.replay(thread, name)

    async def replay(self, thread: str, name: str) -> JsonValue:
        path = self._path(f"{thread}:{name}")
        result: JsonValue = from_json(await self._hop(path.read_bytes))["result"]
        return result

    async def merge(self, thread: str, values: Mapping[str, JsonValue]) -> None:
        await self._hop(self._write, f"{thread}:extra", to_json(values) + b"\n")

    async def extra(self, thread: str) -> Mapping[str, JsonValue]:
        text = await self._hop(self._path(f"{thread}:extra").read_bytes)
        merged: dict[str, JsonValue] = {}

        for values in _decoded(text):
            merged.update(values)

        return merged

    def _make_folder(self) -> None:
        self.folder.mkdir(exist_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / quote(name, safe="")

    def _write(self, name: str, lines: bytes) -> None:
        log = self._logs.get(name)

        if log is None:
            flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY
            log = self._logs[name] = os.open(self._path(name), flags, 0o600)

        os.write(log, lines)
        os.fdatasync(log)

    def _conclude(self, thread: str, name: str, line: bytes) -> None:
        # Not synced: the file can be created again from the log.
        self._path(f"{thread}:{name}").write_bytes(line)
        self._write(f"{thread}:calls", line)

    async def _hop(self, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, function, *args)


def _end_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        return file.read()


def _decoded(text: bytes) -> list[Any]:
    return decoded(text[:-1].replace(b"\n", b","))
