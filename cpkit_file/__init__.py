"""Agent state in a folder of readable logs; ``docs/drivers.md`` is the manual.

``lines`` is the format, ``schema`` the folder, ``log`` a log as it is at one moment,
``keys`` which call holds a key, ``copies`` keys that a copy lacks, ``writing`` a locked
log and its new lines, ``workers`` the threads that do all this, ``store`` the store and
its reads.
"""

from cpkit.registry import needs_extra

with needs_extra("cpkit_file", "file"):
    from cpkit_file.store import FileCheckpointer, FileStore

__all__ = ["FileCheckpointer", "FileStore"]
