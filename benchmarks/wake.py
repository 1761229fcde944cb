"""How long a change in one process takes to wake another: ``--workloads wake``.

A child process writes and says when; this process watches. Both read the machine's
monotonic clock. The same changes are measured by a watch, by a watch that only polls,
and by what the server itself offers: a bare NOTIFY or PUBLISH after the same append.
The price of an append is measured without watchers, without notifications, and while a
hundred watchers of other threads wait in another process.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from statistics import median, quantiles
from typing import Any

import asyncpg
from redis.asyncio import Redis

from benchmarks.place import Place
from cpkit import open_checkpointer

__all__ = ["wake"]

# Seconds between two changes, a little irregular so that they do not fall into step
# with a poll.
_PAUSE = 0.08
_CHANNEL = "cpkit_bare_wake"
# Appends in a turn of a comparison, and turns.
_TURN = 20
_TURNS = 30


async def wake(driver: str, place: Place, changes: int) -> list[dict[str, Any]]:
    """Return rows of figures in milliseconds, and of appends as ratios."""
    url = _url(driver, place)
    rows = []

    async with open_checkpointer(url):
        pass  # created

    for name, options in (("watch", {}), ("polling", {"notify": False})):
        count = changes if name == "watch" else max(5, changes // 8)
        took = await _woken(url, options, count)
        rows.append(_row(driver, name, took))

    if driver in ("postgres", "redis"):
        rows.append(_row(driver, "bare", await _bare(driver, url, changes)))

    return rows + await _prices(driver, url)


def _url(driver: str, place: Place) -> str:
    match driver:
        case "sqlite":
            return f"sqlite:///{place.file('wake.db')}"
        case "file":
            return f"file://{place.file('wake')}"
        case "postgres":
            return f"{place.postgres}?schema=wake"
        case _:
            server = place.redis if driver == "redis" else place.redis_always
            return f"{server}?prefix=wake"


def _row(driver: str, name: str, took: list[float]) -> dict[str, Any]:
    worst = quantiles(took, n=100)[98] if len(took) >= 2 else took[0]
    figures = {"p50 ms": round(median(took) * 1e3, 2), "p99 ms": round(worst * 1e3, 2)}
    return {"driver": driver, "what": name, "changes": len(took), **figures}


class _Asked:
    """A child process that answers a line with a line of JSON."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child
        self.send_signal = child.send_signal

    async def __call__(self, word: str) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(word.encode() + b"\n")
        return json.loads(await self._child.stdout.readline())


@asynccontextmanager
async def _child(job: dict[str, Any]) -> AsyncIterator[_Asked]:
    """Start this module as another process; it prints a line of JSON when asked."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.wake", json.dumps(job)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None

    ask = _Asked(child)

    try:
        await ask("ready?")
        yield ask
    finally:
        child.stdin.close()
        await child.wait()


async def _woken(url: str, options: dict[str, Any], count: int) -> list[float]:
    """Return the seconds from a change in another process to the yield here."""
    watching: Any = open_checkpointer(url, **options)
    took = []

    async with (
        watching as cp,
        cp.watch("woken") as changes,
        _child({"do": "append", "url": url, "options": options}) as ask,
    ):
        await asyncio.sleep(0.5)  # the listener is connected

        for n in range(count):
            await asyncio.sleep(_PAUSE * (1 + n % 7 / 5))
            waiting = asyncio.create_task(_next(changes))
            committed = await ask("append")
            took.append(max(0.0, await waiting - committed))

    return took


async def _next(changes: AsyncIterator[str]) -> float:
    await anext(changes)
    return time.monotonic()


async def _bare(driver: str, url: str, count: int) -> list[float]:
    """The same with the server's own means, and without cpkit's watch."""
    heard: asyncio.Queue[float] = asyncio.Queue()
    took = []

    async with _heard(driver, url, lambda: heard.put_nowait(time.monotonic())):
        async with _child({"do": "bare", "url": url, "driver": driver}) as ask:
            for n in range(count):
                await asyncio.sleep(_PAUSE * (1 + n % 7 / 5))
                committed = await ask("append")
                took.append(max(0.0, await heard.get() - committed))

    return took


@asynccontextmanager
async def _heard(
    driver: str, url: str, hear: Callable[[], None]
) -> AsyncIterator[None]:
    if driver == "postgres":
        connection = await asyncpg.connect(url.partition("?")[0])
        await connection.add_listener(_CHANNEL, lambda *_: hear())
        yield
        await connection.close()
        return

    async with Redis.from_url(url.partition("?")[0]) as client:
        async with client.pubsub() as channels:
            await channels.subscribe(_CHANNEL)

            async def listen() -> None:
                async for message in channels.listen():
                    if message["type"] == "message":
                        hear()

            listening = asyncio.create_task(listen())
            yield
            listening.cancel()
            await asyncio.wait({listening})


async def _prices(driver: str, url: str) -> list[dict[str, Any]]:
    """Return the price of an append, as a ratio to one without notifications.

    Both are measured in turns. The watchers are stopped (SIGSTOP) during the turns of
    the one without.
    """
    found: list[dict[str, Any]] = []

    async def measure(cp: Any) -> float:
        took = []

        for _ in range(_TURN):
            started = time.perf_counter()
            await cp.append("priced", [{"role": "user", "content": "x" * 200}])
            took.append(time.perf_counter() - started)

        return median(took)

    async def compare(what: str, pause: Callable[[int], None]) -> None:
        plain, noticed = [], []

        for _ in range(_TURNS):
            pause(signal.SIGSTOP)
            plain.append(await measure(without))
            pause(signal.SIGCONT)
            noticed.append(await measure(notifying))

        ratio = median(noticed) / median(plain)
        found.append(
            {
                "driver": driver,
                "what": f"append, {what}",
                "us": round(median(noticed) * 1e6, 1),
                "ratio": round(ratio, 3),
            }
        )

    async with (
        open_checkpointer(url, notify=False) as without,
        open_checkpointer(url) as notifying,
    ):
        await compare("no task waits", lambda _: None)

        async with _child({"do": "watch", "url": url}) as ask:
            await compare("100 other watchers", ask.send_signal)

    return found


# In the other process


async def _work(job: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    opened: Any = open_checkpointer(job["url"], **job.get("options", {}))

    async with opened as cp:
        match job["do"]:
            case "watch":
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(_wait(cp, n)) for n in range(100)]
                    await asyncio.sleep(0.5)
                    await _answer(loop, _nothing)

                    for task in tasks:
                        task.cancel()
            case "bare":
                async with _sender(job) as send:
                    await _answer(loop, lambda: _append_and(cp, send))
            case _:
                await _answer(loop, lambda: _append_and(cp, _nothing))


async def _wait(cp: Any, number: int) -> None:
    async with cp.watch(f"other-{number}") as changes:
        async for _ in changes:
            pass


async def _nothing() -> None:
    return None


async def _append_and(cp: Any, send: Callable[[], Any]) -> None:
    await cp.append("woken", [{"role": "user", "content": "x" * 200}])
    await send()


@asynccontextmanager
async def _sender(job: dict[str, Any]) -> AsyncIterator[Callable[[], Any]]:
    server = job["url"].partition("?")[0]

    if job["driver"] == "postgres":
        connection = await asyncpg.connect(server)
        yield lambda: connection.execute(f"NOTIFY {_CHANNEL}")
        await connection.close()
    else:
        async with Redis.from_url(server) as client:
            yield lambda: client.publish(_CHANNEL, "t")


async def _answer(loop: asyncio.AbstractEventLoop, do: Callable[[], Any]) -> None:
    """Do it for each line that is read, and print when it was begun."""
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        started = time.monotonic()

        if line.strip() == "append":
            await do()

        sys.stdout.write(f"{started}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_work(json.loads(sys.argv[1])))
