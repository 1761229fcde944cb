"""Serve the page of a store on localhost."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

import uvicorn

from cpkit.protocol import Checkpointer
from cpkit.ui.asgi import app
from cpkit.ui.guard import TokenLogin

__all__ = ["serve"]

_GRACE = 2  # seconds that open pages get when the server stops


async def serve(
    cp: Checkpointer[Any],
    *,
    host: str,
    port: int,
    person: str,
    read_only: bool,
    title: str,
    url: str,
    on_ready: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM; call ``on_ready`` with the link and its token.

    Port 0 takes a free port. Raises ``OSError`` if the address is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    with closing(socket.create_server((host, port), family=family)) as listener:
        # asyncio does not set this on a socket that it was given, and without it each
        # answer waits 40 ms for an acknowledgement. Accepted sockets inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listener.getsockname()[1]
        token = TokenLogin.new_token()
        shown = f"[{host}]" if ":" in host else host
        names = {shown, "localhost", "127.0.0.1", "[::1]"}
        page = app(
            cp,
            authorize=TokenLogin(token, person, port),
            read_only=read_only,
            allowed_hosts={f"{name}:{port}" for name in names},
            title=title,
            url=url,
        )
        server = uvicorn.Server(
            uvicorn.Config(
                page,
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE,
            )
        )
        on_ready(f"http://{shown}:{port}/threads?token={token}")
        await server.serve(sockets=[listener])
