"""A relay between a client and its server that counts round trips and can lose them."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

__all__ = ["Proxy"]


class Proxy:
    """A TCP relay to the server of a URL, open while its context is.

    ``trips`` counts round trips: requests of a client after an answer. ``connections``
    counts the clients. With ``loses_answers`` the next answer of the server is dropped,
    and the connection is cut; ``lost`` counts these. With ``stalls`` no answer is
    passed on, and no connection is cut.
    """

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._place = urlsplit(server_url)
        self._listener: asyncio.Server
        self._open: set[asyncio.StreamWriter] = set()
        self.trips = 0
        self.connections = 0
        self.lost = 0
        self.loses_answers = False
        self.stalls = False

    @property
    def url(self) -> str:
        port = self._listener.sockets[0].getsockname()[1]
        return self._server_url.replace(f":{self._place.port}", f":{port}")

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()
        self.cut()
        await self._listener.wait_closed()

    def cut(self) -> None:
        """Cut every connection."""
        for writer in self._open:
            writer.transport.abort()

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1

        try:
            server_reader, server_writer = await asyncio.open_connection(
                self._place.hostname, self._place.port
            )
        except OSError:
            writer.transport.abort()
            return

        pair = {writer, server_writer}
        self._open |= pair
        answered = True

        async def requests() -> None:
            nonlocal answered

            while data := await reader.read(1 << 16):
                self.trips += answered
                answered = False
                server_writer.write(data)
                await server_writer.drain()

        async def answers() -> None:
            nonlocal answered

            while data := await server_reader.read(1 << 16):
                answered = True

                if self.loses_answers:
                    self.loses_answers = False
                    self.lost += 1
                    return

                if not self.stalls:
                    writer.write(data)
                    await writer.drain()

        ways = [asyncio.create_task(requests()), asyncio.create_task(answers())]

        # When one side closes, close the other one too.
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)

        for one in pair:
            one.transport.abort()

        self._open -= pair

        for way in ways:
            way.cancel()

            with contextlib.suppress(OSError, asyncio.CancelledError):
                await way
