"""What on this machine keeps a client from connecting, told by name.

asyncpg reads the files of TLS and the name of the user before it connects. Its errors
name neither, and look like those of a server that is away.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qsl

_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
_IN_HOME = ("root.crt", "root.crl", "postgresql.crt", "postgresql.key")
_OF_FILES = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
_CUT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


async def local_fault(url: str, exc: BaseException) -> str | None:
    """Return why no repeat can connect; ``None`` if the server may be the reason."""
    if isinstance(exc, KeyError) or isinstance(exc.__cause__, KeyError):
        cure = "write one in the URL, or set PGUSER"
        return f"no user to log in as, for user id {os.getuid()} has no name: {cure}"

    if isinstance(exc, _OF_FILES):
        return await asyncio.to_thread(_unreadable_file, url)

    if isinstance(exc, ssl.SSLError) and not isinstance(exc, _CUT):
        return f"TLS failed, see {', '.join(_FILES)} in the URL: {exc}"

    # asyncpg has one class for this and for a connection that was cut.
    if type(exc) is ConnectionError and "rejected SSL" in str(exc):
        return f"sslmode asks for TLS, which the server has turned off: {exc}"

    return None


def _unreadable_file(url: str) -> str | None:
    given = {name: os.environ.get(f"PG{name.upper()}") for name in _FILES}
    given |= parse_qsl(url.partition("?")[2])

    try:
        for path in filter(None, map(given.get, _FILES)):
            open(path, "rb").close()

        for name in _IN_HOME:
            with suppress(FileNotFoundError, NotADirectoryError, RuntimeError):
                open(Path.home() / ".postgresql" / name, "rb").close()
    except OSError as exc:
        return f"cannot read {exc.filename}: {exc.strerror}"

    return None
