"""From values to stored bytes and back, the same for every backend.

A store keeps bytes of JSON and never looks into them. `Codec` checks and encodes whole
writes for it, and decodes what it fetched.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

from cpkit.canonical import canonical_json
from cpkit.driver.ids import check_id
from cpkit.driver.jsontext import encode_json, parse_json, plain_key
from cpkit.driver.options import MAX_APPEND, MAX_PAYLOAD
from cpkit.driver.store import Decode
from cpkit.driver.typed import TypedMessages
from cpkit.driver.writes import (
    Append,
    Claim,
    Merge,
    Resolve,
    Restore,
    StoredCall,
    StoredDump,
    stored_size,
)
from cpkit.errors import (
    CallMismatch,
    CorruptThread,
    PayloadTooLarge,
    SerializationError,
)
from cpkit.records import (
    CallRecord,
    CallStatus,
    JsonValue,
    ThreadDump,
    ToolCall,
)

__all__ = ["Codec", "check_same_call", "decode_rows", "from_micros", "to_micros"]

MessageT = TypeVar("MessageT")

# Decoding more messages or more bytes than this takes over two milliseconds.
_MANY_MESSAGES = 512
_MANY_BYTES = 512 * 1024

# The highest attempt of a restored call: every store can count further.
_MAX_ATTEMPT = 1_000_000_000

# A larger expected version counts as this one. No thread reaches it, every store can
# compare it, and an error can print it: Python prints no int of over 4,300 digits.
_MAX_VERSION = 2**53

_STATUSES = ("issued", "completed", "failed")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# No time of a restored thread is so late. An engine that counts in floats keeps 53 bits
# of microseconds, up to June 2255: this leaves room for the later times of changes.
_TOO_LATE = datetime(2255, 1, 1, tzinfo=UTC)


class Codec(Generic[MessageT]):
    """Checks and encodes what goes into a store, and decodes what comes out.

    ``message_type`` is ``dict`` (JSON objects, kept as they are) or any type that
    pydantic validates. A typed message that could not be loaded again is refused, and
    with ``strict_roundtrip`` so is one that would come back different. Decoding is
    safe in any thread.
    """

    def __init__(
        self,
        message_type: Any = dict,
        *,
        max_payload: int = MAX_PAYLOAD,
        max_append: int = MAX_APPEND,
        strict_roundtrip: bool = False,
    ) -> None:
        self.max_payload = max_payload
        self.max_append = max_append
        self._typed: TypedMessages | None = None
        self._decode: Callable[[bytes | str], Any] = parse_json

        if message_type is not dict:
            self._typed = TypedMessages(message_type, strict=strict_roundtrip)
            self._decode = self._typed.decode

    def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        expected_version: int | None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> Append:
        """Check and encode the arguments of ``append``."""
        thread_id = check_id("thread_id", thread_id)
        _check_sequence("messages", messages)

        if expected_version is not None:
            if type(expected_version) is not int:
                raise TypeError("expected_version must be an int or None")

            if expected_version < 0:
                raise ValueError("expected_version must not be negative")

            expected_version = min(expected_version, _MAX_VERSION)

        encode = self._encode_dict if self._typed is None else self._typed.encode
        bodies = [
            self._limited(encode(message, (i,)), (i,))
            for i, message in enumerate(messages)
        ]
        items = () if extra is None else self._items(extra)
        write = Append(thread_id, bodies, expected_version, items)
        self._check_size(write, "messages")
        return write

    def merge(self, thread_id: str, extra: Mapping[str, JsonValue]) -> Merge:
        """Check and encode the arguments of ``save_extra``."""
        write = Merge(check_id("thread_id", thread_id), self._items(extra))
        self._check_size(write, "extra")
        return write

    def claim(self, thread_id: str, call: ToolCall) -> Claim:
        """Check and encode the arguments of ``record_issued``."""
        thread_id = check_id("thread_id", thread_id)

        if not isinstance(call, ToolCall):
            raise TypeError(f"call must be a ToolCall, not {type(call).__name__}")

        call_id = check_id("call_id", call.call_id)
        tool_name = check_id("tool_name", call.tool_name)
        key = check_id("idempotency_key", call.idempotency_key)

        if not isinstance(call.args, Mapping):
            raise SerializationError(
                ("args",), f"args is a JSON object, not {type(call.args).__name__}"
            )

        args = self._encode(dict(call.args), ("args",))
        # A copy: what the caller does to its own args changes nothing.
        return Claim(
            thread_id, ToolCall(call_id, tool_name, parse_json(args), key), args
        )

    def resolve(
        self, thread_id: str, call_id: str, result: JsonValue, success: bool
    ) -> Resolve:
        """Check and encode the arguments of ``record_result``."""
        thread_id = check_id("thread_id", thread_id)
        call_id = check_id("call_id", call_id)

        if not isinstance(success, bool):
            raise TypeError("success must be a bool")

        status: CallStatus = "completed" if success else "failed"
        return Resolve(thread_id, call_id, status, self._encode(result, ("result",)))

    def restore(self, dump: ThreadDump) -> Restore:
        """Check and encode the argument of ``restore_thread``."""
        if not isinstance(dump, ThreadDump):
            raise TypeError(f"dump must be a ThreadDump, not {type(dump).__name__}")

        thread_id = check_id("thread_id", dump.thread_id)
        _check_sequence("messages", dump.messages)
        _check_sequence("calls", dump.calls)
        bodies = [self._encode(one, (i,)) for i, one in enumerate(dump.messages)]
        calls = [self._encode_record(thread_id, record) for record in dump.calls]
        _check_calls(calls)
        items = self._items(dump.extra)
        created_at, updated_at = (
            None if time is None else _micros(time)
            for time in (dump.created_at, dump.updated_at)
        )
        has_content = bodies or items or not all(call.erased for call in calls)

        if created_at is None or updated_at is None:
            if (created_at, updated_at) != (None, None) or has_content or not calls:
                raise ValueError(
                    "a dump without times has erased calls and nothing else"
                )
        elif not has_content:
            raise ValueError(
                "a dump with times has messages, extra or a call that is not erased"
            )
        elif created_at > updated_at:
            raise ValueError(
                f"created_at {dump.created_at} is after updated_at {dump.updated_at}"
            )

        return Restore(thread_id, bodies, items, calls, created_at, updated_at)

    def dump(self, thread_id: str, stored: StoredDump) -> ThreadDump:
        """Decode a stored thread; messages are the JSON that is stored."""
        try:
            created_at, updated_at = (
                None if micros is None else from_micros(micros)
                for micros in (stored.created_at, stored.updated_at)
            )
        except (TypeError, OverflowError) as exc:
            raise CorruptThread(thread_id, "its times", str(exc)) from exc

        return ThreadDump(
            thread_id,
            _PLAIN_JSON.messages(stored.bodies, thread_id),
            self.extra(stored.items, thread_id),
            [self.record(call) for call in stored.calls],
            created_at,
            updated_at,
        )

    def messages(
        self, rows: Iterable[bytes | str], thread_id: str, first: int = 0
    ) -> list[MessageT]:
        """Decode stored messages, the first of which stands at position ``first``.

        ``rows`` are all ``bytes`` or all ``str``. Raises ``CorruptThread`` for bytes
        that are not JSON (or not a JSON object, for ``dict`` messages) and
        ``SerializationError`` for JSON that does not fit the message type.
        """
        with _collector_paused():
            bodies = list(rows)

            try:
                messages = [self._decode(body) for body in bodies]

                if self._typed or all(type(one) is dict for one in messages):
                    return messages
            except (ValueError, TypeError):
                pass  # the lines below find the message, and raise for it

            return [
                self._message(one, thread_id, i) for i, one in enumerate(bodies, first)
            ]

    def extra(
        self, items: Iterable[tuple[bytes | str, bytes | str]], thread_id: str
    ) -> dict[str, JsonValue]:
        """Decode stored extra, keys and values."""
        extra = {}

        for key, value in items:
            where = f"extra key {_text(key)}"
            name = _parsed(key, thread_id, where)

            if not isinstance(name, str):
                raise CorruptThread(thread_id, where, "not a string")

            extra[name] = _parsed(value, thread_id, where)

        return extra

    def records(self, stored: Sequence[StoredCall]) -> list[CallRecord]:
        """Decode stored calls.

        Raises ``CorruptThread``, which has the other calls, if one is damaged.
        """
        try:
            return [self.record(one) for one in stored]
        except CorruptThread as exc:
            first = exc

        damaged, found = [], []

        for one in stored:
            try:
                found.append(self.record(one))
            except CorruptThread:
                damaged.append(_text(one.call_id))  # damage can make an id bytes

        raise CorruptThread(
            first.thread_id, first.where, first.reason, damaged, found
        ) from first

    def record(self, stored: StoredCall) -> CallRecord:
        """Decode a stored call; raise ``CorruptThread`` if its columns do not fit."""
        where = f"call {stored.call_id!r}"

        if fault := _fault_of(stored):
            thread_id = stored.thread_id if isinstance(stored.thread_id, str) else "?"
            raise CorruptThread(thread_id, where, fault)

        args = _parsed(stored.args, stored.thread_id, where)

        if not isinstance(args, dict):
            raise CorruptThread(stored.thread_id, where, "args are not a JSON object")

        result = stored.result
        resolved_at = stored.resolved_at

        try:
            return CallRecord(
                stored.thread_id,
                ToolCall(
                    stored.call_id, stored.tool_name, args, stored.idempotency_key
                ),
                stored.status,
                stored.attempt,
                from_micros(stored.issued_at),
                None if result is None else _parsed(result, stored.thread_id, where),
                None if resolved_at is None else from_micros(resolved_at),
                bool(stored.erased),
            )
        except (TypeError, OverflowError) as exc:
            raise CorruptThread(stored.thread_id, where, str(exc)) from exc

    def _items(self, extra: Mapping[str, JsonValue]) -> list[tuple[bytes, bytes]]:
        if not isinstance(extra, Mapping):
            raise TypeError(f"extra must be a mapping, not {type(extra).__name__}")

        # A mapping can have two keys of the same text: subclasses of str that hash
        # differently.
        items: dict[bytes, bytes] = {}

        for key, value in extra.items():
            name = plain_key(key, ())
            items[self._encode(name, (name,))] = self._encode(value, (name,))

        return list(items.items())

    def _check_size(self, write: Append | Merge, what: str) -> None:
        if (size := stored_size(write)) > self.max_append:
            raise PayloadTooLarge((what,), size, self.max_append, "max_append")

    def _encode_record(self, thread_id: str, record: CallRecord) -> StoredCall:
        """Encode a call of a dump."""
        if not isinstance(record, CallRecord):
            raise TypeError(f"a call must be a CallRecord, not {type(record).__name__}")

        claim = self.claim(thread_id, record.call)
        resolved = record.status != "issued"

        if record.thread_id != thread_id:
            raise ValueError(
                f"call {record.call.call_id!r} is of thread {record.thread_id!r}, "
                f"not {thread_id!r}"
            )

        if record.status not in _STATUSES or (record.resolved_at is None) == resolved:
            raise ValueError(
                f"call {record.call.call_id!r}: status {record.status!r} does not fit "
                f"resolved_at {record.resolved_at}"
            )

        if type(record.attempt) is not int or not 1 <= record.attempt <= _MAX_ATTEMPT:
            raise ValueError(
                f"attempt {record.attempt!r} must be an int from 1 to {_MAX_ATTEMPT}"
            )

        keeps_result = resolved and not record.erased

        if record.result is not None and not keeps_result:
            raise ValueError(
                f"call {record.call.call_id!r} is issued or erased, but has a result"
            )

        if record.call.args and record.erased:
            raise ValueError(f"call {record.call.call_id!r} is erased, but has args")

        return StoredCall(
            thread_id,
            claim.call.call_id,
            claim.call.tool_name,
            claim.args,
            claim.call.idempotency_key,
            record.status,
            record.attempt,
            _micros(record.issued_at),
            self._encode(record.result, ("result",)) if keeps_result else None,
            None if record.resolved_at is None else _micros(record.resolved_at),
            bool(record.erased),
        )

    def _encode_dict(self, message: object, path: tuple[int]) -> bytes:
        if not isinstance(message, dict):
            raise SerializationError(
                path,
                f"a message is a JSON object, not {type(message).__name__} "
                "(open the store with message_type= for typed messages)",
            )

        return encode_json(message, path)

    def _encode(self, value: object, path: tuple[str | int, ...]) -> bytes:
        return self._limited(encode_json(value, path), path)

    def _limited(self, body: bytes, path: tuple[str | int, ...]) -> bytes:
        if len(body) > self.max_payload:
            raise PayloadTooLarge(path, len(body), self.max_payload, "max_payload")

        return body

    def _message(self, row: bytes | str, thread_id: str, position: int) -> MessageT:
        try:
            message = self._decode(row)
        except (ValueError, TypeError) as exc:
            _parsed(row, thread_id, f"message {position}")
            fault = f"does not fit message_type: {exc}"
            raise SerializationError((position,), fault, thread_id) from exc

        if self._typed is None and type(message) is not dict:
            raise CorruptThread(thread_id, f"message {position}", "not a JSON object")

        return message  # type: ignore[no-any-return]  # of the type, or a dict


def check_same_call(found: CallRecord, call: ToolCall) -> None:
    """Raise ``CallMismatch`` unless the record is of this very call.

    An erased record has lost its args and is compared by key and tool alone.
    """
    there = found.call
    differs = []

    if there.idempotency_key != call.idempotency_key:
        differs.append("idempotency key")

    if there.tool_name != call.tool_name:
        differs.append("tool")

    if not found.erased and canonical_json(there.args) != canonical_json(call.args):
        differs.append("args")

    if differs:
        raise CallMismatch(found.thread_id, call.call_id, differs)


async def decode_rows(decode: Decode, bodies: list[Any], first: int) -> list[Any]:
    """Decode messages that a store fetched: many of them in a worker thread.

    So a large load does not block the event loop, and a small one does not pay for a
    thread. The list is emptied, so that no message is held twice.
    """
    if len(bodies) > _MANY_MESSAGES or sum(map(len, bodies)) > _MANY_BYTES:
        return await asyncio.to_thread(decode, _emptied(bodies), first)

    return decode(bodies, first)


def from_micros(micros: int) -> datetime:
    """Return the UTC time of microseconds since the epoch, exactly."""
    return _EPOCH + timedelta(microseconds=micros)


def to_micros(time: datetime) -> int:
    """Return the microseconds since the epoch, exactly; ``time`` has a time zone."""
    if not isinstance(time, datetime) or time.tzinfo is None:
        raise ValueError(f"a time is a datetime with a time zone, not {time!r}")

    return (time - _EPOCH) // timedelta(microseconds=1)


def _micros(time: datetime) -> int:
    """Return the microseconds of a time in a dump, if every store keeps it exactly."""
    micros = to_micros(time)

    if not _EPOCH < time < _TOO_LATE:
        raise ValueError(f"a time is after 1970-01-01 and before 2255, not {time}")

    return micros


def _check_sequence(name: str, value: object) -> None:
    """Raise ``TypeError`` unless the value is a sequence other than text."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be a list or tuple, not {type(value).__name__}")


def _fault_of(call: StoredCall) -> str | None:
    """Return what is wrong with a stored call's columns, without its JSON and times."""
    ids = call.thread_id, call.call_id, call.tool_name, call.idempotency_key
    is_resolved = call.status != "issued"

    if not all(isinstance(one, str) for one in ids):
        return f"an id is not text: {ids!r:.200}"

    if call.status not in _STATUSES:
        return f"{call.status!r} is not a status"

    if type(call.attempt) is not int or call.erased not in (True, False):
        return f"attempt {call.attempt!r}, erased {call.erased!r}"

    if (call.resolved_at is not None) != is_resolved:
        return f"status {call.status!r} does not fit resolved_at {call.resolved_at!r}"

    if (call.result is not None) != (is_resolved and not call.erased):
        return "it has a result too many or too few"

    return None


def _check_calls(calls: Sequence[StoredCall]) -> None:
    """Raise ``ValueError`` for calls that no store could have on record together."""
    if len({call.call_id for call in calls}) < len(calls):
        raise ValueError("a call id stands twice in the dump")

    by_key: dict[str, list[StoredCall]] = {}

    for call in calls:
        by_key.setdefault(call.idempotency_key, []).append(call)

    for key, attempts in by_key.items():
        attempts.sort(key=lambda call: call.attempt)
        numbers = [call.attempt for call in attempts]

        if len({*numbers}) < len(numbers):
            raise ValueError(f"key {key!r} has an attempt number twice: {numbers}")

        if any(call.status != "failed" for call in attempts[:-1]):
            raise ValueError(f"key {key!r}: only its newest attempt can be not failed")


_PLAIN_JSON: Codec[Any] = Codec(Any)


def _parsed(text: bytes | str, thread_id: str, where: str) -> JsonValue:
    try:
        value: JsonValue = parse_json(text)
    except (ValueError, TypeError) as exc:
        raise CorruptThread(thread_id, where, f"not JSON: {exc}") from exc

    return value


def _emptied(rows: list[Any]) -> Iterator[Any]:
    rows.reverse()

    while rows:
        yield rows.pop()


def _text(stored: bytes | str) -> str:
    return stored if isinstance(stored, str) else stored.decode(errors="replace")


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the cyclic collector: it takes more than half of the time of a big load."""
    if not gc.isenabled():
        yield
        return

    gc.disable()

    try:
        yield
    finally:
        gc.enable()
