"""Thread ids, and the keys of LangGraph's configs."""

from __future__ import annotations

from hashlib import sha256

from langchain_core.runnables import RunnableConfig

from cpkit.driver.ids import MAX_ID_BYTES

__all__ = [
    "FENCE",
    "HASHED",
    "OWNER",
    "PLAIN",
    "config_for",
    "namespace_in",
    "store_thread_id",
]

OWNER = "cpkit_owner"
"""The key of a config's ``configurable`` that has the token of the run."""

FENCE = "cpkit_fence"
"""The key of a config's ``configurable`` that has the `Fence` of a change."""

PLAIN = "cpkit:langgraph:"
HASHED = "cpkit:langgraph-of:"


def store_thread_id(thread_id: object) -> str:
    """Return the id under which a store keeps LangGraph's thread.

    An id that fits follows a prefix unchanged. One that is too long or has a NUL is
    replaced by its SHA-256, after another prefix, so two threads never share an id.
    """
    name = f"{PLAIN}{thread_id}"
    # The store refuses an id with a lone surrogate.
    encoded = name.encode(errors="surrogatepass")

    if len(encoded) <= MAX_ID_BYTES and "\0" not in name:
        return name

    return f"{HASHED}{sha256(encoded.removeprefix(PLAIN.encode())).hexdigest()}"


def namespace_in(config: RunnableConfig) -> str:
    """Return the namespace that the config names."""
    ns: str = config["configurable"].get("checkpoint_ns", "")
    return ns


def config_for(thread_id: object, ns: str, checkpoint_id: str | None) -> RunnableConfig:
    """Return the config that names a checkpoint."""
    place = {
        "thread_id": thread_id,
        "checkpoint_ns": ns,
        "checkpoint_id": checkpoint_id,
    }
    return {"configurable": place}
