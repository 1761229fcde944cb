"""LangGraph's long-term memory, its ``store=``, in any store.

::

    graph = builder.compile(checkpointer=CheckpointSaver(cp), store=MemoryStore(cp))

Each item is one thread, whose extra has the ``value`` and the times when it was put
first and last. The thread's id has the namespace and the key, each part
percent-encoded, so a namespace is a prefix. A deleted item is an erased thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

from cpkit.driver.ids import check_id
from cpkit.fenced import load_range
from cpkit.integrations.bridge import Bridge
from cpkit.protocol import Checkpointer, ErasesThreads, ListsThreads
from cpkit.registry import needs_extra
from cpkit.sync import SyncCheckpointer
from cpkit.tools.paging import gather_limited

with needs_extra("cpkit.integrations.langgraph_store", "langgraph"):
    from langgraph.store.base import (
        BaseStore,
        GetOp,
        Item,
        ListNamespacesOp,
        MatchCondition,
        Op,
        PutOp,
        Result,
        SearchItem,
        SearchOp,
        validate_op_namespace,
    )

__all__ = ["MemoryStore", "item_thread"]

_PREFIX = "cpkit:langgraph-store:"

Namespace = tuple[str, ...]


class MemoryStore(BaseStore):
    """Keeps LangGraph's items in a store; for ``store=`` of a graph.

    ``cp`` is an open checkpointer of JSON objects on this event loop, or a
    `SyncCheckpointer`. Async methods may be called from any loop, and synchronous ones
    from any thread except that of the store's loop, where they raise ``RuntimeError``.

    A put or a deletion of one item is atomic, and the last one stays. A batch of
    several is not one step: its reads see the items before its puts.

    A search scans: it reads each item of the namespace, in the order of ids. A
    ``query`` is ignored, because there are no vectors, and items have no score. Items
    do not expire: a ``ttl`` raises ``NotImplementedError``, and so do a search with a
    store that cannot list its threads and a deletion with one that cannot erase them.

    Raises ``InvalidId`` if a namespace and a key take more than about 480 bytes,
    percent-encoded, and ``SerializationError`` for a value that is not JSON.
    """

    def __init__(self, cp: Checkpointer[Any] | SyncCheckpointer[Any]) -> None:
        self._bridge = Bridge(cp, wait_for_loop=True)
        self._cp = self._bridge.checkpointer

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Execute the operations; return a result for each."""
        return self._bridge.wait(self._batch([*ops]))

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """Execute the operations; return a result for each."""
        return await self._bridge.go(self._batch([*ops]))

    # On the store's event loop

    async def _batch(self, ops: list[Op]) -> list[Result]:
        for op in ops:
            validate_op_namespace(op)

        results: list[Result] = await gather_limited(self._read, ops)
        # The last put of an item counts.
        puts = {(op.namespace, op.key): op for op in ops if isinstance(op, PutOp)}
        await gather_limited(self._put, puts.values())
        return results

    async def _read(self, op: Op) -> Result:
        match op:
            case GetOp():
                found = await self._load(item_thread(op.namespace, op.key))

                if found is not None:
                    return Item(namespace=op.namespace, key=op.key, **found)
            case SearchOp():
                return await self._search(op)
            case ListNamespacesOp():
                return await self._namespaces(op)

        return None

    async def _put(self, op: PutOp) -> None:
        thread_id = item_thread(op.namespace, op.key)

        if op.value is None:
            if not isinstance(self._cp, ErasesThreads):
                raise NotImplementedError("the store cannot erase threads")

            await self._cp.delete_thread(thread_id)
            return

        before = await self._load(thread_id)
        now = datetime.now(UTC).isoformat()
        created = before["created_at"] if before else now
        item: Any = {"value": op.value, "created_at": created, "updated_at": now}
        await self._cp.save_extra(thread_id, {"item": item})

    async def _load(self, thread_id: str) -> dict[str, Any] | None:
        """Return the item's value and times, or ``None``."""
        data = await load_range(self._cp, thread_id, stop=0)
        found = None if data is None else data.extra.get("item")
        return found if isinstance(found, dict) else None

    async def _search(self, op: SearchOp) -> list[SearchItem]:
        found: list[SearchItem] = []
        end = op.offset + op.limit

        async for page in self._pages(op.namespace_prefix):
            loaded = await gather_limited(self._load, page)

            for item, (namespace, key) in zip(loaded, page.values(), strict=True):
                if item is not None and _fits(item["value"], op.filter or {}):
                    found.append(SearchItem(namespace, key, **item))

            if 0 <= end <= len(found):
                break

        return found[op.offset : end]

    async def _namespaces(self, op: ListNamespacesOp) -> list[Namespace]:
        conditions = op.match_conditions or ()
        found = {
            namespace[: op.max_depth]
            async for page in self._pages(())
            for namespace, _ in page.values()
            if all(_matches(namespace, one) for one in conditions)
        }
        return sorted(found)[op.offset : op.offset + op.limit]

    async def _pages(
        self, prefix: Namespace
    ) -> AsyncIterator[dict[str, tuple[Namespace, str]]]:
        """Yield the namespaces and keys of items by thread id, a page at a time."""
        if not isinstance(self._cp, ListsThreads):
            raise NotImplementedError("the store cannot list threads")

        start = _PREFIX + _encoded(prefix)
        after = None

        while page := await self._cp.list_threads(prefix=start, after=after):
            parts = {
                info.thread_id: info.thread_id.removeprefix(_PREFIX).split("/")
                for info in page
            }
            yield {
                thread_id: (tuple(map(unquote, names)), unquote(key[1:]))
                for thread_id, (*names, key) in parts.items()
                if key.startswith(":")  # otherwise it is of another program
            }
            after = page[-1].thread_id


def item_thread(namespace: Namespace, key: str) -> str:
    """Return the id of the thread that holds an item."""
    name = f"{_PREFIX}{_encoded(namespace)}:{quote(key, safe='')}"
    return check_id("the namespace and the key, with their prefix,", name)


def _encoded(namespace: Namespace) -> str:
    return "".join(f"{quote(part, safe='')}/" for part in namespace)


def _matches(namespace: Namespace, condition: MatchCondition) -> bool:
    """Return whether the namespace begins or ends so; ``*`` is any part."""
    path = tuple(condition.path)

    if condition.match_type not in ("prefix", "suffix"):
        raise ValueError(f"unsupported match type: {condition.match_type}")

    if len(namespace) < len(path):
        return False

    is_prefix = condition.match_type == "prefix"
    part = namespace[: len(path)] if is_prefix else namespace[-len(path) :]
    pairs = zip(part, path, strict=bool(path))
    return all(wanted in ("*", name) for name, wanted in pairs)


def _fits(value: Any, wanted: Any) -> bool:
    """Return whether a value has what a filter wants, as LangGraph compares them."""
    if isinstance(wanted, Mapping):
        if any(key.startswith("$") for key in wanted):
            return all(_compares(value, *one) for one in wanted.items())

        return isinstance(value, dict) and all(
            _fits(value.get(key), inner) for key, inner in wanted.items()
        )

    if isinstance(wanted, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(wanted)
            and all(_fits(one, inner) for one, inner in zip(value, wanted, strict=True))
        )

    return bool(value == wanted)


def _compares(value: Any, operator: str, wanted: Any) -> bool:
    match operator:
        case "$eq":
            return bool(value == wanted)
        case "$ne":
            return bool(value != wanted)
        case "$gt":
            return float(value) > float(wanted)
        case "$gte":
            return float(value) >= float(wanted)
        case "$lt":
            return float(value) < float(wanted)
        case "$lte":
            return float(value) <= float(wanted)

    raise ValueError(f"unsupported operator: {operator}")
