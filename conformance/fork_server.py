"""A warm process that starts `conformance.worker`, and others, by fork.

Most of a worker's processor time goes into starting Python and importing the suite; a
fork takes milliseconds. What is certified stays the same:

- The server imports the suite and cpkit, not the store. Each worker imports the store
  itself, so a thread, a file or an id that a module makes belongs to one worker.
- A fork copies every open descriptor, and only the thread that forks. So a server that
  has more than one thread or more than three descriptors at its start is not used. A
  worker has the three descriptors that are passed to `start_worker`.

A process that was forked like this, and starts workers itself, forks a server of its
own: see `fork_own_server`.

Where a server cannot fork like this, each worker is a new Python process.

A server that was killed, perhaps by the system for its memory, is started again for the
next worker. The exit code of a worker that it had forked is lost: `wait` raises a
`Failure` that says so.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, cast

from conformance.failure import Failure
from cpkit.registry import driver_names

__all__ = ["Started", "close_server", "fork_own_server", "main", "start_worker"]


class Started(Protocol):
    """A child process, as `subprocess.Popen` is one."""

    pid: int

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class _Process(Protocol):
    """The process of a server, as `subprocess.Popen` is one."""

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


def start_worker(
    stdin: int, stdout: int, stderr: int, program: str = "worker"
) -> Started:
    """Start a worker, or another of `PROGRAMS`, with these descriptors and no other."""
    for _ in range(2):
        server = _server()

        if server is None:
            break

        try:
            return _Forked(
                server, server.ask(f"fork {program}", [stdin, stdout, stderr])
            )
        except Failure:
            _forget(server)

    return subprocess.Popen(
        _python(f"conformance.{program}"),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,  # Ctrl-C is for the process that reports
    )


def fork_own_server() -> bool:
    """Fork the server of this process, and return whether this is the same process.

    Otherwise it is the server or a worker, and has done its work. Call it before this
    process has threads or imports a store.
    """
    if sys.platform != "linux" or not _is_alone():
        return True  # the first worker starts a server, if it can

    ours, its = socket.socketpair()
    pid = os.fork()

    if pid == 0:
        ours.close()
        _use([its.detach(), os.open(os.devnull, os.O_WRONLY), os.dup(2)])
        main()
        return False

    its.close()
    _SERVERS[os.getpid()] = _Server(_Fork(pid), ours)
    return True


@atexit.register
def close_server() -> None:
    """End the server of this process; the next worker starts another one."""
    with _LOCK:
        server = _SERVERS.pop(os.getpid(), None)

        if server is not None:
            server.close()


PROGRAMS = ("worker", "powerloss.writer")
"""The modules of the suite whose ``main`` a fork runs; others are imported if asked."""

_LOCK = threading.Lock()
_SERVERS: dict[int, _Server | None] = {}
"""The server by process id: a fork of this process has its own."""


def _server() -> _Server | None:
    """Return the server of this process, or ``None`` where it cannot fork."""
    with _LOCK:
        pid = os.getpid()

        if pid not in _SERVERS:
            _SERVERS[pid] = _started()

        return _SERVERS[pid]


def _forget(server: _Server) -> None:
    """Let the next worker start another server; this one has ended."""
    with _LOCK:
        if _SERVERS.get(os.getpid()) is server:
            del _SERVERS[os.getpid()]

    server.close()


def _started() -> _Server | None:
    if sys.platform != "linux":
        return None

    ours, its = socket.socketpair()

    with its:
        process = subprocess.Popen(
            _python(__name__),
            stdin=its.fileno(),
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the process that reports
        )

    server = _Server(process, ours)

    with suppress(Failure):  # it could not run here, and has ended
        if server.ask("hello"):
            return server

    server.close()
    return None


class _Server:
    """The server, as the process that started it sees it."""

    def __init__(self, process: _Process, control: socket.socket) -> None:
        self._lock = threading.Lock()
        self._process = process
        self._socket = control

    def ask(self, request: str, descriptors: Sequence[int] = ()) -> int:
        """Send a request, and return the answer.

        Raises `Failure` where the server has ended.
        """
        with self._lock:
            self.check()

            try:
                socket.send_fds(self._socket, [request.encode()], [*descriptors])
                answer = self._socket.recv(64)
            except ConnectionError:
                answer = b""

            if not answer:
                self._process.wait()
                self.check()  # raises

            return int(answer)

    def check(self) -> None:
        """Raise `Failure` where the server has ended."""
        code = self._process.poll()

        if code is not None:
            raise Failure(
                "the suite's fork server to run: it starts the workers",
                f"it ended with exit code {code}; this says nothing about the store",
            )

    def close(self) -> None:
        with self._lock:
            # A fork of this process may have a copy of the socket, so closing it alone
            # would not end the server.
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

            self._socket.close()
            self._process.wait()


class _Fork:
    """A fork of this process, as `subprocess.Popen` would show it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None

        return self._code

    def wait(self) -> int:
        return cast(int, self.poll(0))


class _Forked:
    """A worker that the server has forked; several threads may call `wait`."""

    def __init__(self, server: _Server, pid: int) -> None:
        self._server = server
        self.pid = pid
        self._lock = threading.Lock()
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:  # else the id may belong to another process
            self._server.check()

            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end; the server waits too, and starts no worker meanwhile."""
        with self._lock:
            if self._code is None:
                self._code = self._server.ask(f"wait {self.pid}")

            return self._code


def _python(module: str) -> list[str]:
    """Return the command that runs the ``main`` of a module with this import path."""
    code = f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"
    return [sys.executable, "-c", code, *sys.path]


def main() -> None:
    """Answer requests until the process that sends them has ended."""
    # Imported here, because the process that sends requests does not need it.
    # A writer imports its script when it knows the store.
    for name in (*PROGRAMS, "powerloss.script"):
        importlib.import_module(f"conformance.{name}")

    driver_names()  # kept: a worker would read the list of every package again
    control = socket.socket(fileno=0)

    while True:
        text, descriptors, _, _ = socket.recv_fds(control, 64, 3)
        request, _, what = text.decode().partition(" ")

        if request == "hello":
            answer = int(_is_alone())
        elif request == "wait":
            answer = os.waitstatus_to_exitcode(os.waitpid(int(what), 0)[1])
        elif request == "fork":
            program = importlib.import_module(f"conformance.{what}")
            # Else a worker visits, and so copies, all of this when it ends.
            gc.freeze()
            answer = os.fork()

            if answer == 0:
                control.detach()
                _use(descriptors)
                program.main()
                return
        else:
            return

        for descriptor in descriptors:
            os.close(descriptor)

        with suppress(BrokenPipeError):  # that process was killed: nothing more comes
            control.send(str(answer).encode())


def _is_alone() -> bool:
    """Return whether this process has one thread and only its own descriptors.

    A site may have a module that starts threads in every Python process.
    """
    try:
        threads = os.listdir("/proc/self/task")
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return False

    # The last descriptor is that of the listing itself.
    return len(threads) == 1 and len(descriptors) == 4


def _use(descriptors: list[int]) -> None:
    """Make these the standard input, output and error of this process."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
