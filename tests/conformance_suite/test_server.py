"""A server that the suite starts from a command line."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.server import ServerHarness, ServerNodes

# Listens with a child, and answers with the number of its starts.
PROGRAM = """
import os, socket, sys
port, folder = int(sys.argv[1]), sys.argv[2]
with open(f"{folder}/starts", "a") as file:
    file.write("x")
with socket.create_server(("127.0.0.1", port)) as listener:
    os.fork()
    while True:
        with listener.accept()[0] as client:
            client.sendall(open(f"{folder}/starts").read().encode())
"""


@dataclass
class Echo(ServerHarness):
    def url(self) -> str:
        return "memory://echo"

    def command(self) -> list[str]:
        return [sys.executable, "-c", PROGRAM, str(self.port), self.folder]

    def ask(self) -> bytes:
        """Return what the server says; nothing where it does not answer."""
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 0.3) as client,
        ):
            return client.recv(9)

        return b""


async def test_a_server_is_started_killed_and_started_again(tmp_path: Path) -> None:
    """A kill ends its children too, and it comes back on its data and port."""
    server = Echo(str(tmp_path / "data"))
    await server.start()
    pid = server.process.pid

    try:
        assert server.ask() == b"x"
        await server.kill()
        assert server.ask() == b""

        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

        await server.start()
        assert server.ask() == b"xx"
        await server.restart()
        assert server.ask() == b"xxx"
    finally:
        await server.kill()


async def test_a_paused_server_answers_when_it_is_resumed(tmp_path: Path) -> None:
    """Both of its processes are stopped: a connection waits."""
    server = Echo(str(tmp_path / "data"))
    await server.start()

    try:
        await server.pause()
        assert server.ask() == b""
        await server.resume()
        assert server.ask() == b"x"
    finally:
        await server.kill()


async def test_a_server_that_ends_tells_what_it_said(tmp_path: Path) -> None:
    class Wrong(Echo):
        def command(self) -> list[str]:
            return [sys.executable, "-c", "raise SystemExit('no such option')"]

    with pytest.raises(RuntimeError, match="no such option"):
        await Wrong(str(tmp_path / "data")).start()


async def test_another_folder_is_another_server(tmp_path: Path) -> None:
    """With a port of its own, and rebuilt from its fields."""
    server = Echo(str(tmp_path / "data"))
    other = await server.in_folder(str(tmp_path / "other"))
    assert isinstance(other, Echo)
    assert other.port != server.port
    assert other.folder.startswith(str(tmp_path / "other"))


async def test_nodes_are_killed_paused_and_restored(tmp_path: Path) -> None:
    class Pair(ServerNodes):
        async def leader(self, thread_id: str) -> str:
            return "a"

        async def cut(self, one: str, other: str) -> None:
            raise NotImplementedError

        async def take_over(self, lost: str) -> None:
            raise NotImplementedError

    servers = {name: Echo(str(tmp_path / name)) for name in "ab"}
    nodes = Pair(servers)

    try:
        await nodes.restore()
        assert await nodes.names() == ["a", "b"]
        await nodes.kill("a")
        await nodes.pause("b")
        assert [one.ask() for one in servers.values()] == [b"", b""]
        await nodes.restore()
        assert [one.ask() for one in servers.values()] == [b"xx", b"x"]
    finally:
        for server in servers.values():
            await server.kill()
