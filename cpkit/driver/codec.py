"""From values to stored bytes and back, the same for every backend.

A store keeps bytes of JSON and never looks into them. `Codec` checks and encodes whole
writes for it, and decodes what it fetched.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Generic, TypeVar

from pydantic_core import ValidationError, from_json

from cpkit.canonical import canonical_json
from cpkit.driver.ids import check_id
from cpkit.driver.jsontext import encode_json, parse_json, plain_key
from cpkit.driver.seal import SEALED, is_sealed
from cpkit.driver.store import MAX_APPEND, MAX_PAYLOAD, Decode, Limits
from cpkit.driver.typed import TypedMessages, in_one_line, is_misfit
from cpkit.driver.writes import Append, Claim, Merge, Resolve, StoredCall
from cpkit.errors import (
    CallMismatch,
    CorruptThread,
    PayloadTooLarge,
    SerializationError,
)
from cpkit.records import CallRecord, CallStatus, JsonValue, ToolCall

__all__ = [
    "Codec",
    "check_fence",
    "check_same_call",
    "check_sequence",
    "check_version",
    "decode_rows",
    "from_micros",
    "to_micros",
]

MessageT = TypeVar("MessageT")

# Decoding more messages or more bytes than this takes over two milliseconds.
_MANY_MESSAGES = 512
_MANY_BYTES = 512 * 1024

# Rows that are decoded in one step: few, so that a load does not hold all texts.
_AT_ONCE = 256

# A larger expected version counts as this one: no thread reaches it, and every store
# can compare it.
_MAX_VERSION = 2**53

# Bytes of JSON of a key of extra, without the quotes: as long as an id.
_MAX_KEY = 512

# How a sealed value begins, as a store may return it; no value of a handle does.
_SEALED: frozenset[bytes | str] = frozenset((SEALED, SEALED.decode()))
_BEGIN = len(SEALED)
_ENCRYPTED = (
    "it is encrypted: open the store with its keyring (keyring=, CPKIT_KEYRING)"
)
_TYPED = "open the store with message_type= for typed messages"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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

        if message_type is not dict:
            self._typed = TypedMessages(message_type, strict=strict_roundtrip)

    def lower_limits(self, limits: Limits) -> None:
        """Respect what the engine can hold."""
        self.max_payload = min(self.max_payload, limits.max_value)
        self.max_append = min(self.max_append, limits.max_append)

    def append(
        self,
        thread_id: str,
        messages: Sequence[MessageT],
        expected_version: int | None,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> Append:
        """Check and encode the arguments of ``append``."""
        thread_id = check_id("thread_id", thread_id)

        if type(messages) is not list:
            check_sequence("messages", messages)

        if expected_version is not None:
            expected_version = check_version(expected_version)

        encode = encode_json if self._typed is None else self._typed.encode
        bodies = []
        total = 0

        for i, message in enumerate(messages):
            given: Any = message

            if type(message) is not dict and self._typed is None:
                if not isinstance(message, Mapping):
                    fault = f"a message is a JSON object, not {type(message).__name__}"
                    raise SerializationError((i,), f"{fault} ({_TYPED})")

                given = dict(message)

            body = encode(given, (i,))

            if body[:1] == b"[":
                body = _unlike_sealed(body)

            size = len(body)

            if size > self.max_payload:
                raise PayloadTooLarge((i,), size, self.max_payload)

            bodies.append(body)
            total += size

        items, size = ([], 0) if extra is None else self.items(extra)
        total += size

        if total > self.max_append:
            raise PayloadTooLarge(("messages",), total, self.max_append, "max_append")

        return Append(thread_id, bodies, expected_version, items, total)

    def merge(self, thread_id: str, extra: Mapping[str, JsonValue]) -> Merge:
        """Check and encode the arguments of ``save_extra``."""
        thread_id = check_id("thread_id", thread_id)
        items, size = self.items(extra)

        if size > self.max_append:
            raise PayloadTooLarge(("extra",), size, self.max_append, "max_append")

        return Merge(thread_id, items, size)

    def claim(self, thread_id: str, call: ToolCall) -> Claim:
        """Check and encode the arguments of ``record_issued``."""
        thread_id = check_id("thread_id", thread_id)

        if type(call) is not ToolCall and not isinstance(call, ToolCall):
            raise TypeError(f"call must be a ToolCall, not {type(call).__name__}")

        call_id = check_id("call_id", call.call_id)
        tool_name = check_id("tool_name", call.tool_name)
        key = check_id("idempotency_key", call.idempotency_key)
        args = call.args

        if type(args) is not dict:
            if not isinstance(args, Mapping):
                raise SerializationError(
                    ("args",), f"args is a JSON object, not {type(args).__name__}"
                )

            args = dict(args)

        body = self.encode(args, ("args",))
        return Claim(thread_id, call_id, tool_name, body, key, len(body))

    def resolve(
        self, thread_id: str, call_id: str, result: JsonValue, success: bool
    ) -> Resolve:
        """Check and encode the arguments of ``record_result``."""
        thread_id = check_id("thread_id", thread_id)
        call_id = check_id("call_id", call_id)

        if type(success) is not bool:
            raise TypeError("success must be a bool")

        status: CallStatus = "completed" if success else "failed"
        body = self.encode(result, ("result",))
        return Resolve(thread_id, call_id, status, body, len(body))

    def messages(
        self, rows: Iterable[bytes | str], thread_id: str, first: int = 0
    ) -> list[Any]:
        """Decode stored messages, the first of which stands at position ``first``.

        ``rows`` are all ``bytes`` or all ``str``. Raises ``CorruptThread`` for text
        that is not JSON (or not a JSON object, for ``dict`` messages) and
        ``SerializationError`` for JSON that does not fit the message type.
        """
        typed = self._typed
        left = iter(rows)
        found: list[Any] = []
        # The cyclic collector would take more than half of the time of a big load.
        was_enabled = gc.isenabled()
        gc.disable()

        try:
            while some := list(islice(left, _AT_ONCE)):
                try:
                    if typed is not None:
                        begins = [text[:_BEGIN] for text in some]

                        if not _SEALED.isdisjoint(begins):
                            raise ValueError(_ENCRYPTED)

                    # pydantic_core's parser is called here: a function around it, or
                    # partial(), was measured to take 5 to 20 % longer.
                    found += (
                        [from_json(text, allow_inf_nan=False) for text in some]
                        if typed is None
                        else [typed.decode(text) for text in some]
                    )
                except (ValueError, TypeError):
                    place = first + len(found)
                    found += [
                        self._message(text, thread_id, i)
                        for i, text in enumerate(some, place)
                    ]
        finally:
            if was_enabled:
                gc.enable()

        if typed is None:
            for i, one in enumerate(found, first):
                if type(one) is not dict:
                    is_encrypted = type(one) is list and one[-1:] == ["cpkit:"]
                    fault = _ENCRYPTED if is_encrypted else "not a JSON object"
                    raise CorruptThread(thread_id, f"message {i}", fault)

        return found

    def _message(self, text: bytes | str, thread_id: str, position: int) -> Any:
        """Decode one message, also with surrogates; the error names it."""
        where = f"message {position}"

        try:
            if text[:_BEGIN] in _SEALED:
                raise CorruptThread(thread_id, where, _ENCRYPTED)

            return (self._typed.decode if self._typed else parse_json)(text)
        except (ValueError, TypeError) as exc:
            if isinstance(exc, ValidationError) and is_misfit(exc):
                fault = f"does not fit message_type: {in_one_line(exc)}"
                raise SerializationError((position,), fault, thread_id) from exc

            raise CorruptThread(thread_id, where, f"not JSON: {exc}") from exc

    def extra(
        self, items: Iterable[tuple[bytes | str, bytes | str]], thread_id: str
    ) -> dict[str, JsonValue]:
        """Decode stored extra, keys and values."""
        extra: dict[str, JsonValue] = {}

        for key, value in items:
            try:
                if value[:_BEGIN] in _SEALED:
                    where = f"extra key {key!r:.100}"
                    raise CorruptThread(thread_id, where, _ENCRYPTED)

                extra[parse_json(key)] = parse_json(value)
            except (ValueError, TypeError) as exc:
                where = f"extra key {key!r:.100}"
                raise CorruptThread(thread_id, where, f"not JSON: {exc}") from exc

        return extra

    def records(self, stored: Sequence[StoredCall]) -> list[CallRecord]:
        """Decode stored calls.

        Raises ``CorruptThread``, which has the other calls, if one is damaged.
        """
        found: list[CallRecord] = []
        damage: CorruptThread | None = None

        for one in stored:
            try:
                found.append(self.record(one))
            except CorruptThread as exc:
                damage = damage or exc

        if damage is not None:
            damage.calls = found
            raise damage

        return found

    def record(self, stored: StoredCall) -> CallRecord:
        """Decode a stored call; raise ``CorruptThread`` if it cannot be decoded."""
        call_id, result, resolved_at = stored.call_id, stored.result, stored.resolved_at

        try:
            for value in (stored.args, result):
                if value is not None and value[:_BEGIN] in _SEALED:
                    where = f"call {call_id!r}"
                    raise CorruptThread(stored.thread_id, where, _ENCRYPTED)

            args = parse_json(stored.args)
            return CallRecord(
                stored.thread_id,
                ToolCall(call_id, stored.tool_name, args, stored.idempotency_key),
                stored.status,
                stored.attempt,
                from_micros(stored.issued_at),
                None if result is None else parse_json(result),
                None if resolved_at is None else from_micros(resolved_at),
                bool(stored.erased),
            )
        except (ValueError, TypeError, KeyError, OverflowError) as exc:
            where = f"call {call_id!r}"
            raise CorruptThread(stored.thread_id, where, str(exc)) from exc

    def items(
        self, extra: Mapping[str, JsonValue]
    ) -> tuple[list[tuple[bytes, bytes]], int]:
        """Check and encode extra; return its items, and how many bytes they have."""
        if type(extra) is not dict and not isinstance(extra, Mapping):
            raise TypeError(f"extra must be a mapping, not {type(extra).__name__}")

        # Subclasses of str that hash differently can be two keys of the same text.
        items: dict[bytes, bytes] = {}
        total = 0

        for key, value in extra.items():
            name = plain_key(key, ())
            text = encode_json(name, (name,))

            if (size := len(text) - 2) > _MAX_KEY:
                fault = f"this key has {size} bytes of JSON; {_MAX_KEY} is the limit"
                raise SerializationError((name[:100],), fault)

            items[text] = body = self.encode(value, (name,))
            total += size + 2 + len(body)

        return list(items.items()), total

    def encode(self, value: object, path: tuple[str | int, ...]) -> bytes:
        """Return the JSON of a value, within ``max_payload``."""
        body = encode_json(value, path)

        if body[:1] == b"[":
            body = _unlike_sealed(body)

        if len(body) > self.max_payload:
            raise PayloadTooLarge(path, len(body), self.max_payload)

        return body


def _unlike_sealed(body: bytes) -> bytes:
    """Return the JSON of a list; with spaces around it if it looks like a sealed one.

    So no value that a user brings, such as a result, is taken for an encrypted one.
    """
    return b" %b " % body if is_sealed(body) else body


def check_version(version: int, name: str = "expected_version") -> int:
    """Return a version, or the position of a trim, as a store compares it."""
    if type(version) is not int:
        raise TypeError(f"{name} must be an int, not {type(version).__name__}")

    if version < 0:
        raise ValueError(f"{name} must not be negative")

    return min(version, _MAX_VERSION)


def check_fence(expected_version: int | None) -> int | None:
    """Return an ``expected_version`` as a store compares it; ``None`` fits any."""
    return None if expected_version is None else check_version(expected_version)


def check_same_call(found: CallRecord, claim: Claim) -> None:
    """Raise ``CallMismatch`` unless the record is of the call that was claimed.

    An erased record has lost its args and is compared by key and tool alone.
    """
    there, claimed = found.call, parse_json(claim.args)
    same = {
        "idempotency key": there.idempotency_key == claim.idempotency_key,
        "tool": there.tool_name == claim.tool_name,
        "args": found.erased or canonical_json(there.args) == canonical_json(claimed),
    }

    if differs := [name for name, is_same in same.items() if not is_same]:
        raise CallMismatch(found.thread_id, claim.call_id, differs)


async def decode_rows(decode: Decode, bodies: list[Any], first: int) -> list[Any]:
    """Decode messages that a store fetched: many of them in a worker thread.

    So a large load does not block the event loop, and a small one does not pay for a
    thread. The list is emptied, so that no message is held twice.
    """
    if len(bodies) > _MANY_MESSAGES or sum(map(len, bodies)) > _MANY_BYTES:
        bodies.reverse()
        rows = (bodies.pop() for _ in range(len(bodies)))
        return await asyncio.to_thread(decode, rows, first)

    return decode(bodies, first)


def from_micros(micros: int) -> datetime:
    """Return the UTC time of microseconds since the epoch, exactly."""
    return _EPOCH + timedelta(microseconds=micros)


def to_micros(time: datetime) -> int:
    """Return the microseconds since the epoch, exactly; ``time`` has a time zone."""
    if not isinstance(time, datetime) or time.tzinfo is None:
        raise ValueError(f"a time is a datetime with a time zone, not {time!r}")

    return (time - _EPOCH) // timedelta(microseconds=1)


def check_sequence(name: str, value: object) -> None:
    """Raise ``TypeError`` unless the value is a sequence other than text."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be a list or tuple, not {type(value).__name__}")
