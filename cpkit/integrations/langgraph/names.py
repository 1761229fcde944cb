"""Which thread of the store holds which thread of LangGraph."""

from __future__ import annotations

from hashlib import sha256

from cpkit.driver.ids import MAX_ID_BYTES

__all__ = ["HASHED", "PLAIN", "store_thread_id", "thread_id_in"]

PLAIN = "cpkit:langgraph:"
HASHED = "cpkit:langgraph-of:"


def store_thread_id(thread_id: object) -> str:
    """Return the id under which a store keeps LangGraph's thread.

    Two of LangGraph's ids never share one: an id that fits stands as it is after a
    prefix, and one that is too long or has a NUL as its SHA-256 after another. What is
    no ``str`` counts as its ``str()``, as in LangGraph's own savers.
    """
    name = f"{PLAIN}{thread_id}"
    size = len(name.encode("utf-8", "surrogatepass"))

    if size <= MAX_ID_BYTES and "\0" not in name:
        return name

    # A lone surrogate is refused as in every other id.
    return f"{HASHED}{sha256(str(thread_id).encode()).hexdigest()}"


def thread_id_in(store_id: str) -> str | None:
    """Return LangGraph's id of a thread, or ``None`` where only its hash is left."""
    return store_id.removeprefix(PLAIN) if store_id.startswith(PLAIN) else None
