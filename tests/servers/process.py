"""A server of the tests: a private process, with its files in a temporary folder."""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from conformance import server as process
from conformance.server import PATIENCE, free_port, switched_to

__all__ = [
    "PATIENCE",
    "EndsWithBlock",
    "ServerProcess",
    "free_port",
    "give",
    "give_all",
    "make_certificate",
    "private_folder",
    "switched_to",
    "unprivileged",
]


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


class ServerProcess(process.ServerProcess, EndsWithBlock):
    """A server that runs as ``user``, and ends with the interpreter at the latest.

    `close` sends ``ends_with``; the data is removed.
    """

    def __init__(self, prefix: str, user: str | None = None) -> None:
        super().__init__(user)
        self._folder = private_folder(prefix, user)
        atexit.register(self.close)

    @property
    def log(self) -> str:
        """What the server has logged so far."""
        path = self._folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def restart(self) -> None:
        """Stop and start, on the same data and ports."""
        self.stop()
        self.start()

    def close(self) -> None:
        """End the server and remove its data; idempotent."""
        atexit.unregister(self.close)
        self.end(self.ends_with)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run_server(
        self,
        command: Sequence[str],
        is_ready: Callable[[], bool],
        deadline: float,
        environment: Mapping[str, str] | None = None,
    ) -> bool:
        """Start the process; return whether it was ready before it ended."""
        return self.run(
            command,
            is_ready,
            self._folder,
            self._folder / "log",
            deadline=deadline,
            environment=environment,
        )


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


def make_certificate(folder: Path, user: str | None = None) -> None:
    """Create an authority, and a certificate for 127.0.0.1 that it has signed."""
    (folder / "names").write_text("subjectAltName = IP:127.0.0.1, DNS:localhost\n")
    # A key of RSA takes a hundred times as long.
    new = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    # Python 3.13 refuses an authority without a key usage.
    authority = "-days 30 -subj /CN=cpkit-tests -addext keyUsage=critical,keyCertSign"
    sign = "x509 -req -in server.csr -extfile names"

    for command in (
        f"{new} -x509 {authority} -keyout ca.key -out ca.crt",
        f"{new} -subj /CN=localhost -keyout server.key -out server.csr",
        f"{sign} -days 30 -CA ca.crt -CAkey ca.key -CAcreateserial -out server.crt",
    ):
        subprocess.run(
            ["openssl", *command.split()],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )

    for name in ("ca.crt", "server.crt", "server.key"):
        give(folder / name, user)
