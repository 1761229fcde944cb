"""A harness over a server that the tests start."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from conformance import Harness, URLHarness

__all__ = ["ServerHarness"]


class Server(Protocol):
    def kill(self) -> None: ...

    def start(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@dataclass
class ServerHarness(URLHarness):
    """A store on a private server that the suite may kill and pause."""

    server: Server

    options = Harness.options | {"timeout"}

    def elsewhere(self) -> Harness:
        return URLHarness(self.url)

    async def kill(self) -> None:
        await asyncio.to_thread(self.server.kill)

    async def start(self) -> None:
        await asyncio.to_thread(self.server.start)

    async def pause(self) -> None:
        await asyncio.to_thread(self.server.pause)

    async def resume(self) -> None:
        await asyncio.to_thread(self.server.resume)
