"""Agent state in a folder of readable logs; see `cpkit_file.store` for the manual."""

from cpkit_file.store import FileCheckpointer, FileStore

__all__ = ["FileCheckpointer", "FileStore"]
