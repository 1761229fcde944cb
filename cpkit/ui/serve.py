"""Serve the page of a store on localhost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import uvicorn

from cpkit.protocol import Checkpointer
from cpkit.ui.asgi import app
from cpkit.ui.guard import TokenLogin

__all__ = ["serve"]

_GRACE = 2  # seconds that open pages get when the server stops


class _Server(uvicorn.Server):
    """Sets ``stopping`` before it waits for open connections."""

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event) -> None:
        super().__init__(config)
        self._stopping = stopping

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await super().shutdown(sockets)


async def serve(
    cp: Checkpointer[Any],
    *,
    host: str,
    port: int,
    allowed_hosts: Sequence[str],
    person: str,
    read_only: bool,
    title: str,
    url: str,
    on_ready: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM; call ``on_ready`` with the link and its token.

    Port 0 takes a free port. A browser may name the server by ``host``, by loopback, or
    by one of ``allowed_hosts``; each with the port or without one.

    Raises ``OSError`` if the address is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    with closing(socket.create_server((host, port), family=family)) as listener:
        # asyncio does not set this on a socket that it was given, and without it each
        # answer waits 40 ms for an acknowledgement. Accepted sockets inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listener.getsockname()[1]
        token = TokenLogin.new_token()
        shown = f"[{host}]" if ":" in host else host
        names = {shown, "localhost", "127.0.0.1", "[::1]", *allowed_hosts}
        stopping = asyncio.Event()
        page = app(
            cp,
            authorize=TokenLogin(token, person, port),
            read_only=read_only,
            # A browser leaves out port 80, and 443 of a proxy with TLS.
            allowed_hosts=names | {f"{name}:{port}" for name in names},
            title=title,
            url=url,
            stopping=stopping,
        )
        server = _Server(
            uvicorn.Config(
                page,
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE,
            ),
            stopping,
        )
        on_ready(f"http://{shown}:{port}/threads?token={token}")
        await server.serve(sockets=[listener])
