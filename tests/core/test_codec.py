"""The codec: it checks and copies writes, and decodes rows or names a damaged one."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkit import (
    CorruptThread,
    JsonValue,
    PayloadTooLarge,
    SerializationError,
    ThreadDump,
    ToolCall,
)
from cpkit.driver.codec import Codec, to_micros
from cpkit.driver.dumps import encode_dump
from cpkit.driver.writes import StoredCall

codec: Codec[Any] = Codec()

AS_STORED: list[Callable[[bytes], bytes | str]] = [bytes, bytes.decode]
stored_as = pytest.mark.parametrize("stored", AS_STORED, ids=["bytes", "str"])


def rows_of(
    stored: Callable[[bytes], bytes | str], count: int, **damage: bytes
) -> list[bytes | str]:
    """Return stored messages, some of them damaged: ``at_7=b"…"``."""
    rows = [b'{"i":%d}' % i for i in range(count)]

    for place, row in damage.items():
        rows[int(place.removeprefix("at_"))] = row

    return [stored(row) for row in rows]


# Writing


def test_a_value_changed_after_the_call_is_stored_unchanged() -> None:
    """The codec encodes messages, and the args of a claim."""
    inner: list[JsonValue] = [1]
    call = ToolCall("c", "tool", {"a": inner}, "k")
    claim = codec.claim("t", call)
    append = codec.append("t", [{"a": inner}], None)
    inner.append(2)

    assert json.loads(claim.args) == {"a": [1]}
    assert json.loads(append.bodies[0]) == {"a": [1]}


@pytest.mark.parametrize(
    "messages", [{"role": "user"}, "text", b"bytes", iter([]), {1}, None]
)
def test_messages_are_a_list_or_a_tuple(messages: Any) -> None:
    """A retry would find a generator empty."""
    with pytest.raises(TypeError, match="list or tuple"):
        codec.append("t", messages, None)


@pytest.mark.parametrize(
    ("version", "error"), [(-1, ValueError), (True, TypeError), ("1", TypeError)]
)
def test_an_expected_version_is_an_int_of_at_least_0(
    version: Any, error: type[Exception]
) -> None:
    """Anything else raises ``ValueError`` or ``TypeError``."""
    with pytest.raises(error, match="expected_version"):
        codec.append("t", [], version)


@pytest.mark.parametrize(
    "version", [2**53, 2**63, pytest.param(10**5000, id="of 5,001 digits")]
)
def test_an_expected_version_is_capped(version: int) -> None:
    """No thread reaches the cap, which every store can compare and print."""
    assert codec.append("t", [], version).expected_version == 2**53
    assert codec.append("t", [], 2**53 - 1).expected_version == 2**53 - 1


@pytest.mark.parametrize("message", [[], "text", 1, None])
def test_a_message_is_an_object(message: Any) -> None:
    """Without ``message_type`` a message is a dict, and the error names its index."""
    with pytest.raises(SerializationError, match="message_type=") as raised:
        codec.append("t", [{}, message], None)

    assert raised.value.path == (1,)


def test_a_path_starts_at_the_argument() -> None:
    """With a message's index, an extra key, ``args`` or ``result``."""
    bad: Any = {"x": [{1}]}
    paths = []

    for write in (
        lambda: codec.append("t", [{}, bad], None),
        lambda: codec.merge("t", {"ok": 1, "plan": bad}),
        lambda: codec.claim("t", ToolCall("c", "tool", bad, "k")),
        lambda: codec.resolve("t", "c", bad, True),
    ):
        with pytest.raises(SerializationError) as raised:
            write()

        paths.append(raised.value.path)

    assert paths == [
        (1, "x", 0),
        ("plan", "x", 0),
        ("args", "x", 0),
        ("result", "x", 0),
    ]


@pytest.mark.parametrize("text", ["x" * 8, "é" * 4, "\n" * 4])
def test_a_payload_is_measured_as_stored_bytes(text: str) -> None:
    """``max_payload`` is inclusive, and counts UTF-8 bytes, JSON escapes included."""
    Codec[Any](max_payload=10).resolve("t", "c", text, True)

    with pytest.raises(PayloadTooLarge) as raised:
        Codec[Any](max_payload=9).resolve("t", "c", text, True)

    assert (raised.value.size, raised.value.limit) == (10, 9)


@pytest.mark.parametrize("longest", ["k" * 512, "é" * 256, "\0" * 85])
def test_a_key_of_extra_is_as_short_as_an_id(longest: str) -> None:
    """It has at most 512 bytes of JSON, without the quotes."""
    assert codec.merge("t", {longest: 1}).items[0][1] == b"1"

    with pytest.raises(SerializationError, match="512 is the limit") as raised:
        codec.merge("t", {longest + "kkk": 1})

    assert raised.value.path == ((longest + "kkk")[:100],)


@pytest.mark.parametrize("args", [[1], "text", None, 1])
def test_args_are_an_object(args: Any) -> None:
    """Lists, texts and numbers are refused."""
    with pytest.raises(SerializationError, match="args is a JSON object"):
        codec.claim("t", ToolCall("c", "tool", args, "k"))


def test_a_restored_time_is_before_2255() -> None:
    """Changes of the thread have later times, which every store counts exactly."""
    late = datetime(2255, 1, 1, tzinfo=UTC)
    latest = late - timedelta(microseconds=1)
    first = datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
    write = encode_dump(codec, ThreadDump("t", [{}], {}, [], first, latest))
    assert (write.created_at, write.updated_at) == (1, to_micros(latest))

    with pytest.raises(ValueError, match="before 2255"):
        encode_dump(codec, ThreadDump("t", [{}], {}, [], first, late))


# Decoding


@stored_as
@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 1025])
def test_any_number_of_rows_is_decoded(
    stored: Callable[[bytes], bytes | str], count: int
) -> None:
    """Rows are parsed in chunks; the chunk size does not show."""
    messages = codec.messages(rows_of(stored, count), "t")
    assert messages == [{"i": i} for i in range(count)]


@stored_as
@pytest.mark.parametrize("position", [0, 511, 512, 700, 1299])
@pytest.mark.parametrize(
    "row",
    [
        b"{",
        b"",
        b" ",
        b"{},{}",
        b'{"i":1',
        b"nul",
        b"[]",
        b"1",
        b"NaN",
        b'{"i":NaN}',
        b"}",
    ],
)
def test_a_damaged_row_is_named_exactly(
    stored: Callable[[bytes], bytes | str], position: int, row: bytes
) -> None:
    """The error has the position of the one bad row, anywhere in a chunk."""
    rows = rows_of(stored, 1300, **{f"at_{position}": row})

    with pytest.raises(CorruptThread) as raised:
        codec.messages(rows, "t", first=40)

    assert raised.value.thread_id == "t"
    assert raised.value.where == f"message {position + 40}"


@pytest.mark.parametrize(
    "damage",
    [
        {"at_3": b"{},{}", "at_4": b""},
        {"at_3": b"", "at_4": b"{},{}"},
        {"at_3": b"{},{},{}", "at_4": b"", "at_5": b""},
        {"at_3": b'{"a":[{}', "at_4": b"{}]}"},
        {"at_3": b'{"a":1', "at_4": b'"b":2}'},
    ],
)
def test_rows_that_are_json_only_when_joined_are_damaged(
    damage: dict[str, bytes],
) -> None:
    """A row with two values, or with half of one, is found out."""
    with pytest.raises(CorruptThread) as raised:
        codec.messages(rows_of(bytes, 10, **damage), "t")

    assert raised.value.where == "message 3"


def test_bytes_that_are_not_utf8_are_damage() -> None:
    """``CorruptThread`` is raised, not ``UnicodeDecodeError``."""
    with pytest.raises(CorruptThread) as raised:
        codec.messages(rows_of(bytes, 9, at_5=b'{"i":"\xff"}'), "t")

    assert raised.value.where == "message 5"


@stored_as
def test_rows_nested_to_the_limit_are_decoded(
    stored: Callable[[bytes], bytes | str],
) -> None:
    """Nothing around the rows uses up one of their levels."""
    deep = b'{"k":' + b"[" * 199 + b"]" * 199 + b"}"
    messages = codec.messages(rows_of(stored, 600, at_300=deep), "t")

    assert len(messages) == 600
    assert messages[300].keys() == {"k"}
    assert messages[301] == {"i": 301}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("row", [b"{}", b"{"])
def test_the_garbage_collector_is_restored(enabled: bool, row: bytes) -> None:
    """Decoding pauses the collector, and restores its state after an error too."""
    before = gc.isenabled()

    try:
        (gc.enable if enabled else gc.disable)()
        paused = []

        def rows() -> Any:
            paused.append(not gc.isenabled())
            yield row

        try:
            codec.messages(rows(), "t")
        except CorruptThread:
            paused.append(True)

        assert all(paused)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


@given(st.dictionaries(st.text(st.characters(), max_size=80), st.text(st.characters())))
def test_extra_is_decoded(extra: dict[str, JsonValue]) -> None:
    """Each key and each value is stored as a separate JSON text."""
    assert codec.extra(codec.merge("t", extra).items, "t") == extra


@pytest.mark.parametrize(
    ("key", "value"), [(b'"k"', b"{"), (b"k", b"1"), (b'"k"', b"\xff")]
)
def test_damaged_extra_is_named(key: bytes, value: bytes) -> None:
    """The error names the thread and the key as it is stored."""
    with pytest.raises(CorruptThread) as raised:
        codec.extra([(b'"fine"', b"1"), (key, value)], "t")

    assert raised.value.thread_id == "t"
    assert raised.value.where == f"extra key {key!r}"


@pytest.mark.parametrize(
    "damage",
    [
        {"args": b"{"},
        {"result": b"\xff"},
        {"issued_at": "noon"},
        {"resolved_at": 10**30},
    ],
    ids=str,
)
def test_a_call_that_cannot_be_decoded_is_named(damage: dict[str, Any]) -> None:
    """The error names the thread and the call."""
    fine = StoredCall(
        "t", "c", "tool", b"{}", "k", "completed", 1, 0, b"null", 1, False
    )
    codec.record(fine)

    with pytest.raises(CorruptThread) as raised:
        codec.record(fine._replace(**damage))

    assert (raised.value.thread_id, raised.value.where) == ("t", "call 'c'")


def test_a_list_with_a_call_that_cannot_be_decoded_raises() -> None:
    """It names the first such call."""
    fine = StoredCall(
        "t", "c", "tool", b"{}", "k", "completed", 1, 0, b"null", 1, False
    )

    with pytest.raises(CorruptThread, match="call 'd'"):
        codec.records([fine, fine._replace(call_id="d", args=b"{")])


class Text(str):
    """Equal to no other text."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def test_of_two_extra_keys_of_the_same_text_the_last_counts() -> None:
    """A store gets each key once."""
    write = codec.merge("t", {Text("a"): 1, Text("b"): 2, Text("a"): 3})
    assert write.items == [(b'"a"', b"3"), (b'"b"', b"2")]
