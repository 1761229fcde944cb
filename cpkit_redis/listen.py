"""Watching: markers of threads, and a channel of the server's publish/subscribe.

A marker has the thread's times. Each change sets a later one than before, also while
the server's clock steps back, so it counts changes.

The channel ``<prefix>:changes:<database>`` carries ids of threads that changed. The
handle that wrote publishes them after its writes. `cpkit_redis.store` names the rights
that it takes; a user without them polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import ConnectionPool
from redis.exceptions import NoPermissionError

from cpkit.driver import Heard, StoreFailure
from cpkit_redis.errors import CLIENT_ERRORS, failure, refusal

__all__ = ["listen", "markers"]

# What of a thread's times changes with it; `late` with a late result of an erased call.
_FIELDS = ("created", "updated", "first", "last", "late")

# Commands in one round trip.
_AT_ONCE = 1000

# Seconds without a message after which the server is asked for a sign of life, and
# those that it has to answer.
_CHECK_EVERY = 10.0
_CHECK_TIMEOUT = 5.0


async def markers(
    ask_each: Callable[..., Awaitable[list[Any]]], keys: Mapping[str, bytes]
) -> Mapping[str, Hashable]:
    """Return the markers of threads; ``keys`` are those of their times."""
    found: dict[str, Hashable] = {}
    items = list(keys.items())

    for start in range(0, len(items), _AT_ONCE):
        some = items[start : start + _AT_ONCE]
        answers = await ask_each([(key, ("HMGET", key, *_FIELDS)) for _, key in some])

        for (thread_id, key), answer in zip(some, answers, strict=True):
            if isinstance(answer, Exception):
                raise refusal(answer, thread_id, key) from answer

            if any(answer):
                found[thread_id] = tuple(answer)

    return found


async def listen(
    pool: ConnectionPool, channel: bytes, heard: Heard, *, sharded: bool = False
) -> None:
    """Subscribe on a connection of its own; return where the user may not.

    A ``sharded`` channel belongs to one node of a cluster.
    """
    command = "SSUBSCRIBE" if sharded else "SUBSCRIBE"

    try:
        async with Redis(connection_pool=pool).pubsub() as channels:
            await channels.execute_command(command, channel)
            is_asked = False

            while True:
                patience = _CHECK_TIMEOUT if is_asked else _CHECK_EVERY
                message = await channels.get_message(timeout=patience)

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
    except NoPermissionError:
        return
    except CLIENT_ERRORS as exc:
        raise failure(exc) from exc
    finally:
        with suppress(*CLIENT_ERRORS):
            await asyncio.shield(pool.aclose())
