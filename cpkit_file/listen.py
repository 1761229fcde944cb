"""Watching: markers of threads, and the file system's own notifications.

A marker is a log's size and its last bytes, which are a checksum over all before them.
A change is one line at the end, or another file. It is read without a lock, so a line
may show before it is synced; the look that follows waits for its writer.

Notifications come through the package ``watchfiles``. Where it is not installed or the
system has no watches left, a watch polls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib.util import find_spec

from cpkit_file.files import opened
from cpkit_file.index import Folder
from cpkit_file.reading import thread_of
from cpkit_file.schema import LOG_NAME, log_name

__all__ = ["can_follow", "follow", "markers"]

_TAIL = 64

# Milliseconds between two looks of watchfiles at what the system reported, and those
# for which it collects changes that come without a pause.
_STEP = 5
_COLLECT = 10


def markers(folder: Folder, thread_ids: Sequence[str] | None) -> Mapping[str, Hashable]:
    """Return the markers of these threads, or of all."""
    if thread_ids is not None:
        names = {one: log_name(one) for one in thread_ids}
    else:
        names = {
            thread_id: name
            for name in filter(LOG_NAME.fullmatch, os.listdir(folder.threads))
            if (thread_id := thread_of(folder, name)) is not None
        }

    found: dict[str, Hashable] = {}

    for thread_id, name in names.items():
        try:
            with opened(f"{folder.threads}/{name}") as fd:
                size = os.fstat(fd).st_size
                found[thread_id] = size, os.pread(fd, _TAIL, max(0, size - _TAIL))
        except FileNotFoundError:
            continue

    return found


def can_follow() -> bool:
    """Tell whether the package is installed."""
    return find_spec("watchfiles") is not None


def follow(folder: Folder, changed: Callable[[], None], stop: threading.Event) -> None:
    """Call ``changed`` after logs changed, until ``stop`` is set."""
    from watchfiles import watch

    found = watch(
        folder.threads,
        watch_filter=None,
        recursive=False,
        step=_STEP,
        debounce=_COLLECT,
        rust_timeout=50,
        yield_on_timeout=True,
        raise_interrupt=False,
        stop_event=stop,
    )
    # The first wait shows that the system watches: look at what came before.
    is_first = True

    for changes in found:
        if changes or is_first:
            changed()

        is_first = False
