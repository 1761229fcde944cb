"""Following a thread: as an iterator, as server-sent events, as a command."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import MutableMapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cpkit import MemoryCheckpointer, VersionConflict, open_checkpointer
from cpkit.tail import TailEvents, read_from
from tests.cli.command import environment


async def test_new_messages_are_read() -> None:
    """It begins behind a version, and goes on with what is appended."""
    async with MemoryCheckpointer[Any]() as cp:
        await cp.append("t", [{"n": 0}, {"n": 1}])

        async with aclosing(read_from(cp, "t", 1)) as tail:
            assert await anext(tail) == (2, {"n": 1})
            waiting = asyncio.ensure_future(anext(tail))
            await cp.save_extra("t", {"a": 1})
            await cp.append("t", [{"n": 2}, {"n": 3}])
            assert await waiting == (3, {"n": 2})
            assert await anext(tail) == (4, {"n": 3})

        with pytest.raises(ValueError, match="-1"):
            await anext(read_from(cp, "t", -1))


@pytest.mark.parametrize("count", [0, 2, 5])
async def test_a_deleted_thread_is_told(count: int) -> None:
    """A reader of a thread that was deleted and began again gets VersionConflict."""
    async with MemoryCheckpointer[Any]() as cp:
        await cp.append("t", [{"n": 0}, {"n": 1}])

        async with aclosing(read_from(cp, "t")) as tail:
            assert [await anext(tail), await anext(tail)] == [
                (1, {"n": 0}),
                (2, {"n": 1}),
            ]
            await cp.delete_thread("t")
            await cp.append("t", [{"again": n} for n in range(count)])

            with pytest.raises(VersionConflict) as caught:
                await anext(tail)

            assert (caught.value.expected, caught.value.actual) == (2, count)


class Browser:
    """The other side of an ASGI application."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.got: asyncio.Queue[bytes] = asyncio.Queue()
        self.status = 0

    async def receive(self) -> MutableMapping[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.got.put_nowait(message["body"])

    @asynccontextmanager
    async def visits(self, app: TailEvents, *headers: tuple[bytes, bytes]) -> Any:
        scope = {"type": "http", "headers": headers}
        serving = asyncio.create_task(app(scope, self.receive, self.send))
        yield
        self.gone.set()
        await serving


async def test_events_go_on_behind_the_last_one() -> None:
    """An event has its version as id; Last-Event-ID says where to go on."""
    async with MemoryCheckpointer[Any]() as cp:
        await cp.append("t", [{"n": 0}, {"n": "é\n"}])
        app = TailEvents(cp, "t")
        browser = Browser()

        async with browser.visits(app):
            assert await browser.got.get() == b": open\n\n"
            assert await browser.got.get() == b'id: 1\ndata: {"n":0}\n\n'
            assert (await browser.got.get()).startswith(b"id: 2\n")

        browser = Browser()

        async with browser.visits(app, (b"last-event-id", b"2")):
            await browser.got.get()
            await cp.append("t", [{"n": 2}])
            assert await browser.got.get() == b'id: 3\ndata: {"n":2}\n\n'
            await cp.delete_thread("t")
            assert await browser.got.get() == b"event: reset\ndata: {}\n\n"

        assert browser.status == 200
        browser = Browser()

        async with browser.visits(app, (b"last-event-id", b"x")):
            await browser.got.get()

        assert browser.status == 400

    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_the_command_follows_a_thread(tmp_path: Path) -> None:
    """cpkit watch prints a line for each message of another process, until Ctrl-C."""
    url = f"sqlite:///{tmp_path}/agent.db"

    async def append(*numbers: int) -> None:
        async with open_checkpointer(url) as cp:
            await cp.append("t", [{"role": "user", "n": n} for n in numbers])

    asyncio.run(append(0, 1))
    watching = subprocess.Popen(
        [sys.executable, "-m", "cpkit", "watch", url, "t", "--last", "1", "--json"],
        stdout=subprocess.PIPE,
        env=environment(),
    )

    with watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["version"] == 2
        asyncio.run(append(2))
        line = json.loads(watching.stdout.readline())
        assert line == {"version": 3, "message": {"role": "user", "n": 2}}
        watching.send_signal(signal.SIGINT)
        assert watching.wait() == 130
