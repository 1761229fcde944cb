"""Measure the page of a long thread: ``python -m benchmarks.page [URL]``.

The time to the first byte of the page, and of its JSON form, beside a bare ASGI
application that reads the same range and answers with it. All are asked in turn, over
one connection each, in one run.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from cpkit import open_checkpointer
from cpkit.ui import app

MESSAGES = 100_000
SHOWN = 40
ROUNDS = 200
TEXT = "the model read a plan and called another tool for its next answer " * 15

PATHS = {
    "range read": "/bare",
    "page": "/ui/thread?id=long",
    "page as JSON": "/ui/thread.json?id=long",
}


async def fill(cp: Any) -> None:
    """Write a thread of ``MESSAGES`` messages of 1 KB."""
    roles = ("user", "assistant")

    for start in range(0, MESSAGES, 5_000):
        await cp.append(
            "long",
            [{"role": roles[n % 2], "content": TEXT} for n in range(5_000)],
            expected_version=start,
        )


async def serve(url: str) -> None:
    """Serve the page and the bare application; print the port."""
    opened: Any = open_checkpointer(url, message_type=Any)

    async with opened as cp:

        async def bare(request: Request) -> JSONResponse:
            return JSONResponse(await cp.read("long", MESSAGES - SHOWN, None))

        routes = [
            Route("/bare", bare),
            Mount("/ui", app(cp, authorize=lambda request: "bench")),
        ]

        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sys.stdout.write(f"{listener.getsockname()[1]}\n")
            sys.stdout.flush()
            config = uvicorn.Config(
                Starlette(routes=routes), lifespan="off", log_level="warning"
            )
            await uvicorn.Server(config).serve(sockets=[listener])


async def first_byte(port: int, path: str) -> float:
    """Return the seconds until the first byte of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked = time.perf_counter()
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
    )
    status = await reader.read(12)
    seconds = time.perf_counter() - asked

    if status != b"HTTP/1.1 200":
        raise RuntimeError(f"{path} answered {status!r}")

    while await reader.read(65_536):
        continue

    writer.close()
    await writer.wait_closed()
    return seconds


async def measure(url: str) -> None:
    """Print the median of each, and its ratio to the range read."""
    opened: Any = open_checkpointer(url, message_type=Any)

    async with opened as cp:
        if not await cp.read("long", 0, 1):
            await fill(cp)

    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.page", "--serve", url, stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    port = int(await server.stdout.readline())
    times: dict[str, list[float]] = {name: [] for name in PATHS}

    for _ in range(ROUNDS):
        for name, path in PATHS.items():
            times[name].append(await first_byte(port, path))

    server.terminate()
    await server.wait()
    floor = median(times["range read"])
    found = {name: median(seconds) for name, seconds in times.items()}
    sys.stdout.write(
        json.dumps(
            {
                name: {"ms": round(1000 * one, 2), "ratio": round(one / floor, 2)}
                for name, one in found.items()
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--serve", url]:
            asyncio.run(serve(url))
        case [url]:
            asyncio.run(measure(url))
        case _:
            with tempfile.TemporaryDirectory() as folder:
                asyncio.run(measure(f"sqlite:///{folder}/a.db"))
