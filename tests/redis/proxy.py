"""A relay between the driver and its server. It counts, and can lose answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal, Self
from urllib.parse import urlsplit

__all__ = ["Proxy"]


class Proxy:
    """A TCP relay to the server of a URL, open while its context is.

    ``trips`` counts round trips: how often the client sent something after an answer.
    ``commands`` are the names of the commands that the client sent, ``received`` the
    bytes that it got. ``answers`` says what the proxy does with the server's answers:
    it lets them ``pass``, drops them (``swallow``), or cuts the connection in their
    place (``cut``). With ``once`` it does that to the next answer only.
    """

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._place = self._target = urlsplit(server_url)
        self._listener: asyncio.Server
        self._open: set[asyncio.StreamWriter] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self.answers: Literal["pass", "swallow", "cut"] = "pass"
        self.once = False
        self.trips = 0
        self.received = 0
        self.commands: list[str] = []

    @property
    def url(self) -> str:
        port = self._listener.sockets[0].getsockname()[1]
        return self._server_url.replace(f":{self._place.port}", f":{port}")

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._open) // 2

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._listener.close()
        await self.cut()
        await self._listener.wait_closed()

    def turn_to(self, server_url: str) -> None:
        """Send new connections to another server."""
        self._target = urlsplit(server_url)

    async def hung_up(self) -> None:
        """Return when the client has closed every connection."""
        await self._none_open.wait()

    def forget(self) -> None:
        """Start all counts at zero again."""
        self.trips = self.received = 0
        self.commands = []

    async def cut(self) -> None:
        """Cut every connection."""
        for writer in self._open:
            writer.transport.abort()

        await self.hung_up()

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(
                self._target.hostname, self._target.port
            )
        except OSError:
            writer.transport.abort()
            return

        pair = {writer, server_writer}
        self._open |= pair
        self._none_open.clear()
        answered = True

        async def requests() -> None:
            nonlocal answered

            while data := await reader.read(1 << 16):
                self.trips += answered
                answered = False
                self.commands += _names(data)
                server_writer.write(data)
                await server_writer.drain()

        async def answers() -> None:
            nonlocal answered

            while data := await server_reader.read(1 << 16):
                answered = True

                fate = self.answers

                if self.once:
                    self.answers = "pass"

                if fate == "cut":
                    return

                if fate == "pass":
                    self.received += len(data)
                    writer.write(data)
                    await writer.drain()

        ways = [asyncio.create_task(requests()), asyncio.create_task(answers())]

        # Whichever side hangs up first, so does the other.
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)

        for one in pair:
            one.transport.abort()

        for way in ways:
            way.cancel()

            with suppress(OSError, asyncio.CancelledError):
                await way

        self._open -= pair

        if not self._open:
            self._none_open.set()


def _names(data: bytes) -> list[str]:
    """Return the names of the commands that begin in a piece of a request."""
    lines = data.split(b"\r\n")
    return [
        lines[at + 2].decode()
        for at, line in enumerate(lines[:-2])
        if line[:1] == b"*" and lines[at + 1][:1] == b"$"
    ]
