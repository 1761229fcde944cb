"""Tool calls and their results, in the messages of every framework.

One function reads all of them, for `cpkit.heal`, sessions, the page, ``cpkit show`` and
the importers::

    reading = read_message(message)
    reading.calls, reading.results, reading.unknown

`unwrap` returns the message inside an adapter's record, `read_part` reads one block of
a message, `open_calls` returns the calls of a thread that have no result. `begins_turn`
says whether a user's turn begins, `usage_of` and `time_of` what a message says of
itself.
"""

from cpkit.toolcalls.reading import (
    Call,
    Reading,
    Result,
    Unknown,
    read_message,
    read_part,
    unwrap,
)
from cpkit.toolcalls.thread import OpenCall, call_spans, open_calls
from cpkit.toolcalls.turns import begins_turn
from cpkit.toolcalls.usage import Usage, time_of, total_of, usage_of

__all__ = [
    "Call",
    "OpenCall",
    "Reading",
    "Result",
    "Unknown",
    "Usage",
    "begins_turn",
    "call_spans",
    "open_calls",
    "read_message",
    "read_part",
    "time_of",
    "total_of",
    "unwrap",
    "usage_of",
]
