"""The suite's relay, in front of a Redis server: it reads the commands."""

from __future__ import annotations

import asyncio
from typing import Literal
from urllib.parse import urlsplit

from conformance.proxy import Proxy as Relay

__all__ = ["Proxy"]


class Proxy(Relay):
    """A relay to the server of a URL, open while its context is.

    ``commands`` are the names of the commands that the client sent, ``received`` the
    bytes that it got. ``answers`` says what the proxy does with the server's answers:
    it lets them ``pass``, drops them (``swallow``), or cuts the connection in their
    place (``cut``). With ``once`` it does that to the next answer only.

    It is a firewall, too, that can forget its connections: what comes on them then
    is dropped (``drop``) or answered with a reset (``reset``).
    """

    def __init__(self, server_url: str) -> None:
        super().__init__("", 0)
        self._server_url = server_url
        self.turn_to(server_url)
        self.answers: Literal["pass", "swallow", "cut"] = "pass"
        self.once = False
        self.received = 0
        self.commands: list[str] = []
        self._forgotten: set[asyncio.StreamWriter] = set()
        self._how: Literal["drop", "reset"] = "drop"

    @property
    def url(self) -> str:
        port = urlsplit(self._server_url).port
        return self._server_url.replace(f":{port}", f":{self.port}")

    def turn_to(self, server_url: str) -> None:
        """Send new connections to another server."""
        place = urlsplit(server_url)
        self.server = (place.hostname or "", place.port or 0)

    def forget_connections(self, how: Literal["drop", "reset"]) -> None:
        """Do so with the connections of now."""
        self._forgotten, self._how = {*self._open}, how

    def forget(self) -> None:
        """Start all counts at zero again."""
        self.trips = self.received = 0
        self.commands = []

    async def pass_on(
        self, part: str, data: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if part == "request":
            self.commands += _names(data)

        if writer in self._forgotten:
            if self._how == "reset":
                raise ConnectionAbortedError("forgotten by the proxy")

            return

        if part == "answer":
            fate = self.answers

            if self.once:
                self.answers = "pass"

            if fate == "swallow":
                return

            if fate == "cut":
                raise ConnectionAbortedError("lost by the proxy")

            self.received += len(data)

        await super().pass_on(part, data, writer)


def _names(data: bytes) -> list[str]:
    """Return the names of the commands that begin in a piece of a request."""
    lines = data.split(b"\r\n")
    return [
        lines[at + 2].decode()
        for at, line in enumerate(lines[:-2])
        if line[:1] == b"*" and lines[at + 1][:1] == b"$"
    ]
