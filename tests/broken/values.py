"""Values, ids, limits and types that are changed or not refused."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from cpkit import (
    BackendUnavailable,
    CallRecord,
    CheckpointData,
    InvalidId,
    JsonValue,
    PayloadTooLarge,
    SerializationError,
    ThreadDump,
    ThreadInfo,
    ToolCall,
)
from cpkit.driver.codec import Codec
from tests.broken.store import Broken, breaks


class _Changed(Broken):
    """Changes every value before it is stored."""

    def changed(self, value: Any) -> Any:
        return value

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        return await super().append(
            thread_id, [self.changed(message) for message in messages], **options
        )

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await super().save_extra(
            thread_id, {k: self.changed(v) for k, v in extra.items()}
        )

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        args = self.changed(call.args)
        given = ToolCall(call.call_id, call.tool_name, args, call.idempotency_key)
        return await super().record_issued(thread_id, given)

    async def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, **options: Any
    ) -> CallRecord:
        return await super().record_result(
            thread_id, call_id, self.changed(result), **options
        )


@breaks(
    "values.messages-come-back",
    "values.extra-comes-back",
    "values.args-come-back",
    "values.results-come-back",
)
class NormalizesUnicode(_Changed):
    def changed(self, value: Any) -> Any:
        if isinstance(value, str):
            return unicodedata.normalize("NFC", value)

        if isinstance(value, dict):
            return {self.changed(k): self.changed(v) for k, v in value.items()}

        return (
            [self.changed(one) for one in value] if isinstance(value, list) else value
        )


@breaks("values.results-come-back")
class KeepsTextsAsTheyAre(Broken):
    """Writes no JSON for a result that is a text, and so may read another value."""

    async def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, **options: Any
    ) -> CallRecord:
        if isinstance(result, str):
            with suppress(ValueError):
                result = json.loads(result)

        return await super().record_result(thread_id, call_id, result, **options)


@breaks("values.any-object-is-a-message", raises="SerializationError")
class RequiresAField(_Changed):
    def changed(self, value: Any) -> Any:
        if isinstance(value, dict) and not value:
            raise SerializationError((0,), "has no role")

        return value


@breaks("values.message-is-an-object")
class WrapsMessages(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        wrapped = [m if isinstance(m, dict) else {"value": str(m)} for m in messages]
        return await super().append(thread_id, wrapped, **options)


@breaks("values.deep-nesting", raises="SerializationError")
class LimitsNesting(_Changed):
    def changed(self, value: Any, depth: int = 0) -> Any:
        if depth > 100:
            raise SerializationError((), "too deep")

        inner = value.values() if isinstance(value, dict) else value

        for one in inner if isinstance(value, (dict, list)) else ():
            self.changed(one, depth + 1)

        return value


@breaks(
    "values.beyond-all-limits",
    "values.refused-in-messages",
    "values.refused-in-extra",
    "values.refused-in-args",
    "values.refused-in-results",
)
class StoresWhatItCan(_Changed):
    """Writes ``null`` for a value that is not JSON, as some encoders do."""

    def changed(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): self.changed(v) for k, v in value.items()}

        try:
            self._codec.resolve("t", "c", value, True)
        except SerializationError:
            return None

        return value


@breaks(
    "values.tuples-are-arrays",
    "values.subclasses-are-their-base",
    raises="SerializationError",
)
class RefusesSubclasses(_Changed):
    def changed(self, value: Any) -> Any:
        if isinstance(value, dict):
            for inner in value.values():
                self.changed(inner)

        elif type(value) not in (str, int, float, bool, list, type(None)):
            raise SerializationError((), "is not a plain JSON type")

        return value


@breaks("values.subclasses-are-their-base", raises="SerializationError")
class WantsPlainDicts(Broken):
    """Refuses a message of a subclass of dict, such as OrderedDict."""

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        for i, message in enumerate(messages or ()):
            if isinstance(message, dict) and type(message) is not dict:
                raise SerializationError((i,), "a message is a dict")

        return await super().append(thread_id, messages, **options)


@breaks("values.tuples-are-arrays", raises="SerializationError")
class RefusesFloatsInTuples(_Changed):
    def changed(self, value: Any) -> Any:
        if isinstance(value, dict):
            for inner in value.values():
                self.changed(inner)

        elif isinstance(value, tuple) and any(isinstance(one, float) for one in value):
            raise SerializationError((), "does not survive JSON")

        return value


def _folded(text: Any) -> Any:
    return unicodedata.normalize("NFC", text) if isinstance(text, str) else text


@breaks(
    "ids.threads-never-meet",
    "ids.keys-never-meet",
    "ids.calls-never-meet",
    raises="CallMismatch",
)
class NormalizesIds(Broken):
    async def append(self, thread_id: str, *args: Any, **options: Any) -> int:
        return await super().append(_folded(thread_id), *args, **options)

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        folded = ToolCall(
            _folded(call.call_id),
            _folded(call.tool_name),
            call.args,
            _folded(call.idempotency_key),
        )
        return await super().record_issued(thread_id, folded)


@breaks("ids.calls-never-meet", raises="BackendUnavailable")
class IndexesAThousandBytes(Broken):
    """Has an index of thread id and call id, with room for 1,000 bytes of both."""

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        record = await super().record_issued(thread_id, call)

        if len((thread_id + call.call_id).encode()) > 1000:
            raise BackendUnavailable("write", "key too long", maybe_applied=False)

        return record


@breaks("ids.parts-never-mix")
class JoinsIds(Broken):
    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        joined = f"{thread_id}:{call.call_id}"

        for place, stored in self._store.calls.items():
            if ":".join(place) == joined:
                return self._codec.record(stored)

        return await super().record_issued(thread_id, call)


@breaks("ids.kinds-never-mix")
class SharesANamespace(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        others = {k: v for k, v in extra.items() if k not in self._store.threads}
        await super().save_extra(thread_id, others)


@breaks("ids.subclass-is-its-text")
class CallsStr(Broken):
    async def append(self, thread_id: str, *args: Any, **options: Any) -> int:
        return await super().append(str(thread_id), *args, **options)


@breaks("ids.refused", "ids.refused-first")
class AcceptsEmptyIds(Broken):
    async def append(self, thread_id: str, *args: Any, **options: Any) -> int:
        return await super().append(thread_id or "default", *args, **options)


@breaks(
    "ids.refused-in-list",
    "ids.refused-in-read",
    "ids.refused-in-receipts",
    "ids.refused-in-delete",
)
class ReturnsNothingForInvalidIds(Broken):
    async def list_threads(self, **options: Any) -> list[ThreadInfo]:
        try:
            return await super().list_threads(**options)
        except InvalidId:
            return []

    async def read(self, *args: Any, **options: Any) -> list[Any]:
        try:
            return await super().read(*args, **options)
        except InvalidId:
            return []

    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        try:
            return await super().list_calls(thread_id)
        except InvalidId:
            return []

    async def delete_thread(self, *args: Any, **options: Any) -> None:
        if args[0]:
            await super().delete_thread(*args, **options)


@breaks("limits.payload-is-inclusive", raises="PayloadTooLarge")
class LimitsExclusively(Broken):
    def __init__(self, *, max_payload: int = 2**24, **options: Any) -> None:
        super().__init__(max_payload=max_payload - 1, **options)


@breaks("limits.too-large-is-refused")
class CountsCharacters(Broken):
    def __init__(self, *, max_payload: int = 2**24, **options: Any) -> None:
        super().__init__(max_payload=max_payload * 4, **options)


@breaks("limits.too-large-is-refused")
class AppendsAnyExtra(Broken):
    """Limits the messages of an append, and the extra of a merge only."""

    async def append(
        self, thread_id: str, messages: Any, *, extra: Any = None, **options: Any
    ) -> int:
        self._check_usable()
        limit = self._codec.max_payload

        try:
            self._codec.append(thread_id, messages, None)
            self._codec.max_payload = 2**30
            return await super().append(thread_id, messages, extra=extra, **options)
        finally:
            self._codec.max_payload = limit


@breaks("limits.too-large-tells-the-facts")
class RaisesWithoutSize(Broken):
    async def append(self, *args: Any, **options: Any) -> int:
        try:
            return await super().append(*args, **options)
        except PayloadTooLarge as exc:
            raise PayloadTooLarge((), 0, exc.limit) from None


@breaks("limits.payload-is-of-one", raises="PayloadTooLarge")
class LimitsTheSum(Broken):
    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        size, limit = len(json.dumps(messages)), self._codec.max_payload

        if size > limit:
            raise PayloadTooLarge((0,), size, limit)

        return await super().append(thread_id, messages, **options)


@breaks("limits.append-is-inclusive", raises="PayloadTooLarge")
class LimitsAppendsExclusively(Broken):
    def __init__(self, *, max_append: int = 2**26, **options: Any) -> None:
        super().__init__(max_append=max_append - 1, **options)


@breaks("limits.append-too-large")
class LimitsTheMessagesOnly(Broken):
    """Does not count the extra of an append."""

    async def append(
        self, thread_id: str, messages: Any, *, extra: Any = None, **options: Any
    ) -> int:
        version = await super().append(thread_id, messages, **options)

        if extra:
            await self.save_extra(thread_id, extra)

        return version


@breaks("limits.append-too-large")
class CountsNoKeys(Broken):
    """Does not count the keys of extra."""

    def __init__(self, *, max_append: int = 2**26, **options: Any) -> None:
        super().__init__(max_append=2**30, **options)
        self._limit = max_append

    async def append(
        self, thread_id: str, messages: Any, *, extra: Any = None, **options: Any
    ) -> int:
        self._check_usable()
        write = self._codec.append(thread_id, messages, None, extra)
        self._check_bytes([*write.bodies, *(value for _, value in write.items)])
        return await super().append(thread_id, messages, extra=extra, **options)

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        self._check_usable()
        self._check_bytes([v for _, v in self._codec.merge(thread_id, extra).items])
        await super().save_extra(thread_id, extra)

    def _check_bytes(self, values: list[bytes]) -> None:
        if (size := sum(map(len, values))) > self._limit:
            raise PayloadTooLarge((), size, self._limit, "max_append")


@breaks("sizes.large-values", raises="PayloadTooLarge")
class LimitsToOneMegabyte(Broken):
    def __init__(self, *, max_payload: int = 2**20, **options: Any) -> None:
        super().__init__(max_payload=max_payload, **options)


@breaks(
    "typed.comes-back",
    "typed.keeps-unknown-fields",
    "typed.refuses-another-type",
    "typed.refuses-the-unloadable",
    "typed.strict-roundtrip",
)
class ForgetsTypes(Broken):
    """Stores typed messages as JSON, and loads them as dicts."""

    def __init__(self, *, message_type: Any = dict, **options: Any) -> None:
        super().__init__(**options)

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        plain = [to_jsonable_python(m, fallback=repr) for m in messages]
        objects = [m if isinstance(m, dict) else {"value": m} for m in plain]
        return await super().append(thread_id, objects, **options)


@breaks("typed.strict-roundtrip", raises="SerializationError")
class ComparesTheOrderOfSets(Broken):
    """Refuses a set whose copy is in another order."""

    def __init__(
        self,
        *,
        message_type: Any = dict,
        strict_roundtrip: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            message_type=message_type, strict_roundtrip=strict_roundtrip, **options
        )
        self._type = TypeAdapter[Any](message_type) if strict_roundtrip else None

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        for i, one in enumerate(messages if self._type else ()):
            assert self._type is not None
            text = self._type.dump_json(one)

            if self._type.dump_json(self._type.validate_json(text)) != text:
                raise SerializationError((i,), "would load differently")

        return await super().append(thread_id, messages, **options)


@breaks("typed.comes-back", raises="SerializationError")
class IgnoresAliases(Broken):
    """Stores the fields of a model under their names in Python."""

    def __init__(self, *, message_type: Any = dict, **options: Any) -> None:
        super().__init__(**options)
        self._type = TypeAdapter[Any](message_type)

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        plain = [
            self._type.dump_python(one, mode="json", by_alias=False) for one in messages
        ]

        try:
            for one in plain:
                self._type.validate_python(one)
        except ValidationError as exc:
            raise SerializationError((0,), str(exc)) from exc

        return await super().append(thread_id, plain, **options)

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)

        if loaded is not None:
            loaded.messages[:] = map(self._type.validate_python, loaded.messages)

        return loaded


@breaks("typed.comes-back")
class ReadsPlainMessages(Broken):
    """Validates messages in load, and not in read."""

    async def read(self, *args: Any, **options: Any) -> list[Any]:
        codec, self._codec = self._codec, Codec()

        try:
            return await super().read(*args, **options)
        finally:
            self._codec = codec


@breaks("typed.misfit-is-told-at-load")
class CountsFromTheStartOfARead(Broken):
    """Names the position of a misfit among the messages that were read."""

    async def read(
        self, thread_id: str, start: int = 0, stop: int | None = None
    ) -> list[Any]:
        try:
            return await super().read(thread_id, start, stop)
        except SerializationError as exc:
            exc.path = (int(exc.path[0]) - start, *exc.path[1:])
            raise


@breaks("typed.comes-back", raises="SerializationError")
class DumpsTypedMessages(Broken):
    """Dumps messages as ``load`` returns them, and so cannot restore them."""

    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        dump, loaded = await super().dump_thread(thread_id), await self.load(thread_id)
        return replace(dump, messages=loaded.messages) if dump and loaded else dump
