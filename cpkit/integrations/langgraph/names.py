"""Thread ids: LangGraph's ids and the store's ids."""

from __future__ import annotations

from hashlib import sha256

from cpkit.driver.ids import MAX_ID_BYTES

__all__ = ["FENCE", "HASHED", "OWNER", "PLAIN", "store_thread_id", "thread_id_in"]

OWNER = "cpkit_owner"
"""The key of a config's ``configurable`` that has the token of the run."""

FENCE = "cpkit_fence"
"""The key of a config's ``configurable`` that has the `Fence` of a change."""

PLAIN = "cpkit:langgraph:"
HASHED = "cpkit:langgraph-of:"


def store_thread_id(thread_id: object) -> str:
    """Return the id under which a store keeps LangGraph's thread.

    Two of LangGraph's ids never share an id. An id that fits follows a prefix
    unchanged. An id that is too long or has a NUL is replaced by its SHA-256, after
    another prefix. A value that is not a ``str`` is converted by ``str()``, as in
    LangGraph's own savers.
    """
    name = f"{PLAIN}{thread_id}"
    size = len(name.encode("utf-8", "surrogatepass"))

    if size <= MAX_ID_BYTES and "\0" not in name:
        return name

    # encode() raises for a lone surrogate, as the store does for other ids.
    return f"{HASHED}{sha256(str(thread_id).encode()).hexdigest()}"


def thread_id_in(store_id: str) -> str | None:
    """Return LangGraph's id of a thread, or ``None`` if the store's id is a hash."""
    return store_id.removeprefix(PLAIN) if store_id.startswith(PLAIN) else None
