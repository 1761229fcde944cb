"""The channel of a store: the server's publish/subscribe.

The channel carries ids of threads that changed. The handle that wrote publishes them
after its writes. `cpkit_redis.store` names the rights that it takes; a user without
them polls.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from redis.asyncio import Redis
from redis.asyncio.connection import ConnectionPool

from cpkit.driver import Heard, StoreFailure
from cpkit_redis.errors import CLIENT_ERRORS, code_of, failure

# Seconds without a message after which a PING is sent, and seconds to answer it.
_CHECK_EVERY = 10.0
_CHECK_TIMEOUT = 5.0


async def listen(
    pool: ConnectionPool, subscribe: str, channel: bytes, heard: Heard
) -> None:
    """Listen on a connection of its own, with the command SUBSCRIBE or SSUBSCRIBE.

    Returns if the user may not do this, or the server does not know the command.
    """
    try:
        async with Redis(connection_pool=pool).pubsub() as channels:
            await channels.execute_command(subscribe, channel)
            is_asked = False

            while True:
                timeout = _CHECK_TIMEOUT if is_asked else _CHECK_EVERY
                message = await channels.get_message(timeout=timeout)

                if message is not None:
                    is_asked = False

                    match message["type"]:
                        case "subscribe" | "ssubscribe":
                            heard(None)
                        case "message" | "smessage":
                            heard(message["data"].decode(errors="replace"))
                        case "sunsubscribe":
                            raise StoreFailure("not sent", "the channel moved")
                elif is_asked:
                    raise StoreFailure("not sent", "the server does not answer")
                else:
                    await channels.ping()
                    is_asked = True
    except CLIENT_ERRORS as exc:
        reason = failure(exc).reason

        if code_of(reason) != "NOPERM" and "unknown command" not in reason:
            raise failure(exc) from exc
    finally:
        with suppress(*CLIENT_ERRORS):
            await asyncio.shield(pool.aclose())
