"""Loads of a range that have other messages, or not all of the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpkit import CheckpointData, InvalidId, SerializationError
from cpkit.driver.codec import Codec
from tests.broken.handles import RemembersUntilItChanges
from tests.broken.patterns import resolve
from tests.broken.store import Broken, breaks, pause

Loaded = CheckpointData[Any]


class _Changed(Broken):
    """Changes what a load of a range returns."""

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> Loaded | None:
        loaded = await super().load_range(thread_id, start, stop)
        return None if loaded is None else self.changed(loaded)

    def changed(self, loaded: Loaded) -> Loaded | None:
        raise NotImplementedError


@breaks("range.is-a-slice")
class RangesNoNegatives(Broken):
    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> Loaded | None:
        return await super().load_range(thread_id, max(start, 0), stop)


@breaks("range.is-a-slice")
class CountsTheRange(_Changed):
    """Takes the number of messages of the range for the version."""

    def changed(self, loaded: Loaded) -> Loaded:
        return replace(loaded, version=len(loaded.messages))


@breaks("range.is-a-slice")
class RangesFromZero(_Changed):
    def changed(self, loaded: Loaded) -> Loaded:
        return replace(loaded, first=0)


@breaks("range.has-the-rest")
class RangesNoPendingCalls(_Changed):
    def changed(self, loaded: Loaded) -> Loaded:
        is_whole = len(loaded.messages) == loaded.version
        return loaded if is_whole else replace(loaded, pending=[])


@breaks("range.has-the-rest")
class JoinsExtraToMessages(_Changed):
    """Reads extra by a join, which has no row where no message is in the range."""

    def changed(self, loaded: Loaded) -> Loaded:
        return loaded if loaded.messages else replace(loaded, extra={})


@breaks("range.defaults-to-all")
class RangesAPage(Broken):
    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = 3
    ) -> Loaded | None:
        return await super().load_range(thread_id, start, stop)


@breaks("range.missing-is-none")
class RangesMissingAsEmpty(Broken):
    async def load_range(self, *args: Any, **options: Any) -> Loaded | None:
        empty: Loaded = CheckpointData([], {}, [], 0)
        return await super().load_range(*args, **options) or empty


@breaks("range.missing-is-none")
class RangesNothingWithoutMessages(_Changed):
    def changed(self, loaded: Loaded) -> Loaded | None:
        return loaded if loaded.version else None


@breaks("range.missing-is-none")
class RangesErasedCalls(Broken):
    """Takes an id with erased calls for a thread without messages."""

    async def load_range(
        self, thread_id: str, *args: Any, **options: Any
    ) -> Loaded | None:
        loaded = await super().load_range(thread_id, *args, **options)
        has_calls = bool(self._store.of_thread(thread_id))
        return loaded or (CheckpointData([], {}, [], 0) if has_calls else None)


@breaks("range.is-the-callers")
class ReturnsCachedRanges(Broken):
    async def load_range(
        self, thread_id: str, *args: Any, **options: Any
    ) -> Loaded | None:
        loaded = await super().load_range(thread_id, *args, **options)
        cache: dict[str, Loaded | None] = self.__dict__.setdefault("_cache", {})
        cached = cache.setdefault(thread_id, loaded)
        return loaded and cached and replace(loaded, extra=cached.extra)


@breaks("range.arguments")
class AcceptsAnyRange(Broken):
    async def load_range(
        self, thread_id: str, start: Any = 0, stop: Any = None
    ) -> Loaded | None:
        last = None if stop is None else int(stop)
        return await super().load_range(thread_id, int(start or 0), last)


@breaks("range.arguments")
class ChecksRangesOfThreadsOnly(Broken):
    """Checks the bounds when it has found the thread."""

    async def load_range(
        self, thread_id: str, *args: Any, **options: Any
    ) -> Loaded | None:
        if await self.load(thread_id) is None:
            return None

        return await super().load_range(thread_id, *args, **options)


@breaks("range.id-is-not-a-pattern")
class RangesByPattern(Broken):
    async def load_range(
        self, thread_id: str, *args: Any, **options: Any
    ) -> Loaded | None:
        if isinstance(thread_id, str):
            thread_id = resolve(thread_id, self._store.threads)

        return await super().load_range(thread_id, *args, **options)


@breaks("ids.refused-in-read")
class RangesNothingForInvalidIds(Broken):
    async def load_range(self, *args: Any, **options: Any) -> Loaded | None:
        try:
            return await super().load_range(*args, **options)
        except InvalidId:
            return None


@breaks("handle.closed-after", "handle.closed-before")
class RangesWhenClosed(Broken):
    async def load_range(self, *args: Any, **options: Any) -> Loaded | None:
        return await super().load_range(*args, **options) if self._is_open else None


@breaks("handle.shares-every-write")
class RemembersRanges(RemembersUntilItChanges):
    async def load_range(self, *args: Any, **options: Any) -> Loaded | None:
        fresh = await super().load_range(*args, **options)
        return self.remembered(("range", args, options), fresh)


@breaks("erase.reads-nothing")
class RangesWhatItHasLoaded(Broken):
    """Answers from the last range of the thread where there is nothing new."""

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> Loaded | None:
        cache = self.__dict__.setdefault("_cache", {})
        loaded = await super().load_range(thread_id, start, stop)
        cache[thread_id] = loaded or cache.get(thread_id)
        last: Loaded | None = cache[thread_id]
        return last


@breaks("typed.misfit-is-told-at-load")
class CountsFromTheStartOfARange(Broken):
    """Names the position of a misfit among the messages of the range."""

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> Loaded | None:
        try:
            return await super().load_range(thread_id, start, stop)
        except SerializationError as exc:
            exc.path = (int(exc.path[0]) - start, *exc.path[1:])
            raise


@breaks("typed.comes-back")
class RangesPlainMessages(Broken):
    """Validates messages in load, and not in load_range."""

    async def load_range(self, *args: Any, **options: Any) -> Loaded | None:
        codec, self._codec = self._codec, Codec()

        try:
            return await super().load_range(*args, **options)
        finally:
            self._codec = codec


@breaks("sizes.long-thread")
class RangesAThousandMessages(_Changed):
    def changed(self, loaded: Loaded) -> Loaded:
        return replace(loaded, messages=loaded.messages[:1000])


@breaks("bounded.range-memory")
class LoadsForARange(Broken):
    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> Loaded | None:
        whole = await self.load(thread_id)
        return whole and replace(whole, messages=whole.messages[start:stop])


@breaks("bounded.range-memory")
class CountsMessagesForNone(Broken):
    """Loads the thread where the range has no message, to learn its version."""

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> Loaded | None:
        if stop == 0:
            whole = await self.load(thread_id)
            return whole and replace(whole, messages=[])

        return await super().load_range(thread_id, start, stop)


@breaks("bounded.range-calls")
class CountsMessagesOneByOne(Broken):
    """Looks at each message of the thread, to learn its version."""

    async def load_range(self, thread_id: str, *args: Any, **options: Any) -> Any:
        for body in self._store.threads[thread_id].bodies:
            len(body)

        return await super().load_range(thread_id, *args, **options)


@breaks("concurrent.ranges-are-of-one-moment")
class RangesInTwoSteps(Broken):
    """Reads the messages first; extra and pending calls are newer."""

    async def load_range(self, *args: Any, **options: Any) -> Loaded | None:
        first = await super().load_range(*args, **options)
        await pause()
        second = await super().load_range(*args, **options)

        if first is None or second is None:
            return second

        return replace(first, extra=second.extra, pending=second.pending)


@breaks("concurrent.ranges-are-of-one-moment")
class CountsTheVersionLater(Broken):
    """Reads the version when it has read the rest."""

    async def load_range(self, *args: Any, **options: Any) -> Loaded | None:
        first = await super().load_range(*args, **options)
        await pause()
        second = await super().load_range(*args, **options)
        return first and second and replace(first, version=second.version)


@breaks("linearizable.threads-in-handles")
class RangesAStaleCopy(Broken):
    """Answers a range from the handle's last load."""

    async def load(self, thread_id: str) -> Loaded | None:
        loaded = await super().load(thread_id)
        self.__dict__.setdefault("_loaded", {})[thread_id] = loaded
        return loaded

    async def load_range(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> Loaded | None:
        whole: Loaded | None = self.__dict__.get("_loaded", {}).get(thread_id)

        if whole is None:
            return await super().load_range(thread_id, start, stop)

        return replace(whole, messages=whole.messages[start:stop])
