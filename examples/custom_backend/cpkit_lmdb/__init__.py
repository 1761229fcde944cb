"""A cpkit backend on LMDB; see `cpkit_lmdb.store` for the manual."""

from cpkit_lmdb.store import LMDBStore

__all__ = ["LMDBStore"]
