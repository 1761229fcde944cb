"""Tool calls and their results, in the messages of every framework.

One function reads all of them, for `cpkit.heal`, sessions, the page, ``cpkit show`` and
the importers::

    reading = read_message(message)
    reading.calls, reading.results, reading.unknown

`unwrap` returns the message inside an adapter's record, `read_part` reads one block of
a message, `open_calls` returns the calls of a thread that have no result.
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
from cpkit.toolcalls.thread import OpenCall, open_calls

__all__ = [
    "Call",
    "OpenCall",
    "Reading",
    "Result",
    "Unknown",
    "open_calls",
    "read_message",
    "read_part",
    "unwrap",
]
