"""Agent state in a folder of readable logs; see `cpkit_file.driver` for the manual."""

from cpkit_file.driver import FileCheckpointer

__all__ = ["FileCheckpointer"]
