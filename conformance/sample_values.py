"""Values that have broken stores, by name, and an exact comparison."""

from __future__ import annotations

import enum
import struct
from collections import OrderedDict
from typing import Any

__all__ = [
    "JSON_VALUES",
    "NOT_JSON",
    "SUBCLASSES",
    "SURROGATES",
    "exactly",
    "nested",
]


def nested(levels: int) -> Any:
    """Return nested empty arrays, ``levels`` deep."""
    value: Any = []

    for _ in range(levels - 1):
        value = [value]

    return value


TEXTS = {
    "empty": "",
    "NUL": "a\0b",
    "only NUL": "\0",
    "an escaped NUL": "\\u0000",
    "control characters": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "quotes and backslashes": '"\'`\\\\"\\n\\',
    "line separators": "a\r\nb\u2028c\u2029d\x85e",
    "emoji": "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "an escaped emoji": "\\ud83d\\ude00",
    "a composed letter": "é",
    "a decomposed letter": "e\u0301",
    "compatibility forms": "\ufb01\u2126\u212b\uac00\u1100\u1161",
    "right to left": "\u202eשלום\u202c العربية",
    "a byte order mark": "\ufeffa\ufeff",
    "noncharacters": "\ufffe\uffff\U0001ffff\U0010ffff",
    "the neighbours of surrogates": "\ud7ff\ue000",
    "spaces": "  \t a \u00a0\u3000 ",
    "markup": "<script>&amp;]]>--%s{0}$1;DROP TABLE",
    "a number": "1e5",
    "a word of JSON": "null",
    "an object": '{"a": [1]}',
    "long": "x\u20ac" * 20_000,
}

INTEGERS = {
    "zero": 0,
    "minus one": -1,
    "2**53 + 1": 2**53 + 1,
    "2**63 - 1": 2**63 - 1,
    "2**63": 2**63,
    "-(2**63) - 1": -(2**63) - 1,
    "2**64": 2**64,
    "10**30 + 1": 10**30 + 1,
    "4,300 digits": 10**4300 - 1,
    "minus 4,300 digits": -(10**4300) + 1,
}

FLOATS = {
    "0.0": 0.0,
    "-0.0": -0.0,
    "1.0": 1.0,
    "0.1": 0.1,
    "0.1 + 0.2": 0.1 + 0.2,
    "1 / 3": 1 / 3,
    "1e16": 1e16,
    "1e22": 1e22,
    "1e23": 1e23,
    "123456789012345680.0": 123456789012345680.0,
    "2.0**53": 2.0**53,
    "the smallest": 5e-324,
    "the smallest normal": 2.2250738585072014e-308,
    "below the smallest normal": 2.225073858507201e-308,
    "the largest": 1.7976931348623157e308,
    "-1e-7": -1e-7,
}

JSON_VALUES: dict[str, Any] = {
    **TEXTS,
    **{f"the integer {name}": value for name, value in INTEGERS.items()},
    **{f"the float {name}": value for name, value in FLOATS.items()},
    "null": None,
    "true": True,
    "false": False,
    "look-alikes": [1, 1.0, True, "1", 0, 0.0, False, "", None],
    "empty containers": [[], {}, [[]], [{}], {"": {}}],
    "key order": {"z": 1, "a": 2, "m": {"b": 1, "a": 2}, "10": 3, "9": 4},
    "keys of all kinds": {text: name for name, text in TEXTS.items()},
    "an array of many": list(range(2000)),
    "an object of many": {f"k{n}": n for n in range(2000, 0, -1)},
}
"""JSON values; each must come back unchanged, compared by `exactly`."""

_CYCLE: list[Any] = []
_CYCLE.append(_CYCLE)

SURROGATES = {
    "a high surrogate": "a\ud83db",
    "a low surrogate": "\ude00",
    "a pair of two code points": "\ud83d\ude00",
    "a swapped pair": "\ude00\ud83d",
    "beside an emoji": "\U0001f600\ud83d\U0001f600",
    "beside its escape": "\\ud83d\ud83d\\\ud83d",
    "beside quotes and NUL": "\"\ud800\0\n'\udfff\\",
    "every surrogate": "".join(map(chr, range(0xD800, 0xE000))),
}
"""Texts that UTF-8 cannot hold; JSON can, and each must come back unchanged."""

NOT_JSON: dict[str, tuple[Any, tuple[str | int, ...]]] = {
    "NaN": (float("nan"), ()),
    "infinity": ({"a": [0, float("inf")]}, ("a", 1)),
    "minus infinity": ([float("-inf")], (0,)),
    "bytes": ({"a": b"x"}, ("a",)),
    "a bytearray": (bytearray(b"x"), ()),
    "a set": ([1, [{1}]], (1, 0)),
    "a frozenset": (frozenset({1}), ()),
    "a complex number": (1j, ()),
    "an object": ({"a": object()}, ("a",)),
    "a class": (dict, ()),
    "a function": ([len], (0,)),
    "a generator": ((n for n in range(2)), ()),
    "a range": (range(2), ()),
    "an integer key": ({"a": {1: 2}}, ("a", 1)),
    "a boolean key": ({True: 1}, (True,)),
    "a None key": ([{None: 1}], (0, "None")),
    "a tuple key": ({("a",): 1}, ("('a',)",)),
    "a bytes key": ({b"a": 1}, ("b'a'",)),
    "a cycle": (_CYCLE, ()),
}
"""Non-JSON values, with the path to the wrong part; ``()`` is the value itself."""


class _Str(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "not the base value"


class _Int(int):
    def __repr__(self) -> str:
        return "not the base value"


class _Float(float):
    def __repr__(self) -> str:
        return "not the base value"


class _Colour(enum.StrEnum):
    RED = "red"


class _Level(enum.IntEnum):
    HIGH = 3


class _List(list[Any]):
    pass


class _Dict(dict[str, Any]):
    pass


SUBCLASSES: dict[str, tuple[Any, Any]] = {
    "str": (_Str("a"), "a"),
    "int": (_Int(5), 5),
    "float": (_Float(1.5), 1.5),
    "StrEnum": (_Colour.RED, "red"),
    "IntEnum": (_Level.HIGH, 3),
    "list": (_List([_Int(1)]), [1]),
    "dict": (_Dict({_Str("a"): _Dict()}), {"a": {}}),
    "OrderedDict": (OrderedDict([("b", 1), ("a", 2)]), {"b": 1, "a": 2}),
}
"""Subclasses of JSON types, with the base value that must be stored."""


def exactly(seen: object, expected: object) -> bool:
    """Return whether two values are equal in type, float bits and key order too."""
    if type(seen) is not type(expected):
        return False

    if isinstance(seen, float) and isinstance(expected, float):
        return struct.pack("d", seen) == struct.pack("d", expected)

    if isinstance(seen, dict) and isinstance(expected, dict):
        return list(seen) == list(expected) and all(
            exactly(seen[key], expected[key]) for key in seen
        )

    if isinstance(seen, list) and isinstance(expected, list):
        return len(seen) == len(expected) and all(map(exactly, seen, expected))

    return seen == expected
