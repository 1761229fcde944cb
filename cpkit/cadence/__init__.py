"""How often messages are written: a wrapper that buffers them until they are due.

::

    async with with_cadence(cp, Cadence.per_turn()) as buffered:
        await buffered.append("thread-1", [message])

What a crash can lose
    Acknowledged messages that were still buffered: at most ``messages - 1`` of a
    thread, none older than ``seconds`` while the store answers, and always the newest
    ones. The thread is left as this handle had written it up to some moment, because
    ``save_extra`` and ``append(extra=)`` write the thread's messages first, and a claim
    those of all threads. Results are never buffered.

The contract of this handle
    It holds on this handle: reads, versions and ``expected_version`` count what is
    buffered. Other handles see a message when it is written. Positions that were
    returned stay true, because writing is fenced by the version at which buffering
    began. So use it for threads with one writer at a time, with one wrapper for each
    agent. Any number of wrappers share one store's handle.

After another writer took that version
    Nothing is written and nothing is lost: the messages stay buffered until
    `BufferedCheckpointer.discard` returns them. Until then ``VersionConflict`` is
    raised by ``load``, ``append``, ``save_extra``, ``dump_thread``, ``restore_thread``
    and ``flush`` of the thread, and by a ``read`` of buffered positions. It is raised,
    for any thread, by what writes all buffers first: ``record_issued``,
    ``list_threads``, ``flush()`` and ``aclose``.

    These work as before, because they need no buffered message: ``record_result``,
    ``find_completed``, ``find_call``, ``list_calls`` and ``watch``. So does a ``read``
    of positions before the buffer, except while the last write of the buffer has no
    answer. ``delete_thread`` drops the buffer.
"""

from cpkit.cadence.buffered import BufferedCheckpointer
from cpkit.cadence.optional import with_cadence
from cpkit.cadence.policy import Cadence, is_turn_end

__all__ = ["BufferedCheckpointer", "Cadence", "is_turn_end", "with_cadence"]
