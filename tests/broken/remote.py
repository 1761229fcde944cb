"""Clients of a small TCP server, which misjudge a lost answer."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

from conformance.harness import Harness, find
from conformance.operations import READS, WRITES
from cpkit import BackendUnavailable
from tests.broken.reference import Reference
from tests.broken.store import breaks

OPERATIONS = {*(row.method for row in READS), *(row.method for row in WRITES)}


class Server:
    """Runs operations on a reference in a thread, one for each line that it receives.

    A line is the number of a request in ``requests``, and so is the answer. So the wire
    decides what runs and what is answered, and no value needs an encoding.
    """

    requests: ClassVar[dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]] = {}
    answers: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.port = 0
        started = threading.Event()
        threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), daemon=True
        ).start()
        started.wait()

    async def _serve(self, started: threading.Event) -> None:
        async with Reference("remote") as cp:
            server = await asyncio.start_server(
                lambda reader, writer: self._client(cp, reader, writer), "127.0.0.1"
            )
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            await server.serve_forever()

    async def _client(
        self, cp: Reference, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while (line := await reader.readline()).endswith(b"\n"):
                number = line.decode().strip()
                method, args, options = self.requests.pop(number)

                try:
                    answer = await getattr(cp, method)(*args, **options)
                except Exception as exc:
                    answer = exc

                self.answers[number] = answer
                writer.write(line)
                await writer.drain()

        writer.close()


class Remote(Reference):
    """A correct client: a lost answer may mean that the write was applied."""

    server: ClassVar[Server | None] = None

    def __init__(self, port: int, *, timeout: float = 30, **options: Any) -> None:
        super().__init__(None, **options)
        self._port = port
        self._timeout = timeout

    def __getattribute__(self, name: str) -> Any:
        """Let the server do each operation."""
        if name not in OPERATIONS:
            return super().__getattribute__(name)

        return partial(self._ask, name)

    async def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        self._check_usable()
        number = uuid4().hex
        Server.requests[number] = (method, args, options)
        writer: asyncio.StreamWriter | None = None

        try:
            async with asyncio.timeout(self._timeout):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(f"{number}\n".encode())
                line = await reader.readline()
        except (OSError, TimeoutError):
            line = b""
        finally:
            if writer is not None:
                writer.close()

        if not line.endswith(b"\n"):
            return await self._lost(method, *args, **options)

        answer = Server.answers.pop(number)

        if isinstance(answer, Exception):
            raise answer

        return answer

    async def _lost(self, method: str, *args: Any, **options: Any) -> Any:
        raise BackendUnavailable("broken", "no answer", maybe_applied=True)


@dataclass
class RemoteHarness(Harness):
    """Opens a `Remote`, or a subclass, on a server that starts with the first one."""

    kind: str
    port: int = 0

    options = Harness.options | {"timeout"}

    def __post_init__(self) -> None:
        Remote.server = Remote.server or Server()
        self.port = self.port or Remote.server.port

    def open(self, **options: Any) -> Remote:
        opened: Remote = find(self.kind)(self.port, **options)
        return opened

    def elsewhere(self) -> Harness | None:
        return None

    def server_address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def through(self, host: str, port: int) -> Harness:
        return RemoteHarness(self.kind, port)


def on_a_server(kind: str, _folder: str) -> Harness:
    return RemoteHarness(kind)


@breaks("wire.lost-answers-are-told", harness=on_a_server)
class TakesALostAnswerForARefusal(Remote):
    async def _lost(self, method: str, *args: Any, **options: Any) -> Any:
        raise BackendUnavailable("broken", "no answer")


@breaks("wire.lost-answers-are-told", harness=on_a_server)
class SendsAgain(Remote):
    """Repeats every operation whose answer was lost."""

    async def _lost(self, method: str, *args: Any, **options: Any) -> Any:
        return await self._ask(method, *args, **options)


@breaks("wire.one-way-is-unavailable", harness=on_a_server, hangs=True)
class WaitsForAnswersWithoutEnd(Remote):
    def __init__(self, port: int, **options: Any) -> None:
        super().__init__(port, **options)
        self._timeout = 3600


@breaks("wire.exhausted-is-unavailable", harness=on_a_server, hangs=True)
class WaitsForItsPoolWithoutEnd(Remote):
    """The time begins when an operation has its connection."""

    def __init__(self, port: int, **options: Any) -> None:
        super().__init__(port, **options)
        self._free = asyncio.Semaphore(2)

    async def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        async with self._free:
            return await super()._ask(method, *args, **options)


@breaks("wire.lost-answers-are-told", harness=on_a_server)
class FindsNothingOnALostAnswer(Remote):
    """Takes a lost answer to a question for a key for no answer."""

    async def _lost(self, method: str, *args: Any, **options: Any) -> Any:
        if method == "find_completed":
            return None

        return await super()._lost(method, *args, **options)
