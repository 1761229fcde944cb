"""Connections to one server of several, and what the server's errors prove."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import unquote

import asyncmy
from asyncmy.errors import MySQLError
from pydantic import FilePath, PositiveInt

from cpkit.driver import Fate, ServerOptions, StoreFailure, is_late
from cpkit.errors import InvalidURL

Run: TypeAlias = Callable[..., Awaitable[list[Sequence[Any]]]]

# After these another server may answer: the session or the server ends, there are too
# many connections, the node is not part of its cluster, or the server is read-only.
_OTHER_SERVER = {1927, 1053, 1040, 1203, 1047, 1290, 1836}

# The server has rolled back, or did not begin, and the same may succeed later: besides
# those, a lock wait that timed out, a deadlock (Galera: another node's transaction was
# first), a row that another writer inserted first, a changed table, a limit of time.
_AGAIN = {1205, 1213, 1062, 1020, 1412, 1969, 3024, 1317} | _OTHER_SERVER

# COMMIT answers with these only if it rolled back.
_ROLLED_BACK = {1205, 1213}

# A transaction whose client stopped between two statements holds its locks for ten
# seconds. MariaDB reads the comment that begins with M, MySQL the other one.
_SETTINGS = """
SET NAMES utf8mb4;
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET SESSION sql_mode = 'STRICT_ALL_TABLES', sql_notes = 0, autocommit = 1,
    innodb_lock_wait_timeout = {wait}
    /*M!100303 , max_statement_time = {wait}, idle_transaction_timeout = 10 */
    /*!50708 , max_execution_time = {wait}000 */;
SHOW VARIABLES WHERE Variable_name IN ('innodb_doublewrite',
    'innodb_flush_log_at_trx_commit', 'log_bin', 'max_allowed_packet', 'read_only',
    'sync_binlog', 'version', 'wsrep_on')
"""
# A transaction begins when this node has applied what any node acknowledged before.
_CAUSAL = "SET SESSION wsrep_sync_wait = 1; SHOW STATUS LIKE 'wsrep_ready'"

_HOST = re.compile(r"(\[[^][]+\]|[^][:@/]+)(?::([0-9]{1,5}))?")


class MariaDBOptions(ServerOptions):
    """``tls``: encrypt, and check the server's certificate by ``tls_ca`` (a file)."""

    pool_size: PositiveInt = 8
    tls: bool = False
    tls_ca: FilePath | None = None


class Connections:
    """Lends connections to operations, at most ``pool_size`` at a time.

    Of the hosts of the URL it uses the first one that takes writes. When a connection
    is lost, the next host is tried first.
    """

    def __init__(self, url: str, options: MariaDBOptions) -> None:
        self._options = options
        self._hosts, self._login = _parsed(url)
        self.name = f"mariadb://{','.join(self._hosts)}/{self._login['database']}"
        self.settings: Mapping[str, str] = {}
        self._idle: list[tuple[str, Any]] = []
        self._free = asyncio.Semaphore(options.pool_size)

    async def open(self) -> None:
        """Read the certificates, which is I/O."""
        if self._options.tls or self._options.tls_ca:
            make, ca = ssl.create_default_context, self._options.tls_ca
            self._login["ssl"] = await asyncio.to_thread(make, cafile=ca)

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop()[1].ensure_closed()

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Run]:
        """Lend a connection, by a function that runs statements on it.

        After an exception it is closed, and the server rolls back. Where the server may
        be lost, so are the idle connections: they lead to it too.
        """
        async with self._free:
            host, connection = self._idle.pop() if self._idle else await self._connect()

            try:
                yield partial(self._run, connection)
            except BaseException as exc:
                connection.close()
                cause = exc.__cause__ or exc
                is_lost = isinstance(cause, MySQLError | OSError) and not _is_answer(
                    cause
                )

                if is_late(cause) or is_lost or code(cause) in _OTHER_SERVER:
                    self._avoid(host)

                    while self._idle:
                        self._idle.pop()[1].close()

                raise

            self._idle.append((host, connection))

    async def _run(self, connection: Any, *script: str) -> list[Sequence[Any]]:
        """Run statements in one round trip, and return the rows of each.

        If another node's transaction aborts this one between two statements that were
        sent together, MariaDB 10.11 reports no error: it runs the rest without a
        transaction, and COMMIT succeeds. So in Galera each argument is a round trip of
        its own.
        """
        is_node = self.settings.get("wsrep_on") == "ON"
        parts = script if is_node else [";\n".join(script)]
        answers: list[Sequence[Any]] = []
        lost: Fate = "not sent"  # without a commit the server rolls back

        try:
            async with connection.cursor() as cursor:
                for part in parts:
                    if part is parts[-1] and script[-1] == "COMMIT":
                        lost = "unknown"

                    await cursor.execute(part)
                    answers.append(await cursor.fetchall())

                    while await cursor.nextset():
                        answers.append(await cursor.fetchall())
        except (MySQLError, OSError, asyncio.CancelledError) as exc:
            is_cancelled = isinstance(exc, asyncio.CancelledError)

            if is_cancelled and (lost == "unknown" or not is_late(exc)):
                raise

            is_commit = lost == "unknown" and len(answers) == len(script) - 1
            raise failure_of(exc, lost, is_commit) from exc

        return answers

    async def _connect(self) -> tuple[str, Any]:
        """Return the first host that answers and takes writes, and a connection.

        A host that does not answer may use its share of ``connect_timeout``.
        """
        share = self._options.connect_timeout / len(self._hosts)
        failure = StoreFailure("not sent", "the URL has no host")

        for host in list(self._hosts):
            try:
                async with asyncio.timeout(share):
                    return host, await self._connect_to(host)
            except StoreFailure as exc:
                failure = exc
            except (MySQLError, OSError) as exc:
                failure = failure_of(exc, "not sent")

            if failure.fate == "rejected":
                break

            self._avoid(host)

        raise failure

    async def _connect_to(self, host: str) -> Any:
        """Set up a session; refuse a server that takes no writes."""
        name, _, port = host.rpartition(":")
        place = {"host": name.strip("[]"), "port": int(port)}
        connection = await asyncmy.connect(**place, **self._login)
        wait = max(1, int(self._options.timeout))

        try:
            *_, rows = await self._run(connection, _SETTINGS.format(wait=wait))
            self.settings = dict(rows)

            if self.settings["read_only"] not in ("OFF", "0"):
                raise StoreFailure("not sent", "the server takes no writes (read_only)")

            is_node = self.settings.get("wsrep_on") == "ON"

            if is_node and (await self._run(connection, _CAUSAL))[1][0][1] != "ON":
                raise StoreFailure("not sent", "the node is not in its cluster")
        except BaseException:
            connection.close()
            raise

        return connection

    def _avoid(self, host: str) -> None:
        if self._hosts[0] == host:
            self._hosts.append(self._hosts.pop(0))


def code(exc: BaseException | None) -> int:
    """Return the number of an error of the server or the client; 0 for any other."""
    number = exc.args[0] if isinstance(exc, MySQLError) and exc.args else 0
    return number if isinstance(number, int) else 0


def failure_of(exc: BaseException, lost: Fate, is_commit: bool = False) -> StoreFailure:
    """Return what a store raises; ``lost`` is the fate if no answer came.

    The answer to a COMMIT that failed seldom proves anything.
    """
    reason = str(exc.args[-1] if exc.args else "") or type(exc).__name__

    if isinstance(exc, TimeoutError):
        reason = "no answer within the connect_timeout; is the server running?"

    if code(exc) in (_ROLLED_BACK if is_commit else _AGAIN):
        return StoreFailure("not sent", reason)

    is_answer = _is_answer(exc) and not is_commit
    return StoreFailure("rejected" if is_answer else lost, reason)


def _is_answer(exc: BaseException) -> bool:
    """Tell whether the server sent this error: the client's begin with 2000."""
    return code(exc) // 1000 not in (0, 2)


def _parsed(url: str) -> tuple[list[str], dict[str, Any]]:
    """Return the hosts, with ports, and what `asyncmy.connect` takes besides."""
    form = "mariadb://user:password@host:3306,host2/database"
    login, _, place = url.partition("://")[2].rpartition("@")
    netloc, _, database = place.partition("/")
    hosts = [_HOST.fullmatch(one) for one in netloc.split(",")]

    # The message does not quote the URL: what looks like a host could be a password.
    if not database or "/" in database + login or not all(hosts):
        raise InvalidURL(f"write {form}, with '@' and '/' in names as %40 and %2F")

    user, _, password = login.partition(":")
    return [f"{one[1]}:{one[2] or 3306}" for one in hosts if one], {
        "user": unquote(user) or None,
        # As UTF-8: asyncmy would encode a str as latin1.
        "password": unquote(password).encode(),
        "database": unquote(database),
        "autocommit": True,
    }
