"""File names for ids: readable, portable, and never the same for two ids.

A thread's log is ``<stem>~<hash>.jsonl``. The hash is the whole SHA-256 of the id, so
the name is injective as far as anybody knows, on case-insensitive file systems too,
and the log's first line, which holds the id itself, is compared at every opening. The
stem is for people: what is left of the id in ``a-z0-9-``, so no name is one of Windows'
reserved ones (they would have to end where the ``~`` stands), starts with a dot or a
dash, or ends with a dot or a space.

A claim is ``claims/<first digit>/<hash of the key>.<attempt>``.
"""

from __future__ import annotations

import re
from hashlib import sha256

__all__ = ["LOG_NAME", "SHARDS", "claim_stem", "log_name", "shard_of"]

LOG_NAME = re.compile(r"[a-z0-9-]{1,40}~[0-9a-f]{64}\.jsonl")
# Claims of keys in one shard wait for each other: with so many shards, for the disk
# rather than for the lock.
SHARDS = "0123456789abcdef"

# Keeps the name below the 143 bytes that eCryptfs has, the least of any in use.
_STEM = 40


def log_name(thread_id: str) -> str:
    """Return the name of the thread's log."""
    words = re.sub(r"[^a-z0-9]+", "-", thread_id.lower())[:_STEM].strip("-")
    return f"{words or 'thread'}~{sha256(thread_id.encode()).hexdigest()}.jsonl"


def claim_stem(key: str) -> str:
    """Return what the names of all attempts at the key start with."""
    return sha256(key.encode()).hexdigest()


def shard_of(stem: str) -> str:
    """Return the subfolder of ``claims`` in which a key's attempts lie."""
    return stem[0]
