"""Agent state in a folder of readable logs; ``docs/drivers.md`` is the manual.

The modules; each imports only those above it:

``lines``    the format of a log's lines, and their checksums
``schema``   the names in the folder, its creation, locks and syncs
``log``      one thread's log as it was at one moment
``writing``  appends, extra and results; the replacement of a log
``claims``   which call holds a key; erased and restored threads
``store``    the store, which hands work to threads, and its reads
"""

from cpkit.extras import needs_extra

with needs_extra("cpkit_file", "file"):
    from cpkit_file.store import FileCheckpointer, FileStore

__all__ = ["FileCheckpointer", "FileStore"]
