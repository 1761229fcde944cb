"""The proxy that loses answers leaves nothing open itself."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

import pytest

from conformance.proxy import Proxy


@pytest.mark.parametrize("turns", range(4))
def test_a_connection_that_was_just_accepted_is_closed(turns: int) -> None:
    """The proxy closes so many turns of the event loop after a client connected."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        async def connect_and_close() -> None:
            async with Proxy(*server.getsockname()) as proxy:
                with socket.create_connection(("127.0.0.1", proxy.port)):
                    for _ in range(turns):
                        await asyncio.sleep(0)

        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", ResourceWarning)
            asyncio.run(connect_and_close())
            gc.collect()

    assert not [one for one in found if one.category is ResourceWarning]
