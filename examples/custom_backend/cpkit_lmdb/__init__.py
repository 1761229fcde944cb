"""A cpkit backend on LMDB; see `cpkit_lmdb.driver` for the manual."""

from cpkit_lmdb.driver import LMDBCheckpointer

__all__ = ["LMDBCheckpointer"]
