"""JSON values are stored without loss; anything else is refused with its path."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import PurePath
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpkit import SerializationError
from cpkit.driver.jsontext import MAX_DEPTH, encode_json, parse_json
from cpkit.foreign_json import encode_text, parse_foreign_json
from cpkit.records import JsonValue

text = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner) | st.dictionaries(text, inner),
    max_leaves=30,
)


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Plain(Enum):
    ONE = 1


class Text(str):
    __slots__ = ()


class Pair(NamedTuple):
    left: int
    right: int


class Claims:
    """Equal to everything, as some mocks are."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


def exact(value: Any) -> Any:
    """Return a value that compares types, float bits and key order as well."""
    if isinstance(value, float):
        return struct.pack("d", value)

    if isinstance(value, dict):
        return [(key, exact(inner)) for key, inner in value.items()]

    if isinstance(value, list):
        return ["list", *map(exact, value)]

    return type(value), value


def through(value: Any) -> Any:
    return parse_json(encode_json(value, ()))


def nested(levels: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1

    for _ in range(levels):
        value = wrap(value)

    return value


@given(values)
@example(-0.0)
@example(5e-324)
@example([1, 1.0, True])
@example("\0\x1f\x7f\u2028\ufffe\uffff\U0010ffff")
@example({"b": 1, "a": 2, "": {"\0": []}})
def test_json_comes_back_exactly(value: Any) -> None:
    """Types, the last bit of floats and the order of keys are kept."""
    assert exact(through(value)) == exact(value)


@given(st.integers(min_value=0, max_value=2**64 - 1))
def test_every_finite_float_comes_back_to_the_bit(bits: int) -> None:
    """All 64 bits are kept; a float that is not finite is refused."""
    (number,) = struct.unpack("d", struct.pack("Q", bits))

    if math.isfinite(number):
        assert exact(through([number])) == exact([number])
    else:
        with pytest.raises(SerializationError, match="not a JSON number"):
            encode_json([number], ())


@pytest.mark.parametrize("sign", [1, -1])
def test_integers_up_to_4300_digits_come_back(sign: int) -> None:
    """An integer as long as Python converts is kept, a longer one is refused."""
    longest = sign * (10**4300 - 1)
    assert through({"n": longest}) == {"n": longest}

    with pytest.raises(SerializationError, match="4300 digits") as raised:
        encode_json({"n": [sign * 10**4300]}, ("m",))

    assert raised.value.path == ("m", "n", 0)


@pytest.mark.parametrize(
    "wrap",
    [lambda v: [v], lambda v: {"k": v}, lambda v: (v,)],
    ids="list dict tuple".split(),
)
def test_nesting_of_200_comes_back_and_deeper_is_refused(
    wrap: Callable[[Any], Any],
) -> None:
    """The parser's limit is checked before the value is stored."""
    deepest = nested(MAX_DEPTH, wrap)
    assert encode_json(through(deepest), ()) == encode_json(deepest, ())

    for levels in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(SerializationError, match="nested deeper than 200"):
            encode_json(nested(levels, wrap), ())


def test_a_value_that_contains_itself_is_refused() -> None:
    """A cycle raises an error instead of looping."""
    cycle: list[Any] = []
    cycle.append(cycle)

    with pytest.raises(SerializationError, match="nested deeper"):
        encode_json(cycle, ())


@pytest.mark.parametrize(
    ("value", "base"),
    [
        (Colour.RED, "red"),
        (Text("abc"), "abc"),
        (Level.LOW, 1),
        (Pair(1, 2), [1, 2]),
        ((1, (2,)), [1, [2]]),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        ({Colour.RED: (1,)}, {"red": [1]}),
        ({Text("k"): Text("v")}, {"k": "v"}),
    ],
)
def test_subclasses_are_stored_as_their_base_value(value: Any, base: Any) -> None:
    """A value of a subclass is loaded as a value of the JSON type."""
    again = through([value])
    assert exact(again) == exact([base])


@pytest.mark.parametrize(
    "value",
    [
        b"bytes",
        bytearray(b"bytes"),
        memoryview(b"bytes"),
        {1},
        frozenset(),
        1j,
        Decimal(1),
        date(2024, 1, 1),
        UUID(int=1),
        PurePath("x"),
        Plain.ONE,
        deque([1]),
        UserDict(a=1),
        range(3),
        iter([1]),
        len,
        dict,
        object(),
        Claims(),
        ...,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_type_that_json_lacks_is_refused_with_its_path(value: object) -> None:
    """A value is never silently converted to another type."""
    with pytest.raises(SerializationError, match="JSON has no") as raised:
        encode_json({"a": [0, {"b": value}]}, (3,))

    assert raised.value.path == (3, "a", 1, "b")


@pytest.mark.parametrize("key", [1, True, None, 1.5, (1,), b"k", Level.LOW])
def test_a_key_that_is_not_a_string_is_refused(key: object) -> None:
    """``{1: …}`` is not stored as ``{"1": …}``."""
    with pytest.raises(SerializationError, match="keys are strings") as raised:
        encode_json([{key: 1}], ())

    assert raised.value.path[0] == 0
    assert len(raised.value.path) == 2


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(number: float) -> None:
    """JSON has neither NaN nor infinity, and null does not replace them."""
    with pytest.raises(SerializationError, match="not a JSON number") as raised:
        encode_json({"x": [number]}, ("m",))

    assert raised.value.path == ("m", "x", 0)


SURROGATES = [
    "\ud800",
    "a\udfff",
    "\udc80b\\",
    "\ude00\ud83d",
    "\ud83d\ude00",
    "\\ud83d",
]


@pytest.mark.parametrize("text", [*SURROGATES, "".join(SURROGATES), "é\ud800😀\0\n"])
def test_a_surrogate_comes_back_as_value_and_as_key(text: str) -> None:
    """Also a high one before a low one, which other parsers would join."""
    value: JsonValue = {"a": [text, {text: 1.5}], "\\": "\\\\ud800"}
    body = encode_json(value, ())
    assert parse_json(body) == value
    assert parse_json(body.decode()) == value


@given(st.text(st.characters()))
def test_any_text_comes_back(text: str) -> None:
    """Whatever a Python string can hold."""
    assert parse_json(encode_json([text], ())) == [text]


def test_only_json_with_surrogates_is_parsed() -> None:
    """The second parser is as strict as the first one."""
    for bad in ('["\\ud83d", NaN]', '["\\ud83d"', "{'\\ud83d': 1}"):
        with pytest.raises(ValueError, match="."):
            parse_json(bad)


@pytest.mark.parametrize(
    "stored", ["NaN", "[Infinity]", "-Infinity", "{'a':1}", "", "1 2"]
)
def test_only_json_is_parsed(stored: str) -> None:
    """The parser accepts strict JSON only."""
    with pytest.raises(ValueError, match="."):
        parse_json(stored)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"\ud83d\ude00"', "😀"),
        (r'"\uD83D\uDE00"', "😀"),
        (r'"cut \ud83d"', "cut \ud83d"),
        (r'["\ude00\ud83d", "\ud83d\ude00"]', ["\ude00\ud83d", "😀"]),
        (r'{"\udfff": "\\ud83d"}', {"\udfff": "\\ud83d"}),
    ],
)
def test_a_pair_of_another_program_is_one_character(text: str, value: Any) -> None:
    """As all readers of JSON take it; a lone surrogate is kept."""
    assert parse_foreign_json(text) == value
    assert parse_foreign_json(text.encode()) == value


@pytest.mark.parametrize(
    "text", ["", "{", '"\n"', "NaN", r'["\ud83d", NaN]', '"a" "b"', "[" * 100_000]
)
def test_another_program_writes_json_too(text: str) -> None:
    """Everything else is a ``ValueError``."""
    with pytest.raises(ValueError, match="."):
        parse_foreign_json(text)


def test_json_text_is_written_in_utf_8() -> None:
    """With escapes where UTF-8 has no form."""
    assert encode_text('{"é": "\ud83d\\ud83d"}') == '{"é": "\\ud83d\\ud83d"}'.encode()
