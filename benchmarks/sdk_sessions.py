"""Measure sessions beside the SDKs' own: ``python -m benchmarks.sdk_sessions``.

A conversation of 1 KB messages is appended, one at a time, by both stores in turn, each
on a SQLite file. A ratio below 1.0 says that cpkit is better.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agents import SQLiteSession
from google.adk.events import Event
from google.adk.sessions import DatabaseSessionService
from google.genai.types import Content, Part

from benchmarks.langgraph_shapes import text
from cpkit import open_checkpointer
from cpkit.integrations.google_adk import SessionService
from cpkit.integrations.openai_agents import Session

Append = Callable[[int], Awaitable[Any]]
Read = Callable[[], Awaitable[Any]]


async def openai(file: Path, ours: bool, stack: AsyncExitStack) -> tuple[Append, Read]:
    session: Any

    if ours:
        cp = await stack.enter_async_context(open_checkpointer(f"sqlite:///{file}"))
        session = Session("s", cp)
    else:
        session = SQLiteSession("s", file)
        stack.callback(session.close)

    async def append(n: int) -> None:
        await session.add_items([{"role": "user", "content": text(1000, n)}])

    return append, session.get_items


async def adk(file: Path, ours: bool, stack: AsyncExitStack) -> tuple[Append, Read]:
    service: Any
    names = {"app_name": "app", "user_id": "user", "session_id": "s"}

    if ours:
        cp = await stack.enter_async_context(open_checkpointer(f"sqlite:///{file}"))
        service = SessionService(cp)
    else:
        service = DatabaseSessionService(f"sqlite+aiosqlite:///{file}")
        stack.push_async_callback(service.db_engine.dispose)

    session = await service.get_session(**names)
    session = session or await service.create_session(**names)

    async def append(n: int) -> None:
        content = Content(role="user", parts=[Part(text=text(1000, n))])
        await service.append_event(session, Event(author="user", content=content))

    async def read() -> Any:
        return await service.get_session(**names)

    return append, read


SDKS = {"OpenAI Agents SDK": openai, "Google ADK": adk}


async def measure(sdk: str, count: int, folder: Path) -> list[float]:
    """Return the ratios of time per append, bytes, and time of a cold read."""
    files = [folder / f"{sdk}-{ours}.db" for ours in (True, False)]
    times: list[list[float]] = [[], []]
    cold: list[list[float]] = [[], []]

    async with AsyncExitStack() as stack:
        sides = [
            await SDKS[sdk](file, which == 0, stack) for which, file in enumerate(files)
        ]

        for n in range(count):
            for which in (0, 1) if n % 2 else (1, 0):
                begun = time.perf_counter()
                await sides[which][0](n)
                times[which].append(time.perf_counter() - begun)

    for n in range(12):
        for which in (0, 1) if n % 2 else (1, 0):
            async with AsyncExitStack() as stack:
                begun = time.perf_counter()
                _, read = await SDKS[sdk](files[which], which == 0, stack)
                assert await read()
                cold[which].append(time.perf_counter() - begun)

    sizes = [_size(file) for file in files]
    medians = [[statistics.median(side) for side in kind] for kind in (times, cold)]
    return [
        medians[0][0] / medians[0][1],
        sizes[0] / sizes[1],
        medians[1][0] / medians[1][1],
    ]


def _size(file: Path) -> int:
    return sum(one.stat().st_size for one in file.parent.glob(f"{file.name}*"))


async def main(count: int) -> None:
    sys.stdout.write("| SDK | time per append | bytes | open and read |\n")
    sys.stdout.write("|---|---:|---:|---:|\n")

    for sdk in SDKS:
        with tempfile.TemporaryDirectory() as folder:
            ratios = await measure(sdk, count, Path(folder))

        cells = " | ".join(f"{ratio:.2f}×" for ratio in ratios)
        sys.stdout.write(f"| {sdk} | {cells} |\n")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
