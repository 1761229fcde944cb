"""A server that the suite starts, kills and pauses: its process, harness and nodes.

The author of a store for a server writes two things: the command line, and how to ask
the server whether it answers::

    @dataclass
    class MyHarness(ServerHarness):
        def url(self):
            return f"mine://127.0.0.1:{self.port}/db"

        def command(self):
            return ["my-server", "--port", str(self.port), "--data", self.folder]
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from conformance.harness import Harness, URLHarness
from conformance.nodes import Nodes
from conformance.slowdown import slowdown
from cpkit import Checkpointer, open_checkpointer

__all__ = [
    "PATIENCE",
    "ServerHarness",
    "ServerNodes",
    "ServerProcess",
    "free_port",
    "switched_to",
]

PATIENCE = 30.0 * slowdown()
"""Seconds for a server to start or stop; a healthy one takes well under one."""


class ServerProcess:
    """A server that ends with this process at the latest.

    ``user`` runs it, where this process is root and the server refuses to be.
    """

    ends_with = signal.SIGKILL
    """What ends the server when this process is killed."""

    def __init__(self, user: str | None = None) -> None:
        self.user = user
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

    def run(
        self,
        command: Sequence[str],
        is_ready: Callable[[], bool],
        folder: str | Path,
        log: str | Path,
        *,
        deadline: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> bool:
        """Start the server; return whether it was ready before it ended.

        Its output is appended to ``log``. At the ``deadline`` of ``time.monotonic``,
        in 30 seconds by default, it is killed.
        """
        assert self._process is None, "it runs already"
        deadline = deadline or time.monotonic() + PATIENCE

        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C is for the process that reports.
                start_new_session=True,
                **switched_to(self.user),
            )

        while self._process.poll() is None and time.monotonic() < deadline:
            if is_ready():
                self._guard = self._guarded()
                return True

            time.sleep(0.005)

        self.kill()
        return False

    def stop(self) -> None:
        """Shut the server down."""
        self.end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill every process of the server at once, as a crash does; wait for it."""
        if self._process is not None:
            # Stopped first, so that it starts no process while its children are listed.
            self._process.send_signal(signal.SIGSTOP)
            _send(_descendants(self.pid), signal.SIGKILL)
            self.end(signal.SIGKILL)

    def pause(self) -> None:
        """Stop every process of the server; its sockets stay open and do not answer."""
        # The server first: once it is stopped, it starts no further process.
        os.kill(self.pid, signal.SIGSTOP)
        _send(_descendants(self.pid), signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after `pause`."""
        _send([self.pid, *_descendants(self.pid)], signal.SIGCONT)

    def end(self, how: signal.Signals) -> None:
        """End the server with this signal, and wait for it; idempotent."""
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

        if self._process is None:
            return

        children = _descendants(self.pid)
        self._process.send_signal(how)
        self._process.send_signal(signal.SIGCONT)  # a stopped process ends only then

        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

        self._process = None
        _send(children, signal.SIGKILL)  # those that the server left behind
        deadline = time.monotonic() + PATIENCE

        while left := _processes().keys() & {*children}:
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {left} of the ended server still run")

            time.sleep(0.005)

    def _guarded(self) -> subprocess.Popen[bytes]:
        """Start what ends the server when this process is killed without a word."""
        kill = f'cat; kill -{self.ends_with.name[3:]} "$0"'
        return subprocess.Popen(
            ["sh", "-c", kill, str(self.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            **switched_to(self.user),
        )


@dataclass
class ServerHarness(Harness):
    """A store on a server that the suite starts in ``folder``, on a free port.

    A subclass is a dataclass that defines `url` and `command`; `answers` and `prepare`
    where the server needs them. Start it before you certify: ``await harness.start()``,
    and at the end ``await harness.kill()``.
    """

    folder: str
    port: int = field(default_factory=lambda: free_port())

    options = Harness.options | {"timeout"}

    user: ClassVar[str | None] = None
    """The user that runs the server, where it refuses to run as root."""

    @abstractmethod
    def url(self) -> str:
        """Return the URL of the store, at 127.0.0.1 and ``self.port``."""

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command line: the server listens on ``self.port``.

        All of its data is in ``self.folder``. It stays in the foreground.
        """

    def answers(self) -> bool:
        """Return whether the server is ready for clients; runs in a thread.

        The default is true as soon as it accepts connections. Where a server accepts
        them before it has read its data, ask it something, with a short timeout.
        """
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True

        return False

    def prepare(self) -> None:
        """Create the data where the folder is empty; called before each start.

        On the files of an earlier server it does what an operator does after a power
        loss. The default does nothing.
        """

    @cached_property
    def process(self) -> ServerProcess:
        """The server's process."""
        return ServerProcess(self.user)

    @property
    def log(self) -> Path:
        """What the server printed, in a file beside the folder."""
        return Path(f"{os.path.abspath(self.folder)}-{self.port}.log")

    def open(self, **options: Any) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        return open_checkpointer(self.url(), **options)

    def elsewhere(self) -> Harness | None:
        return URLHarness(self.url())

    def server_address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def through(self, host: str, port: int) -> Harness:
        return URLHarness(self.url()).through(host, port)

    async def in_folder(self, folder: str) -> Harness:
        return replace(self, folder=f"{folder}/data", port=free_port())

    async def start(self) -> None:
        await asyncio.to_thread(self._start)

    async def kill(self) -> None:
        await asyncio.to_thread(self.process.kill)

    async def stop(self) -> None:
        """Shut the server down as an operator does."""
        await asyncio.to_thread(self.process.stop)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def pause(self) -> None:
        await asyncio.to_thread(self.process.pause)

    async def resume(self) -> None:
        await asyncio.to_thread(self.process.resume)

    def _start(self) -> None:
        os.makedirs(self.folder, exist_ok=True)
        self.prepare()
        _give(Path(self.folder), self.user)
        deadline = time.monotonic() + PATIENCE
        work = self.command(), self.answers, self.folder, self.log

        while True:
            before = self.log.stat().st_size if self.log.exists() else 0

            if self.process.run(*work, deadline=deadline):
                return

            said = self.log.read_bytes()[before:].decode(errors="replace")

            # The kernel may hold the port of a killed server for a moment.
            if "in use" not in said or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not start:\n{said[-4000:]}")

            time.sleep(0.05)


class ServerNodes(Nodes):
    """Nodes that are servers of this machine, each with a harness of its own.

    A subclass says who leads, cuts links, and promotes where the engine does not. In
    `restore`, it calls ``super().restore()`` and waits until all nodes are in sync.
    """

    def __init__(self, nodes: Mapping[str, ServerHarness]) -> None:
        self.nodes = dict(nodes)
        self._paused: set[str] = set()

    async def names(self) -> list[str]:
        return list(self.nodes)

    async def kill(self, node: str) -> None:
        await self.nodes[node].kill()

    async def pause(self, node: str) -> None:
        self._paused.add(node)
        await self.nodes[node].pause()

    async def resume(self, node: str) -> None:
        self._paused.discard(node)
        await self.nodes[node].resume()

    async def restore(self) -> None:
        for node in list(self._paused):
            await self.resume(node)

        for server in self.nodes.values():
            if not server.process.running:
                await server.start()


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def switched_to(user: str | None) -> dict[str, Any]:
    """Return what makes `subprocess` run a program as the user, and nothing more."""
    if user is None:
        return {}

    import pwd  # not on Windows

    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def _give(folder: Path, user: str | None) -> None:
    """Make the user the owner of a folder and of everything in it."""
    if user is not None:
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, user)


def _send(pids: list[int], how: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, how)


def _descendants(ancestor: int) -> list[int]:
    """Return the running processes that a process has started, and theirs."""
    parents = _processes()
    found = [pid for pid, parent in parents.items() if parent == ancestor]

    for pid in found:  # grows meanwhile
        found += [child for child, parent in parents.items() if parent == pid]

    return found


def _processes() -> dict[int, int]:
    """Return every running process and its parent; a dead one unreaped is not running.

    From /proc where there is one: slim containers have no ps.
    """
    found = {}

    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]

            if state != "Z":
                found[int(stat.parent.name)] = int(parent)

    if found:
        return found

    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], stdout=subprocess.PIPE, check=True
    )
    rows = (line.split() for line in listed.stdout.decode().splitlines())
    return {int(pid): int(parent) for pid, parent, state in rows if state[0] != "Z"}
