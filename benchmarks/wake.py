"""How long a change in one process takes to wake another: ``--workloads wake``.

A child process writes and says when; this process watches. Both read the machine's
monotonic clock. The same changes are measured by a watch, by a watch that only polls,
and by what the server itself offers: a bare NOTIFY or PUBLISH after the same append.
A decision is measured from the call of ``approve`` to the start of the handler, and a
thousand callers of one key from the first result to the last. The price of an append is
measured without watchers, without notifications, and while a hundred watchers of other
threads wait in another process.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from statistics import median, quantiles
from typing import Any

import asyncpg
from redis.asyncio import Redis

from benchmarks.place import Place
from cpkit import open_checkpointer
from cpkit.driver.metrics import OPERATIONS
from cpkit.effects import ApprovalRequest, Effect, EffectLedger

__all__ = [
    "APPEND",
    "CALLERS",
    "DECISION",
    "WATCH",
    "crowd_figures",
    "decision_times",
    "wake",
]

# What the rows measure.
WATCH, POLLING, BARE = "watch", "polling", "bare"
DECISION = "decision to handler"
CALLERS = "1,000 callers of one key"
APPEND = "append, no task waits", "append, 100 other watchers"

# Seconds between two changes, a little irregular so that they do not fall into step
# with a poll.
_PAUSE = 0.08
_CHANNEL = "cpkit_bare_wake"
_READY = "ready?"
# Appends in a turn of a comparison, and turns. With 30 turns the ratio of SQLite, which
# announces nothing, differed from 1 by 0.06; with 200 by 0.01.
_TURN = 20
_TURNS = 200
# Seconds for which the operations of a waiting crowd are counted.
_WAITS = 3.0


async def wake(driver: str, place: Place, changes: int) -> list[dict[str, Any]]:
    """Return rows of figures in milliseconds, and of appends as ratios."""
    url = _url(driver, place)
    rows = []

    async with open_checkpointer(url):
        pass  # created

    for name, options in ((WATCH, {}), (POLLING, {"notify": False})):
        count = changes if name == WATCH else max(5, changes // 8)
        took = await _woken(url, options, count)
        rows.append(_row(driver, name, took))

    if driver in ("postgres", "redis"):
        rows.append(_row(driver, BARE, await _bare(driver, url, changes)))

    # Three times as many: the p99 of a hundred is hardly more than the slowest of them.
    rows.append(_row(driver, DECISION, await decision_times(url, 3 * changes)))
    rows.append({"driver": driver, "what": CALLERS, **await crowd_figures(url, 1_000)})
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
        await ask(_READY)
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


async def decision_times(url: str, count: int) -> list[float]:
    """Return the seconds from ``approve`` in another process to the handler here."""
    requests: asyncio.Queue[ApprovalRequest] = asyncio.Queue()
    took = []

    async def handler(effect: Effect) -> float:
        return time.monotonic()

    async with (
        open_checkpointer(url) as cp,
        _child({"do": "approve", "url": url}) as ask,
    ):
        ledger = EffectLedger(
            cp,
            requires_approval=lambda effect: True,
            on_approval_required=requests.put_nowait,
        )

        for n in range(count):
            run = asyncio.create_task(
                ledger.run(f"decided-{n % 8}", "pay", {"n": n}, handler)
            )
            request = await requests.get()
            await asyncio.sleep(_PAUSE * (1 + n % 7 / 5))
            decided = await ask(request.key)
            began = await run
            assert isinstance(began, float)
            took.append(began - decided)

    return took


async def crowd_figures(url: str, callers: int) -> dict[str, float]:
    """Let tasks wait for one key that another process holds.

    Returns the operations a second of all of them while they wait, and the milliseconds
    from the first result to the last.
    """
    args = {"order": 7}

    async def handler(effect: Effect) -> str:
        raise AssertionError("the other process has the key")

    async def ended(run: asyncio.Task[Any]) -> float:
        assert await run == "done"
        return time.monotonic()

    async with (
        open_checkpointer(url) as cp,
        _child({"do": "hold", "url": url, "args": args}) as ask,
    ):
        await ask("begin")
        ledger = EffectLedger(cp)
        counts = _counted(cp)

        def operations(name: str = "") -> int:
            return sum(count for one, count in counts.items() if name in one)

        runs = [
            asyncio.create_task(
                ended(asyncio.create_task(ledger.run("crowd", "pay", args, handler)))
            )
            for _ in range(callers)
        ]

        # Each looks for the key's holder once, and waits from then on.
        while True:
            await asyncio.sleep(0.5)

            if operations("find_call") >= callers:
                break

        before, started = operations(), time.monotonic()
        await asyncio.sleep(_WAITS)
        rate = (operations() - before) / (time.monotonic() - started)
        await ask("commit")
        times = await asyncio.gather(*runs)

    return {
        "operations a second": round(rate, 1),
        "last after first ms": round((max(times) - min(times)) * 1e3, 1),
    }


def _counted(cp: Any) -> Counter[str]:
    """Return how often each method of the handle is called from now on."""
    counts: Counter[str] = Counter()

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return method(*args, **options)

        return counted

    for name in OPERATIONS:
        if hasattr(cp, name):
            setattr(cp, name, counting(name, getattr(cp, name)))

    return counts


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
        took: dict[Any, list[float]] = {without: [], notifying: []}

        for turn in range(_TURNS):
            # In turns, so that what happens to every second one happens to both.
            for cp in (without, notifying) if turn % 2 else (notifying, without):
                pause(signal.SIGSTOP if cp is without else signal.SIGCONT)
                took[cp].append(await measure(cp))

        pairs = zip(took[notifying], took[without], strict=True)
        ratio = median(one / other for one, other in pairs)
        found.append(
            {
                "driver": driver,
                "what": what,
                "us": round(median(took[notifying]) * 1e6, 1),
                "ratio": round(ratio, 3),
            }
        )

    async with (
        open_checkpointer(url, notify=False) as without,
        open_checkpointer(url) as notifying,
    ):
        await compare(APPEND[0], lambda _: None)

        async with _child({"do": "watch", "url": url}) as ask:
            await compare(APPEND[1], ask.send_signal)

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
                    await _answer(loop, lambda _: _nothing())

                    for task in tasks:
                        task.cancel()
            case "bare":
                async with _sender(job) as send:
                    await _answer(loop, lambda _: _append_and(cp, send))
            case "approve":
                await _answer(loop, EffectLedger(cp).approve)
            case "hold":
                await _answer(loop, _Holder(cp, job["args"]).do)
            case _:
                await _answer(loop, lambda _: _append_and(cp, _nothing))


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


class _Holder:
    """Holds the key for which a crowd waits."""

    def __init__(self, cp: Any, args: dict[str, Any]) -> None:
        self._ledger = EffectLedger(cp)
        self._args = args
        self._begun: Any = None

    async def do(self, word: str) -> None:
        """Begin the effect, or record its result."""
        if word == "begin":
            self._begun = await self._ledger.begin("crowd", "pay", self._args)
        else:
            await self._ledger.commit(self._begun.record, "done")


async def _answer(loop: asyncio.AbstractEventLoop, do: Callable[[str], Any]) -> None:
    """Do it for each line that is read, and print when it was begun."""
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        started = time.monotonic()

        if line.strip() != _READY:
            await do(line.strip())

        sys.stdout.write(f"{started}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_work(json.loads(sys.argv[1])))
