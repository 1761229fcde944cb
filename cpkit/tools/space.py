"""How large a thread is, and what takes its bytes, for the price of a small read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from cpkit.driver.jsontext import encode_json
from cpkit.fenced import read_part
from cpkit.records import CallRecord
from cpkit.tools.formats import size

__all__ = ["Weight", "weigh"]

_SAMPLE = 20
"""Messages that are read of a thread: the newest. The others count as their average."""


@dataclass(frozen=True, slots=True)
class Weight:
    """About how many bytes of JSON and ids a thread has.

    ``calls`` are args and results, ``keys`` the ids of calls, which stay when the
    content goes. ``messages`` rests on the newest of them.
    """

    thread_id: str
    messages: int
    calls: int
    keys: int
    extra: int

    @property
    def total(self) -> int:
        return self.messages + self.calls + self.keys + self.extra

    @property
    def shares(self) -> dict[str, int]:
        """The percentage of each part that has one, the largest first."""
        parts = {"messages": self.messages, "calls": self.calls, "keys": self.keys}
        parts["extra"] = self.extra
        ordered = sorted(parts.items(), key=lambda one: -one[1])
        shares = {name: round(100 * n / (self.total or 1)) for name, n in ordered}
        return {name: share for name, share in shares.items() if share}

    def __str__(self) -> str:
        shares = ", ".join(f"{share} % {name}" for name, share in self.shares.items())
        return f"{self.thread_id} (about {size(self.total)}: {shares})"


async def weigh(cp: Any, thread_id: str, calls: Sequence[CallRecord]) -> Weight:
    """Return the weight of a thread that has these calls; it reads 20 messages."""
    data = await cp.load_range(thread_id, -_SAMPLE)

    if data is None:
        return Weight(thread_id, 0, 0, 0, 0)

    sample = _bytes([to_jsonable_python(one) for one in data.messages])
    messages = len(data.messages)

    if messages == _SAMPLE:
        first, _ = await read_part(cp, thread_id, 0, 0)
        sample = sample * (data.version - first) // messages

    content = [part for one in calls for part in (one.call.args, one.result)]
    ids = [
        name
        for one in calls
        for name in (one.call.call_id, one.call.tool_name, one.call.idempotency_key)
    ]
    return Weight(
        thread_id,
        sample,
        0 if not calls else _bytes(content),
        sum(len(name.encode()) for name in ids),
        0 if not data.extra else _bytes([data.extra]),
    )


def _bytes(values: Sequence[Any]) -> int:
    return sum(len(encode_json(one, ())) for one in values)
