"""Agent state in a folder of readable logs; ``docs/drivers.md`` is the manual.

The order to read: ``lines``, ``log``, ``keys``, ``writing``, ``store``.
"""

from cpkit.registry import needs_extra

with needs_extra("cpkit_file", "file"):
    from cpkit_file.store import FileCheckpointer, FileStore

__all__ = ["FileCheckpointer", "FileStore"]
