"""Changes of the store as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cpkit.errors import CheckpointerError
from cpkit.protocol import WatchesThreads
from cpkit.ui.site import Site

__all__ = ["events"]

# Seconds between two events. The page loads itself again after each.
_PAUSE = 0.2


async def events(site: Site, request: Request) -> Response:
    """Send an event after each change of the thread ``id``, or of any thread.

    Answers 204 if the store cannot watch; the browser then does not ask again.
    """
    if not isinstance(site.cp, WatchesThreads):
        return Response(status_code=204)

    thread_id = request.query_params.get("id")
    return StreamingResponse(
        _changes(site, [thread_id] if thread_id else []),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},
    )


async def _changes(site: Site, thread_ids: list[str]) -> AsyncIterator[str]:
    # After an error the browser connects again, and the page catches up.
    try:
        async with site.cp.watch(*thread_ids) as changed:
            yield "retry: 2000\nevent: change\ndata: {}\n\n"

            while await _is_next(changed, site.stopping):
                yield "event: change\ndata: {}\n\n"
                await asyncio.sleep(_PAUSE)
    except CheckpointerError as exc:
        yield f": {type(exc).__name__}\n\n"


async def _is_next(changed: AsyncIterator[str], stopping: asyncio.Event) -> bool:
    """Wait for a change; return ``False`` if the server stops before."""
    change = asyncio.ensure_future(anext(changed))
    stop = asyncio.ensure_future(stopping.wait())

    try:
        await asyncio.wait((change, stop), return_when=asyncio.FIRST_COMPLETED)
        return change.done() and bool(change.result())
    finally:
        change.cancel()
        stop.cancel()
        await asyncio.wait((change, stop))
