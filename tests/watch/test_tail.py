"""Following a thread: as an iterator, as server-sent events, as a command."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import MutableMapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cpkit import (
    ErasesThreads,
    MemoryCheckpointer,
    VersionConflict,
    open_checkpointer,
)
from cpkit.sessions import Trimmed
from cpkit.sessions.tail import TailEvents, read_from
from tests.cli.command import environment
from tests.driver.gated import run_ready_tasks
from tests.processes import Forked
from tests.simulation.loop import simulated_loop


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


@dataclass(eq=False)
class Said:
    text: str


async def test_messages_may_compare_by_identity() -> None:
    """Two loads of a message are unequal then, and the thread is still the same."""
    async with open_checkpointer("memory://", message_type=Said) as cp:
        await cp.append("t", [Said("one")])

        async with aclosing(read_from(cp, "t")) as tail:
            assert (await anext(tail)).message.text == "one"
            later = asyncio.create_task(anext(tail))
            await run_ready_tasks()
            await cp.append("t", [Said("two")])
            assert (await later).message.text == "two"
            assert isinstance(cp, ErasesThreads)
            await cp.delete_thread("t")
            await cp.append("t", [Said("three"), Said("four")])

            with pytest.raises(VersionConflict):
                await anext(tail)


@pytest.mark.parametrize(("before", "is_over"), [(3, False), (4, False), (5, True)])
async def test_a_trimmed_cursor_gets_a_clear_answer(before: int, is_over: bool) -> None:
    """A reader that has read four messages goes on, or learns what is gone."""
    async with MemoryCheckpointer[Any]() as cp:
        await cp.append("t", [{"n": n} for n in range(4)])

        async with aclosing(read_from(cp, "t")) as tail:
            for number in range(4):
                assert await anext(tail) == (number + 1, {"n": number})

            later = asyncio.ensure_future(anext(tail))
            await run_ready_tasks()
            messages = [{"n": n} for n in range(4, 8)]
            await cp.append("t", messages[:1])
            assert await later == (5, {"n": 4})
            await cp.append("t", messages[1:])
            await cp.trim("t", before + 2 if is_over else before)

            if is_over:
                with pytest.raises(Trimmed, match="from 5 to 6 are gone; go on") as e:
                    await anext(tail)

                assert (e.value.version, e.value.first) == (5, 7)
            else:
                assert [await anext(tail) for _ in range(3)] == [
                    (n + 1, {"n": n}) for n in (5, 6, 7)
                ]

        async with aclosing(read_from(cp, "t")) as new:
            first = 7 if is_over else before
            assert await anext(new) == (first + 1, {"n": first})

        async with aclosing(read_from(cp, "t", 2)) as old:
            with pytest.raises(Trimmed):
                await anext(old)


async def test_a_change_is_one_read() -> None:
    """A short page has everything, so the reader waits without another read."""
    async with MemoryCheckpointer[Any]() as cp:
        reads = 0

        def counted(read: Any) -> Any:
            async def count(*args: Any) -> Any:
                nonlocal reads
                reads += 1
                return await read(*args)

            return count

        for name in ("read", "load_range"):
            setattr(cp, name, counted(getattr(cp, name)))

        async with aclosing(read_from(cp, "t")) as tail:
            for number in range(10):
                waiting = asyncio.ensure_future(anext(tail))
                await run_ready_tasks()
                await cp.append("t", [{"n": number}])
                assert await waiting == (number + 1, {"n": number})

        assert reads == 11


async def test_more_than_a_page_is_read_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last page is shorter than the others."""
    monkeypatch.setattr("cpkit.sessions.tail._PAGE", 3)

    async with MemoryCheckpointer[Any]() as cp:
        await cp.append("t", [{"n": n} for n in range(9)])

        async with aclosing(read_from(cp, "t")) as tail:
            found = [(await anext(tail)).version for _ in range(9)]
            assert found == [*range(1, 10)]


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
            assert await browser.got.get() == b"id: 0\nevent: reset\ndata: {}\n\n"

        assert browser.status == 200
        browser = Browser()

        # The browser sends the id of the reset back, and reads the new thread whole.
        async with browser.visits(app, (b"last-event-id", b"0")):
            await browser.got.get()
            await cp.append("t", [{"n": "new"}])
            assert await browser.got.get() == b'id: 1\ndata: {"n":"new"}\n\n'

        browser = Browser()

        async with browser.visits(app, (b"last-event-id", b"x")):
            await browser.got.get()

        assert browser.status == 400

    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_half_a_character_is_followed() -> None:
    """As an escape in the event, which is UTF-8 and JSON for any browser."""
    cut = {"role": "tool", "content": "é cut \ud83d", "\udfff": 1, "text": "\udfff \n"}

    async with MemoryCheckpointer[Any]() as cp:
        await cp.append("t", [cut])

        async with aclosing(read_from(cp, "t")) as tail:
            assert await anext(tail) == (1, cut)

        browser = Browser()

        async with browser.visits(TailEvents(cp, "t")):
            await browser.got.get()
            event = (await browser.got.get()).decode()

    assert json.loads(event.partition("data: ")[2]) == cut


async def test_events_have_the_json_of_typed_messages() -> None:
    """Also with half a character, which their class keeps."""
    async with open_checkpointer("memory://", message_type=Said) as cp:
        await cp.append("t", [Said("cut \ud83d")])
        browser = Browser()

        async with browser.visits(TailEvents(cp, "t")):
            await browser.got.get()
            event = await browser.got.get()

    assert event == b'id: 1\ndata: {"text": "cut \\ud83d"}\n\n'


def test_nothing_follows_the_end_of_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection that takes long to take the last body gets no comment after it."""
    monkeypatch.setattr("cpkit.sessions.tail._KEEP_ALIVE", 1.0)
    sent: list[tuple[bytes, bool]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            sent.append((message["body"], message["more_body"]))
            await asyncio.sleep(0 if message["more_body"] else 10)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        async with MemoryCheckpointer[Any]() as cp:
            scope = {"type": "http", "headers": []}
            await TailEvents(cp, "t", version=5)(scope, receive, send)

    simulated_loop(Random(0)).run(main())
    assert sent == [
        (b": open\n\n", True),
        (b"id: 0\nevent: reset\ndata: {}\n\n", False),
    ]


@pytest.mark.parametrize("which", ["receive", "beat"])
def test_an_error_of_the_connection_ends_the_stream(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server gets it, and no task is left."""

    async def send(message: MutableMapping[str, Any]) -> None:
        if message.get("body") == b": still here\n\n":
            raise ConnectionError("beat")

    async def receive() -> Any:
        await asyncio.sleep(1 if which == "receive" else 1000)
        raise ConnectionError("receive")

    async def main() -> None:
        async with MemoryCheckpointer[Any]() as cp:
            scope = {"type": "http", "headers": []}

            with pytest.raises(ConnectionError, match=which):
                await TailEvents(cp, "t")(scope, receive, send)

    loop = simulated_loop(Random(0))
    loop.run(main())
    assert loop.errors == []


def test_the_command_follows_a_thread(tmp_path: Path) -> None:
    """cpkit watch prints a line for each message of another process, until Ctrl-C."""
    url = f"sqlite:///{tmp_path}/agent.db"

    async def append(*numbers: int) -> None:
        async with open_checkpointer(url) as cp:
            await cp.append("t", [{"role": "user", "n": n} for n in numbers])

    asyncio.run(append(0, 1))
    words = ("watch", url, "t", "--last", "1", "--json")

    with Forked("cpkit", *words) as watching:
        assert json.loads(watching.stdout.readline())["version"] == 2
        asyncio.run(append(2))
        line = json.loads(watching.stdout.readline())
        assert line == {"version": 3, "message": {"role": "user", "n": 2}}
        watching.send_signal(signal.SIGINT)
        assert watching.wait() == 130


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_command_prints_json_lines_everywhere(
    tmp_path: Path, is_terminal: bool
) -> None:
    """Also in an encoding without the characters; a terminal gets no controls."""
    url = f"sqlite:///{tmp_path}/agent.db"
    evil = "é 😀 \x9b31m \u202e \ud83d"

    async def append() -> None:
        async with open_checkpointer(url) as cp:
            await cp.append("t", [{"role": "user", "content": evil}])

    asyncio.run(append())
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    watching = subprocess.Popen(
        [sys.executable, "-m", "cpkit", "watch", url, "t", "--json"],
        stdout=theirs,
        env=environment({"PYTHONIOENCODING": "utf-8" if is_terminal else "ascii"}),
    )
    os.close(theirs)

    with watching, open(ours, encoding="utf-8") as lines:
        line = lines.readline().rstrip("\n")
        watching.send_signal(signal.SIGINT)

    assert json.loads(line)["message"]["content"] == evil
    assert is_terminal <= line.isprintable()
