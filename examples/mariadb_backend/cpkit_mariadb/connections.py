"""Connections to one server of several, and what the server's errors prove."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn
from urllib.parse import unquote

import asyncmy
from asyncmy.constants.CLIENT import MULTI_STATEMENTS
from asyncmy.errors import MySQLError
from pydantic import PositiveInt

from cpkit.driver import Fate, ServerOptions, StoreFailure, is_late
from cpkit.errors import InvalidURL

__all__ = ["NO_TABLE", "Connections", "Link", "MariaDBOptions", "code"]

NO_TABLE = 1146

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
    /*M!100303 , max_statement_time = {timeout}, idle_transaction_timeout = 10 */
    /*!50708 , max_execution_time = {millis} */;
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
    tls_ca: str | None = None


class Link:
    """A connection that one operation has; its errors are those of a store."""

    def __init__(self, connection: Any, host: str) -> None:
        self.host = host
        self.is_node = False
        """Whether the server is a node of a Galera cluster."""
        self.close, self.abort = connection.ensure_closed, connection.close
        self._cursor = connection.cursor

    async def ask(self, script: str) -> list[Sequence[Any]]:
        """Run statements in one round trip; return the rows of each."""
        return await self._run([script], 0)

    async def write(self, *script: str, commits: bool = False) -> list[Sequence[Any]]:
        """Run statements of a transaction that writes; the last one may commit it.

        If another node's transaction aborts this one between two statements that were
        sent together, MariaDB 10.11 reports no error: it runs the rest without a
        transaction, and COMMIT succeeds. So in Galera each one is a round trip.
        """
        parts = script if self.is_node else [";\n".join(script)]
        return await self._run(parts, len(script) if commits else 0)

    async def _run(self, parts: Sequence[str], commit: int) -> list[Sequence[Any]]:
        """Run scripts; the answer of the number ``commit`` is that of a commit."""
        answers: list[Sequence[Any]] = []
        sent = 0

        try:
            async with self._cursor() as cursor:
                for part in parts:
                    sent += 1
                    await cursor.execute(part)
                    more = True

                    while more:
                        answers.append(await cursor.fetchall())
                        more = await cursor.nextset()
        except (MySQLError, OSError, asyncio.CancelledError) as exc:
            # Without a commit the server rolls back.
            lost: Fate = "unknown" if commit and sent == len(parts) else "not sent"

            if isinstance(exc, asyncio.CancelledError) and not (
                is_late(exc) and lost == "not sent"
            ):
                raise

            failed = failure_of(exc, lost)

            if commit == len(answers) + 1 and code(exc) not in _ROLLED_BACK:
                failed.fate = "unknown"

            raise failed from exc

        return answers


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
        self._idle: list[Link] = []
        self._free = asyncio.Semaphore(options.pool_size)

    async def open(self) -> None:
        """Read the certificates, which is I/O, and reach a server."""
        if self._options.tls or self._options.tls_ca:
            make, ca = ssl.create_default_context, self._options.tls_ca

            try:
                self._login["ssl"] = await asyncio.to_thread(make, cafile=ca)
            except OSError as exc:
                raise StoreFailure("rejected", f"{ca}: {exc}") from exc

        async with self.lend():
            pass

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Link]:
        """Lend a connection; after an exception what it did not commit is undone."""
        async with self._free:
            link = self._idle.pop() if self._idle else await self._connect()

            try:
                yield link
            except BaseException as exc:
                await self._fail(link, exc)

            self._idle.append(link)

    async def _fail(self, link: Link, exc: BaseException) -> NoReturn:
        """Roll back and keep the connection, or close it; raise the exception."""
        number = code(cause := exc.__cause__)
        is_lost = isinstance(cause, MySQLError | OSError) and not _is_answer(number)
        is_kept = False

        if is_late(cause or exc) or is_lost or number in _OTHER_SERVER:
            self._avoid(link.host)

            # They lead to the same server.
            while self._idle:
                self._idle.pop().abort()
        elif not isinstance(exc, asyncio.CancelledError):
            with suppress(StoreFailure):
                await link.ask("ROLLBACK")
                is_kept = True

        if is_kept:
            self._idle.append(link)
        else:
            link.abort()  # the server rolls back

        raise exc

    async def _connect(self) -> Link:
        """Return a connection to the first host that answers and takes writes.

        A host that does not answer may use its share of ``connect_timeout``.
        """
        share = self._options.connect_timeout / len(self._hosts)
        failure = StoreFailure("not sent", "the URL has no host")

        for host in list(self._hosts):
            try:
                async with asyncio.timeout(share):
                    return await self._connect_to(host)
            except StoreFailure as exc:
                failure = exc
            except (MySQLError, OSError) as exc:
                failure = failure_of(exc, "not sent")
                failure.__cause__ = exc

            if failure.fate == "rejected":
                break

            self._avoid(host)

        raise failure

    async def _connect_to(self, host: str) -> Link:
        name, _, port = host.rpartition(":")
        place = {"host": name.strip("[]"), "port": int(port)}
        connection = await asyncmy.connect(**place, **self._login)

        try:
            await self._prepare(link := Link(connection, host))
            return link
        except BaseException:
            connection.close()
            raise

    async def _prepare(self, link: Link) -> None:
        """Set up a session; refuse a server that takes no writes."""
        timeout = self._options.timeout
        limits = {"timeout": timeout, "millis": int(timeout * 1000)}
        limits["wait"] = max(1, int(timeout))
        *_, rows = await link.ask(_SETTINGS.format(**limits))
        self.settings = dict(rows)
        link.is_node = self.settings.get("wsrep_on") == "ON"

        if self.settings["read_only"] not in ("OFF", "0"):
            raise StoreFailure("not sent", "the server takes no writes (read_only)")

        if link.is_node and (await link.ask(_CAUSAL))[1][0][1] != "ON":
            raise StoreFailure("not sent", "the node is not part of its cluster")

    def _avoid(self, host: str) -> None:
        if self._hosts[0] == host:
            self._hosts.append(self._hosts.pop(0))


def code(exc: BaseException | None) -> int:
    """Return the number of an error of the server or the client; 0 for any other."""
    number = exc.args[0] if isinstance(exc, MySQLError) and exc.args else 0
    return number if isinstance(number, int) else 0


def failure_of(exc: BaseException, lost: Fate) -> StoreFailure:
    """Return what a store raises; ``lost`` is the fate if no answer came."""
    number = code(exc)
    reason = str(exc.args[-1] if exc.args else "") or type(exc).__name__

    if isinstance(exc, TimeoutError):
        reason = "no answer within the connect_timeout; is the server running?"

    if number in _AGAIN:
        return StoreFailure("not sent", reason)

    return StoreFailure("rejected" if _is_answer(number) else lost, reason)


def _is_answer(number: int) -> bool:
    """Tell whether the server sent this error: the client's begin with 2000."""
    return 1000 <= number < 2000 or number >= 3000


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
        "client_flag": MULTI_STATEMENTS,
    }
