"""Signs of life of long effects, in threads of the ledger's own.

The thread is named by the effect's key and has one extra key for each attempt that
outlived its first interval, so beats take no room as they go on. Where the store can
delete threads, it is deleted when an attempt that may have beaten is settled, whoever
does that.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from cpkit.effects.keys import beats_thread
from cpkit.effects.tracing import log
from cpkit.errors import CheckpointerError
from cpkit.protocol import Checkpointer, ErasesThreads
from cpkit.records import CallRecord, JsonValue

__all__ = ["Heartbeat", "forget_beats", "last_beat"]


class Heartbeat:
    """Beats every ``interval`` seconds while its block runs; a short block never does.

    A beat that fails is logged and the next one tried: being taken for dead is what
    fencing is for.
    """

    def __init__(
        self, cp: Checkpointer[Any], key: str, call_id: str, interval: float
    ) -> None:
        self._cp = cp
        self._key = key
        self._call_id = call_id
        self._interval = interval
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        # A timer and no task: most effects are over before the first beat.
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._start)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._timer is not None
        self._timer.cancel()

        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def clear(self) -> None:
        """Delete the signs of an effect that is done, where there are any."""
        if self._task is not None:
            await forget_beats(self._cp, self._key)

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        place = beats_thread(self._key)
        count = 0

        while True:
            count += 1

            try:
                await self._cp.save_extra(place, {self._call_id: count})
            except Exception:
                log.warning("a heartbeat of %r failed", self._call_id, exc_info=True)

            await asyncio.sleep(self._interval)


async def last_beat(cp: Checkpointer[Any], holder: CallRecord) -> tuple[str, JsonValue]:
    """Return the last sign of life of an attempt, which tells attempts apart."""
    call_id = holder.call.call_id
    data = await cp.load(beats_thread(holder.call.idempotency_key))
    return call_id, None if data is None else data.extra.get(call_id)


async def forget_beats(cp: Checkpointer[Any], key: str) -> None:
    """Delete the signs of life of a key that is settled, where the store can.

    Should another attempt be beating already, its observers see one sign more.
    """
    if not isinstance(cp, ErasesThreads):
        return

    try:
        await cp.delete_thread(beats_thread(key))
    except CheckpointerError:
        log.warning("could not delete %r", beats_thread(key), exc_info=True)
