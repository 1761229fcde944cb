"""A server of the tests: a private process, with its files in a temporary folder."""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from conformance.slowdown import slowdown

__all__ = [
    "PATIENCE",
    "EndsWithBlock",
    "ServerProcess",
    "free_port",
    "give",
    "give_all",
    "private_folder",
    "switched_to",
    "unprivileged",
]

PATIENCE = 30.0 * slowdown()
"""Seconds for a server to start or stop; a healthy one takes well under one."""


class EndsWithBlock:
    """Something that a ``with`` block starts and closes."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class ServerProcess(EndsWithBlock):
    """A server that runs as ``user``, and ends with the interpreter at the latest."""

    ends_with = signal.SIGKILL
    """What `close` sends; the data is removed."""

    def __init__(self, prefix: str, user: str | None = None) -> None:
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._folder = private_folder(prefix, user)
        atexit.register(self.close)

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

    @property
    def log(self) -> str:
        """What the server has logged so far."""
        path = self._folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def stop(self) -> None:
        """Shut the server down."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Stop and start, on the same data and ports."""
        self.stop()
        self.start()

    def close(self) -> None:
        """End the server and remove its data; idempotent."""
        atexit.unregister(self.close)
        self._end(self.ends_with)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run_server(
        self,
        command: Sequence[str],
        is_ready: Callable[[], bool],
        deadline: float,
        environment: Mapping[str, str] | None = None,
    ) -> bool:
        """Start the process; return whether it was ready before it ended."""
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for pytest, which stops the server at its own exit.
                start_new_session=True,
                **switched_to(self._user),
            )

        while self._process.poll() is None and time.monotonic() < deadline:
            if is_ready():
                self._guard = _guard(self._process.pid, self._user)
                return True

            time.sleep(0.005)

        self._end(signal.SIGKILL)
        return False

    def _end(self, how: signal.Signals) -> None:
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

        if self._process is None:
            return

        self._process.send_signal(how)
        self._process.send_signal(signal.SIGCONT)  # a stopped process ends only then

        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

        self._process = None


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def unprivileged() -> str | None:
    """Return the user to run servers as: they refuse to run as root."""
    if os.geteuid() != 0:
        return None

    # plain-words: ignore the name of a user
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name

    # plain-words: ignore the name of a user
    raise RuntimeError("root needs a user 'postgres' or 'nobody' to run servers as")


def switched_to(user: str | None) -> dict[str, Any]:
    """Return what makes `subprocess` run a program as the user, and nothing more."""
    if user is None:
        return {}

    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def _guard(server: int, user: str | None = None) -> subprocess.Popen[bytes]:
    """Start what ends the server when this process is killed without a word."""
    return subprocess.Popen(
        ["sh", "-c", 'cat; kill -QUIT "$0"', str(server)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        **switched_to(user),
    )


def give(path: Path, user: str | None) -> None:
    """Make the user the owner of a file."""
    if user is not None:
        shutil.chown(path, user)


def give_all(folder: Path, user: str | None) -> None:
    """Make the user the owner of a folder and of everything in it."""
    for path in (folder, *folder.rglob("*")):
        give(path, user)


def private_folder(prefix: str, user: str | None) -> Path:
    """Create a temporary folder for the user alone, where the user can get to it."""
    root = Path(tempfile.gettempdir()).resolve()

    if user is not None and not all(
        folder.stat().st_mode & 0o001 for folder in (root, *root.parents)
    ):
        root = Path("/tmp")

    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    give(folder, user)
    return folder
