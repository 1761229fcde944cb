"""Stores that keep texts as UTF-8 or UTF-16, which changes or refuses surrogates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpkit import (
    CallRecord,
    CheckpointData,
    JsonValue,
    SerializationError,
    ThreadDump,
    ToolCall,
)
from tests.broken.claims import ComparesSomeArgs
from tests.broken.store import Broken, breaks


def joined(value: Any) -> Any:
    """Return a value as UTF-16 has it: a high and a low surrogate are one character."""
    match value:
        case str():
            utf16 = value.encode("utf-16", "surrogatepass")
            return utf16.decode("utf-16", "surrogatepass")
        case dict():
            return {joined(key): joined(inner) for key, inner in value.items()}
        case list():
            return [joined(inner) for inner in value]
        case _:
            return value


def replaced(value: Any) -> Any:
    """Return a value with a question mark for each surrogate."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {replaced(key): replaced(inner) for key, inner in value.items()}
        case list():
            return [replaced(inner) for inner in value]
        case _:
            return value


class _Stores(Broken):
    """Stores another value than the one that it is given."""

    def changed(self, value: Any) -> Any:
        raise NotImplementedError

    async def append(
        self, thread_id: str, messages: Any, *, extra: Any = None, **options: Any
    ) -> int:
        return await super().append(
            thread_id,
            [self.changed(message) for message in messages],
            extra=None if extra is None else self.changed(extra),
            **options,
        )

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await super().save_extra(thread_id, self.changed(dict(extra)))

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        call = replace(call, args=self.changed(dict(call.args)))
        return await super().record_issued(thread_id, call)

    async def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, **options: Any
    ) -> CallRecord:
        result = self.changed(result)
        return await super().record_result(thread_id, call_id, result, **options)


@breaks("text.comes-back", "text.keys-of-extra", raises="SerializationError")
class RefusesSurrogates(_Stores):
    def changed(self, value: Any) -> Any:
        if replaced(value) != value:
            raise SerializationError((), "a text has a lone surrogate")

        return value


@breaks("text.comes-back")
class ReplacesSurrogates(_Stores):
    def changed(self, value: Any) -> Any:
        return replaced(value)


@breaks("text.comes-back", "text.keys-of-extra")
class JoinsPairs(_Stores):
    """Decodes the escapes of JSON as a parser does that knows of no lone surrogates."""

    def changed(self, value: Any) -> Any:
        return joined(value)


@breaks("text.comes-back")
class JoinsPairsInResults(Broken):
    async def record_result(
        self, thread_id: str, call_id: str, result: JsonValue, **options: Any
    ) -> CallRecord:
        result = joined(result)
        return await super().record_result(thread_id, call_id, result, **options)


@breaks("text.comes-back")
class FindsPairsJoined(Broken):
    """Changes no text that it stores, but those that find_completed returns."""

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        record = await super().find_completed(idempotency_key)
        return record and replace(record, result=joined(record.result))


@breaks("text.keys-of-extra")
class JoinsPairsInKeys(Broken):
    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        given = {joined(key): value for key, value in extra.items()}
        await super().save_extra(thread_id, given)


@breaks("text.in-ranges")
class ReadsPairsJoined(Broken):
    async def read(self, *args: Any, **options: Any) -> list[Any]:
        return [joined(one) for one in await super().read(*args, **options)]


@breaks("text.in-ranges")
class RangesPairsJoined(Broken):
    async def load_range(
        self, *args: Any, **options: Any
    ) -> CheckpointData[Any] | None:
        loaded = await super().load_range(*args, **options)
        return loaded and replace(loaded, messages=joined(loaded.messages))


@breaks("text.in-receipts")
class ListsPairsJoined(Broken):
    async def list_calls(self, thread_id: str) -> list[CallRecord]:
        listed = await super().list_calls(thread_id)
        return [replace(one, result=joined(one.result)) for one in listed]


@breaks("text.is-moved", raises="UnicodeEncodeError")
class DumpsUtf8(Broken):
    async def dump_thread(self, thread_id: str) -> ThreadDump | None:
        dump = await super().dump_thread(thread_id)
        "".join(map(str, dump.extra if dump else ())).encode()
        return dump


@breaks("text.is-moved")
class RestoresPairsJoined(Broken):
    async def restore_thread(self, dump: ThreadDump) -> None:
        calls = [replace(one, result=joined(one.result)) for one in dump.calls]
        await super().restore_thread(replace(dump, calls=calls))


@breaks("text.for-other-handles")
class KeepsTextsInItsCache(Broken):
    """Loads a thread right only with the handle that has written it."""

    async def append(self, thread_id: str, *args: Any, **options: Any) -> int:
        self.__dict__.setdefault("_written", set()).add(thread_id)
        return await super().append(thread_id, *args, **options)

    async def load(self, thread_id: str) -> CheckpointData[Any] | None:
        loaded = await super().load(thread_id)

        if loaded is None or thread_id in self.__dict__.get("_written", ()):
            return loaded

        return replace(loaded, messages=joined(loaded.messages))


@breaks("text.in-typed-messages")
class RefusesTypedSurrogates(Broken):
    """Refuses typed messages with a lone surrogate, and does not say where it is."""

    async def append(self, *args: Any, **options: Any) -> int:
        try:
            return await super().append(*args, **options)
        except SerializationError as exc:
            raise SerializationError((0,), exc.reason) from None


@breaks("text.in-typed-messages", raises="UnicodeEncodeError")
class WritesTypedUtf8(Broken):
    """Encodes typed messages before it checks them."""

    async def append(self, thread_id: str, messages: Any, **options: Any) -> int:
        for message in messages:
            text = message["text"] if isinstance(message, dict) else message.text
            text.encode()

        return await super().append(thread_id, messages, **options)


@breaks("claim.mismatch-of-args")
class ComparesArgsInUtf16(ComparesSomeArgs):
    def shortened(self, args: str) -> str:
        text: str = joined(args)
        return text
