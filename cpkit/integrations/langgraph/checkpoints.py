"""Checkpoints in a store: reading, finding and writing them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Any
from uuid import uuid4

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_id,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from cpkit.errors import VersionConflict
from cpkit.integrations.langgraph.composing import Composer, Draft, Fence, Stale
from cpkit.integrations.langgraph.names import FENCE, config_for, namespace_in
from cpkit.integrations.langgraph.records import Stored, View, Write
from cpkit.integrations.langgraph.threads import Threads
from cpkit.integrations.langgraph.values import Value, value_of
from cpkit.protocol import TrimsThreads

__all__ = ["Checkpoints", "Filter", "Found"]

Filter = dict[str, Any] | None

_TRIES = 5
"""Tries of a prune beside other writers of the thread."""

_DELTA_COUNTERS = "counters_since_delta_snapshot"
"""In the metadata of a checkpoint that needs an earlier one for a delta channel."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint and its writes; any thread may call `load`."""

    thread_id: str
    stored: Stored
    writes: list[Write]

    @property
    def id(self) -> str:
        return self.stored.id

    @classmethod
    def of(cls, stored: Stored) -> Found:
        writes = stored.view.writes_of(stored.record["ns"], stored.id)
        return cls(stored.view.thread_id, stored, writes)

    def load(self, serde: SerializerProtocol) -> CheckpointTuple:
        """Build LangGraph's tuple, which shares no object with another result."""
        body, metadata = self.stored.head(serde)
        versions, values = self.stored.build()
        ns, parent = self.stored.record["ns"], self.stored.record["parent"]
        checkpoint: Any = {
            **body,
            "channel_versions": versions,
            "channel_values": {
                channel: value.load(serde) if type(value) is Value else value
                for channel, value in values.items()
            },
        }
        return CheckpointTuple(
            config_for(self.thread_id, ns, self.stored.id),
            checkpoint,
            metadata,
            config_for(self.thread_id, ns, parent) if parent else None,
            [(one.task_id, one.channel, one.load(serde)) for one in self.writes],
        )


@dataclass(frozen=True, slots=True)
class _Search:
    """What a list asks for."""

    config: RunnableConfig | None
    filter: Filter
    before: RunnableConfig | None
    limit: int | None
    serde: SerializerProtocol

    def found(self, view: View) -> list[Stored]:
        """Return the view's checkpoints that match, newest first."""
        wanted = self.config["configurable"] if self.config else {}
        ns, checkpoint_id = wanted.get("checkpoint_ns"), wanted.get("checkpoint_id")
        found = [
            stored
            for name, space in view.spaces.items()
            if ns is None or name == ns
            for stored in space.visible()
            if not checkpoint_id or stored.id == checkpoint_id
            if self._is_before(view, name, stored)
            if not self.filter or self._has_metadata(stored, self.filter)
        ]
        found.sort(key=lambda one: one.position, reverse=True)
        return found if self.limit is None else found[: max(self.limit, 0)]

    def reach(self, view: View) -> int:
        """Return where a view must begin to have all that match, up to the limit."""
        if self.limit is None or view.first == 0:
            return 0

        found = self.found(view)

        if len(found) < self.limit:
            return view.farther()

        return min((one.start for one in found), default=view.first)

    def _is_before(self, view: View, ns: str, stored: Stored) -> bool:
        end = get_checkpoint_id(self.before) if self.before else None

        if not end:
            return True

        # LangGraph asks for a subgraph's checkpoints before one of the graph. These are
        # appended at about the same time, so the ids decide.
        last = view.space(ns).checkpoints.get(end)
        return stored.id < end if last is None else stored.position < last.position

    def _has_metadata(self, stored: Stored, filter: dict[str, Any]) -> bool:
        metadata = stored.head(self.serde)[1]
        return all(_item(metadata, key) == value for key, value in filter.items())


class Checkpoints:
    """The checkpoints in a store. Use it only on the store's event loop."""

    def __init__(self, threads: Threads, serde: SerializerProtocol) -> None:
        self.serde = serde
        self._threads = threads
        self._composer = Composer(serde)

    async def get(self, config: RunnableConfig) -> CheckpointTuple | None:
        thread = self._threads.get(config["configurable"]["thread_id"])
        ns, wanted = namespace_in(config), get_checkpoint_id(config)
        view = await self._threads.read(thread, lambda view: view.reach(ns, wanted))
        fence: Fence | None = config["configurable"].get(FENCE)

        if fence is not None and fence.version is None:
            fence.version = view.version

        stored = view.find(ns, wanted)
        return None if stored is None else Found.of(stored).load(self.serde)

    async def find(
        self,
        config: RunnableConfig | None,
        filter: Filter,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> list[Found]:
        """Return what matches, newest first; of several threads by checkpoint id."""
        search = _Search(config, filter, before, limit, self.serde)

        if config is not None:
            thread = self._threads.get(config["configurable"]["thread_id"])
            view = await self._threads.read(thread, search.reach)
            return [Found.of(stored) for stored in search.found(view)]

        views = self._threads.windows("list without a config", search.reach)
        found = [
            [Found.of(stored) for stored in search.found(view)] async for view in views
        ]
        newest = merge(*found, key=lambda one: one.id, reverse=True)
        return [*islice(newest, None if limit is None else max(limit, 0))]

    async def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        thread = self._threads.get(config["configurable"]["thread_id"])
        ns, parent = namespace_in(config), config["configurable"].get("checkpoint_id")
        view = await self._threads.known(thread)
        offers = thread.offers.pop((ns, parent), {})
        new = checkpoint, metadata, new_versions
        draft = self._composer.checkpoint(view, offers, config, *new)

        try:
            await self._threads.append(thread, draft)
        except Stale:
            # The thread was deleted, or a write was not stored.
            draft = self._composer.checkpoint(view, {}, config, *new, is_whole=True)
            await self._threads.append(thread, draft)

        if thread.view is not None:
            _note_prints(thread.view, draft)

        return config_for(thread.name, ns, checkpoint["id"])

    async def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str,
    ) -> None:
        if writes:
            thread = self._threads.get(config["configurable"]["thread_id"])
            place = namespace_in(config), config["configurable"]["checkpoint_id"]
            offers = thread.offers_of(*place)
            draft = self._composer.writes(offers, config, writes, task_id, task_path)
            await self._threads.append(thread, draft)

    async def copy_newest(self, source_id: str, target_id: str, last: int) -> None:
        """Put the last checkpoints of each namespace, with writes, into another thread.

        The oldest of them is stored whole. With a delta channel, also those before it
        from which the channel is rebuilt are copied.
        """
        if last < 1:
            raise ValueError(f"last must be at least 1, not {last!r}")

        source = self._threads.get(source_id)

        if source is self._threads.get(target_id):
            return

        view = await self._threads.window(source.store_id, lambda _: 0)
        target = self._threads.get(target_id)

        for draft in self._again(view, target_id, self._newest(view, last)):
            await self._threads.append(target, draft)

    async def keep_newest(self, thread_id: str) -> None:
        """Free all but the newest checkpoint of each namespace, with its writes.

        What a delta channel is rebuilt from stays too, hidden. On a store that cannot
        trim, the others are hidden.
        """
        thread = self._threads.get(thread_id)

        for tries in range(_TRIES, 0, -1):
            view = await self._threads.read(thread, lambda _: 0)
            newest = self._newest(view, 1, alone=True)
            root = next((one.id for one in newest if not one.record["ns"]), None)
            wanted = {one.position for one in newest if not self._is_over(one, root)}
            others = [
                [ns, one.id]
                for ns, space in view.spaces.items()
                for one in space.visible()
                if one.position not in wanted
            ]

            if not others:
                await self._threads.trim(thread, view)  # a prune may have died before
                return

            if not isinstance(self._threads.cp, TrimsThreads):
                hidden = Draft({"type": "hidden", "checkpoints": others})
                await self._threads.append(thread, hidden)
                return

            kept = [
                one
                for one in self._newest(view, 1)
                if one.position in wanted or not self._is_over(one, root)
            ]
            drafts = self._kept(view, thread_id, kept, wanted)

            try:
                await self._threads.begin_again(thread, view, drafts)
                return
            except VersionConflict:
                if tries == 1:
                    raise

    async def free_hidden(self, thread_id: str) -> None:
        """Free the hidden checkpoints, if the thread takes half of its bytes then.

        The others are stored again, whole. Where the store cannot trim, or another
        writer appends meanwhile, the hidden ones stay; the next prune frees them.
        """
        thread = self._threads.get(thread_id)
        view = await self._threads.read(thread, lambda _: 0)
        spaces = view.spaces.values()
        shown = {one.position for space in spaces for one in space.visible()}
        count = sum(len(space.checkpoints) for space in spaces)

        if not isinstance(self._threads.cp, TrimsThreads) or len(shown) * 2 > count:
            return

        kept = self._newest(view, count)
        drafts = self._kept(view, thread_id, kept, shown)

        if sum(one.weight for one in drafts) * 2 <= view.weight:
            with suppress(VersionConflict):
                await self._threads.begin_again(thread, view, drafts)

    def _kept(
        self, view: View, thread_id: str, kept: Sequence[Stored], shown: Collection[int]
    ) -> list[Draft]:
        """Return drafts of what is kept; those that are not ``shown`` are hidden."""
        drafts = self._again(view, thread_id, kept)
        drafts += self._early_writes(view, thread_id)
        left = [[one.record["ns"], one.id] for one in kept if one.position not in shown]
        return drafts + (
            [Draft({"type": "hidden", "checkpoints": left})] if left else []
        )

    def _is_over(self, stored: Stored, root: str | None) -> bool:
        """Return whether this is of a subgraph's call from an older root checkpoint.

        The namespace of a call ends with its task's id, after a colon. That of a
        subgraph with its own checkpointer has none, and outlives each call.
        """
        if ":" not in stored.record["ns"]:
            return False

        parents = stored.head(self.serde)[1].get("parents") or {}
        known = stored.view.space("").checkpoints
        return parents.get("") in known and parents[""] != root

    def _again(self, view: View, thread_id: str, kept: Sequence[Stored]) -> list[Draft]:
        """Return drafts that store these checkpoints and their writes whole."""
        drafts: list[Draft] = []
        ids = {(one.record["ns"], one.id) for one in kept}
        empty = View(view.store_id)

        for stored in kept:
            ns, parent = stored.record["ns"], stored.record["parent"]
            found = Found.of(stored).load(self.serde)
            before = config_for(thread_id, ns, parent if (ns, parent) in ids else None)
            draft = self._composer.checkpoint(
                empty, {}, before, found.checkpoint, found.metadata, {}
            )
            drafts += [draft, *self._writes_again(view, thread_id, ns, stored.id)]

        return drafts

    def _early_writes(self, view: View, thread_id: str) -> Iterator[Draft]:
        """Yield drafts of the writes that stand before their checkpoint."""
        for ns, space in view.spaces.items():
            for checkpoint_id in space.writes.keys() - space.checkpoints.keys():
                yield from self._writes_again(view, thread_id, ns, checkpoint_id)

    def _writes_again(
        self, view: View, thread_id: str, ns: str, checkpoint_id: str
    ) -> Iterator[Draft]:
        config = config_for(thread_id, ns, checkpoint_id)

        for position, record in view.space(ns).writes.get(checkpoint_id, ()):
            with view.checked(position):
                writes = [
                    (channel, Write("", channel, value_of(entry, view.blobs)))
                    for _, channel, entry in record["writes"]
                ]
                task = record["task_id"], record["task_path"]

            loaded = [(channel, one.load(self.serde)) for channel, one in writes]
            yield self._composer.writes({}, config, loaded, *task)

    def _newest(self, view: View, last: int, *, alone: bool = False) -> list[Stored]:
        """Return the last checkpoints of each namespace, and what they build on."""
        found: dict[int, Stored] = {}

        for ns, space in view.spaces.items():
            for newest in islice(space.visible(), last):
                stored: Stored | None = newest

                while stored is not None and stored.position not in found:
                    found[stored.position] = stored

                    if alone or not stored.head(self.serde)[1].get(_DELTA_COUNTERS):
                        break

                    stored = view.complete(ns, stored.record["parent"])

        return [found[position] for position in sorted(found)]

    async def claim(self, thread_id: str) -> str:
        """Make a new run the owner of the thread; return its token."""
        token = uuid4().hex
        draft = Draft({"type": "owner"}, extra={"owner": token})
        await self._threads.append(self._threads.get(thread_id), draft)
        return token

    async def history(
        self, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return, for each channel, the writes since its last value, and that value."""
        thread = self._threads.get(config["configurable"]["thread_id"])
        ns, wanted = namespace_in(config), get_checkpoint_id(config)

        def walk(view: View) -> tuple[list[Stored], bool]:
            """Return the parents up to the last values, and whether there are more."""
            stored, missing = view.find(ns, wanted), set(channels)
            parents: dict[str, Stored] = {}

            while stored is not None and missing:
                parent = stored.record["parent"]

                if not parent or parent in parents:
                    return [*parents.values()], False

                # Hidden checkpoints count too: later checkpoints build on them.
                if (stored := view.complete(ns, parent)) is not None:
                    parents[parent] = stored
                    missing -= stored.build()[1].keys()

            return [*parents.values()], bool(missing)

        def reach(view: View) -> int:
            start = view.reach(ns, wanted)
            has_more = start >= view.first and walk(view)[1]
            return view.farther() if has_more else start

        view = await self._threads.read(thread, reach)
        history: dict[str, DeltaChannelHistory] = {
            channel: {"writes": []} for channel in channels
        }
        missing = set(channels)

        for stored in walk(view)[0]:
            for write in reversed(view.writes_of(ns, stored.id)):
                if write.channel in missing:
                    entry = write.task_id, write.channel, write.load(self.serde)
                    history[write.channel]["writes"].append(entry)

            values = stored.build()[1]

            for channel in missing & values.keys():
                value = values[channel]
                seed = value.load(self.serde) if type(value) is Value else value
                history[channel]["seed"] = seed

            missing -= values.keys()

        for found in history.values():
            found["writes"].reverse()

        return history


def _note_prints(view: View, draft: Draft) -> None:
    """Keep the fingerprints of the lists just stored, in the place of older ones."""
    record = draft.record
    checkpoints = view.space(record["ns"]).checkpoints

    if (stored := checkpoints.get(record["checkpoint_id"])) is None:
        return

    values = stored.state[1]

    for channel, prints in draft.prints.items():
        value = values[channel]

        if prints and type(value) is Value:
            value.prints = prints

            if value.base is not None:
                value.base.prints = None

    if (parent := checkpoints.get(record["parent"])) not in (None, stored):
        parent.forget_state()


def _item(metadata: Any, key: str) -> Any:
    """Return the item of this key, or of this path of keys with dots between them."""
    if key in metadata:
        return metadata[key]

    for name in key.split("."):
        metadata = metadata.get(name) if isinstance(metadata, dict) else None

    return metadata
