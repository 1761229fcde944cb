"""A TCP relay between a client and its server, which loses exactly what it is told to.

A harness without a server does not need it. The tests of a driver may use it too::

    async with Proxy("127.0.0.1", 5432) as proxy:
        ...  # connect to proxy.port
        proxy.lose(Fault("answer", "cut"))
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal, NamedTuple, Self

__all__ = ["FAULTS", "Fault", "Proxy"]


class Fault(NamedTuple):
    """``part`` of a round trip is cut off, cut in its middle, or held back for ever."""

    part: Literal["request", "answer"]
    how: Literal["cut", "half", "stall"]

    def __str__(self) -> str:
        return f"{self.part} {self.how}"


FAULTS = [
    Fault("request", "cut"),
    Fault("request", "half"),
    Fault("request", "stall"),
    Fault("answer", "cut"),
    Fault("answer", "half"),
    Fault("answer", "stall"),
]


class Proxy:
    """A relay to a server, open while its context is.

    ``port`` is where it listens on 127.0.0.1. ``trips`` counts round trips: requests of
    a client after an answer. ``connections`` counts the clients, and ``lost`` the
    faults that happened. ``server`` is where new connections go. While ``stalls`` is
    true, no answer is passed on, and no connection is cut; ``stalls_requests`` is the
    same for the other direction.
    """

    def __init__(self, host: str, port: int) -> None:
        self.server = (host, port)
        self._listener: asyncio.Server
        self._open: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self._fault: Fault | None = None
        self._at = 0
        self.trips = 0
        self.connections = 0
        self.lost = 0
        self.stalls = False
        self.stalls_requests = False

    @property
    def port(self) -> int:
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    @property
    def open_connections(self) -> int:
        """How many clients are connected now."""
        return len(self._relays)

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        # asyncio leaves a connection open that it accepted just before a close, so no
        # other one is accepted, and the last one gets its relay first.
        with suppress(NotImplementedError):  # on Windows
            for listening in self._listener.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())

        for _ in range(3):
            await asyncio.sleep(0)

        self._listener.close()
        self.stop()
        self.cut()
        await self.hung_up()
        await self._listener.wait_closed()

    def cut(self) -> None:
        """Cut every connection."""
        for writer in self._open:
            writer.transport.abort()

    async def hung_up(self) -> None:
        """Return when every client has closed its connection."""
        await asyncio.gather(*self._relays)

    def lose(self, fault: Fault, trip: int = 1) -> None:
        """Let the fault happen once, at the n-th round trip from now on.

        0 is the round trip that is under way.
        """
        self._fault, self._at = fault, self.trips + trip

    def stop(self) -> None:
        """Lose nothing any more, and end the connections that a fault holds back."""
        self._fault = None
        self._stopped.set()
        self._stopped = asyncio.Event()

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)
        self.connections += 1

        try:
            server_reader, server_writer = await asyncio.open_connection(*self.server)
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
                await self.pass_on("request", data, server_writer)

        async def answers() -> None:
            nonlocal answered

            while data := await server_reader.read(1 << 16):
                answered = True
                await self.pass_on("answer", data, writer)

        ways = [asyncio.create_task(requests()), asyncio.create_task(answers())]

        # When one side closes, close the other one too.
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)

        for one in pair:
            one.transport.abort()

        self._open -= pair

        for way in ways:
            way.cancel()

        await asyncio.gather(*ways, return_exceptions=True)

    async def pass_on(
        self, part: str, data: bytes, writer: asyncio.StreamWriter
    ) -> None:
        """Relay a piece; at the fault end the connection, or wait for its end.

        A subclass may look at the pieces. `ConnectionAbortedError` ends the connection.
        """
        fault = self._fault

        if self.stalls if part == "answer" else self.stalls_requests:
            return

        if fault is None or fault.part != part or self.trips < self._at:
            writer.write(data)
            await writer.drain()
            return

        self._fault = None
        self.lost += 1

        if fault.how == "half":
            writer.write(data[: len(data) // 2])
            await writer.drain()
        elif fault.how == "stall":
            await self._stopped.wait()

        raise ConnectionAbortedError("lost by the proxy")
