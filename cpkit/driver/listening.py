"""Listening in a thread, for an engine that is asked in a blocking way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cpkit.driver.store import Heard

__all__ = ["Follow", "listen_in_thread"]

Follow = Callable[[Callable[[], None], threading.Event], None]
"""``follow(changed, stop)``: call ``changed()`` for changes until ``stop`` is set."""


async def listen_in_thread(follow: Follow, heard: Heard) -> None:
    """Run ``follow`` in a thread of its own; the thread ends when this is cancelled.

    Returns when ``follow`` returns, and raises what it raises.
    """
    loop = asyncio.get_running_loop()
    stop = threading.Event()
    ended: asyncio.Future[None] = loop.create_future()

    def end(error: Exception | None) -> None:
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def tell(function: Callable[[Any], None], what: object) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(function, what)

    def run() -> None:
        error: Exception | None = None

        try:
            follow(lambda: tell(heard, None), stop)
        except Exception as exc:
            error = exc
        except BaseException as exc:
            # A SystemExit of this thread is not the program's.
            error = RuntimeError(f"the listening thread ended with {exc!r}")

        tell(end, error)

    thread = threading.Thread(target=run, name="cpkit-listen", daemon=True)
    thread.start()

    try:
        await asyncio.shield(ended)
    finally:
        stop.set()
        await asyncio.wait({ended})
        thread.join()  # it reported its end; it has only to return
        ended.exception()  # retrieved, so that asyncio does not log it
