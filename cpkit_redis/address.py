"""Where the server is: from a URL, or from the caller's own client."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import ConnectionPool, Redis, SSLConnection
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.exceptions import RedisError

from cpkit.errors import InvalidURL
from cpkit.registry import redacted

__all__ = ["URL_OPTIONS", "name_of", "pool_of_client", "pool_of_url"]

URL_OPTIONS = frozenset(
    {
        "client_name",
        "db",
        "password",
        "ssl_ca_certs",
        "ssl_ca_data",
        "ssl_ca_path",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_check_hostname",
        "ssl_ciphers",
        "ssl_keyfile",
        "ssl_min_version",
        "ssl_password",
        "username",
    }
)
"""Query parameters for redis-py's own parser."""


def pool_of_url(url: str, connect_timeout: float) -> ConnectionPool:
    """Return a pool that knows how to connect; raises ``InvalidURL``."""
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
            raise InvalidURL(f"{shown}: {name!r} is none of redis-py's options here")

        pool = ConnectionPool.from_url(
            url,
            # RESP2 has all that is needed, without a handshake that old servers and
            # narrow ACLs refuse.
            protocol=2,
            socket_timeout=None,  # the driver's own, over a whole exchange
            socket_connect_timeout=connect_timeout,
        )
        # A connection that is not made; its settings are checked.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, RedisError):
        raise InvalidURL(f"{shown} is no URL that redis-py can read") from None

    if scheme == "redis+unix":
        if parts.netloc.rpartition("@")[2] or not parts.path.strip("/"):
            raise InvalidURL(f"{shown}: a socket's path has three slashes")

        return pool

    if not re.fullmatch(r"/?\d*", parts.path):
        raise InvalidURL(f"{shown}: the path is the number of a database, or nothing")

    if len({parts.path.strip("/"), *query.get("db", ())} - {""}) > 1:
        raise InvalidURL(f"{shown} names two databases")

    return pool


def pool_of_client(client: Any) -> ConnectionPool:
    """Return the pool of the caller's client, for its settings.

    Raises ``TypeError`` for what is no client of redis.asyncio, and ``ValueError`` for
    one that decodes: JSON texts and ids are bytes to the driver.
    """
    if not isinstance(client, Redis):
        raise TypeError(
            f"expected a URL or a redis.asyncio.Redis, not {type(client).__name__}"
        )

    pool: ConnectionPool = client.connection_pool

    if pool.connection_kwargs.get("decode_responses"):
        raise ValueError("the client must be made with decode_responses=False")

    return pool


def name_of(pool: ConnectionPool) -> str:
    """Return the server's address for people to read; no password is in it."""
    settings = pool.connection_kwargs
    database = settings.get("db") or 0

    if "path" in settings:
        return f"redis+unix://{settings['path']}?db={database}"

    if isinstance(pool, SentinelConnectionPool):
        return f"redis+sentinel://{pool.service_name}/{database}"

    host, port = settings.get("host", "localhost"), settings.get("port", 6379)
    host = f"[{host}]" if ":" in host else host
    scheme = "rediss" if issubclass(pool.connection_class, SSLConnection) else "redis"
    return f"{scheme}://{host}:{port}/{database}"
