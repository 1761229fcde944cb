"""Where the server is: from a URL, or from the caller's own client."""

from __future__ import annotations

import re
import socket
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cpkit.errors import InvalidURL
from cpkit.registry import redacted

URL_OPTIONS = frozenset(
    "client_name db password ssl_ca_certs ssl_ca_data ssl_ca_path ssl_cert_reqs "
    "ssl_certfile ssl_check_hostname ssl_ciphers ssl_keyfile ssl_min_version "
    "ssl_password username".split()
)
"""Query parameters for redis-py's own parser."""

# A firewall forgets connections that are idle for minutes.
_KEEPALIVE = {
    getattr(socket, name): seconds
    for name, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 5))
    if hasattr(socket, name)  # not on every system
}


def pool_of(where: Any, size: int, connect_timeout: float) -> ConnectionPool:
    """Return a pool for one store, of connections that repeat nothing by themselves.

    Of a client it takes the settings; the client's own connections are not used.
    """
    if isinstance(where, str):
        theirs = _pool_of_url(where)
    elif isinstance(where, Redis):
        theirs = where.connection_pool
    else:
        what = type(where).__name__
        raise TypeError(f"expected a URL or a redis.asyncio.Redis, not {what}")

    # JSON texts and ids are bytes to the driver.
    if theirs.connection_kwargs.get("decode_responses"):
        raise ValueError("create the client with decode_responses=False")

    settings = {
        name: value
        for name, value in theirs.connection_kwargs.items()
        # What RESP3 needs to follow a server that moves.
        if not name.startswith(("maint", "orig_", "oss_"))
    }
    settings |= {
        # RESP2 has all that is needed, without a handshake that old servers and narrow
        # ACLs refuse.
        "protocol": 2,
        # A retry would make a write twice.
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "retry_on_timeout": False,
        "health_check_interval": 0,
        # The handle limits whole operations.
        "socket_timeout": None,
        "socket_connect_timeout": connect_timeout,
    }

    if issubclass(theirs.connection_class, Connection):  # not a Unix socket
        settings["socket_keepalive"] = True
        settings["socket_keepalive_options"] = _KEEPALIVE

    return ConnectionPool(theirs.connection_class, size, **settings)


def name_of(pool: ConnectionPool) -> str:
    """Return the server's address for people to read, without a password."""
    settings = pool.connection_kwargs
    database = settings.get("db") or 0

    if "path" in settings:
        return f"redis+unix://{settings['path']}?db={database}"

    if sentinel := settings.get("connection_pool"):
        return f"redis+sentinel://{sentinel.service_name}/{database}"

    host, port = settings.get("host", "localhost"), settings.get("port", 6379)
    host = f"[{host}]" if ":" in host else host
    scheme = "rediss" if issubclass(pool.connection_class, SSLConnection) else "redis"
    return f"{scheme}://{host}:{port}/{database}"


def _pool_of_url(url: str) -> ConnectionPool:
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    shown = repr(redacted(url))

    if scheme == "redis+unix":
        url = f"unix://{rest}"
    elif scheme not in ("redis", "rediss") or not rest:
        raise InvalidURL(
            f"{shown}: write redis://host:6379/0, rediss://host:6379/0 "
            "or redis+unix:///path/to/socket"
        )

    # Not chained: urllib's and redis-py's errors quote what may be the password.
    try:
        parts = urlsplit(url)
        query = parse_qs(parts.query, strict_parsing=bool(parts.query))

        for name in query.keys() - URL_OPTIONS:
            raise InvalidURL(f"{shown}: {name!r} is not one of: {sorted(URL_OPTIONS)}")

        pool = ConnectionPool.from_url(url)
        # This connects nothing; it checks the settings.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, RedisError):
        raise InvalidURL(
            f"{shown} is not a URL that redis-py can read: the port is a number, and "
            "in a password '/' is %2F, '#' is %23 and '?' is %3F"
        ) from None

    host, is_socket = parts.netloc.rpartition("@")[2], scheme == "redis+unix"

    if is_socket and (host or not parts.path.strip("/")):
        raise InvalidURL(f"{shown}: a socket's path has three slashes")

    if not (is_socket or re.fullmatch(r"/?\d*", parts.path)):
        raise InvalidURL(f"{shown}: the path is the number of a database, or empty")

    return pool
