"""Which call holds a key: registers of claims, and the logs that they lead to.

A key is in one of 256 registers, ``used-keys/<two hex digits>.jsonl``, by its hash. A
claim

1. locks the thread's log, and stops if the call is on record there,
2. locks the key's register, and stops if the key's newest attempt has not failed,
3. writes the register's line (key, attempt, thread, call), and syncs,
4. writes the call's line to the log, with the rest of its batch, and syncs: now the
   claim is made.

The call's line is what counts. A register's line whose call is not in that log is
*void*: so a crash between the two syncs, and a deletion that forgets keys, need no
repair. The status of a call is read from its log, without a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

from cpkit.driver import StoredCall
from cpkit_file.log import Folder, Log
from cpkit_file.schema import sync_content


def newest_attempt(folder: Folder, key: str) -> StoredCall | None:
    """Return the key's newest call, which holds the key unless it failed."""
    find = partial(find_call, folder)

    with Log(folder, folder.register(key)) as register:
        while True:
            numbered = enumerate(attempts(register, key, find))
            void, call = next((one for one in numbered if one[1]), (None, None))

            # The thread of a newer attempt may have been restored meanwhile.
            if not any(islice(attempts(register, key, find), void)):
                return call


def attempts(
    register: Log, key: str, find: Callable[[str, str], StoredCall | None]
) -> Iterator[StoredCall | None]:
    """Yield the calls that claimed a key, the newest first; ``None`` for a void one.

    ``find(thread_id, call_id)`` returns a call on record.
    """
    for attempt, thread_id, call_id in register.claims(key):
        call = find(thread_id, call_id)
        is_void = call is None or (call.idempotency_key, call.attempt) != (key, attempt)
        yield None if is_void else call


def find_call(
    folder: Folder, thread_id: str, call_id: str, *, synced: bool = False
) -> StoredCall | None:
    """Return a call on record; a failed one is on disk, if it is to be ``synced``."""
    with Log(folder, folder.log(thread_id), thread_id) as log:
        call = log.call(call_id)

        # Its writer may be syncing it now. The next attempt must not be on disk before.
        if synced and call is not None and call.status == "failed":
            sync_content(log.fd)

        return call
