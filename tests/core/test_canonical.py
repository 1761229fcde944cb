"""The canonical text, compared with RFC 8785 and its reference package."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from cpkit.canonical import canonical_json
from cpkit.driver.jsontext import parse_json

text = st.text(st.characters(exclude_categories=["Cs"]))
# The RFC's domain: a double holds every integer up to this one exactly.
integers = st.integers(-(2**53) + 1, 2**53 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | integers | floats | text,
    lambda inner: st.lists(inner) | st.dictionaries(text, inner),
    max_leaves=20,
)

# RFC 8785, appendix B: the bits of a double, and its text.
NUMBERS = """
    0000000000000000 0
    8000000000000000 0
    0000000000000001 5e-324
    8000000000000001 -5e-324
    7fefffffffffffff 1.7976931348623157e+308
    ffefffffffffffff -1.7976931348623157e+308
    4340000000000000 9007199254740992
    c340000000000000 -9007199254740992
    4430000000000000 295147905179352830000
    44b52d02c7e14af5 9.999999999999997e+22
    44b52d02c7e14af6 1e+23
    44b52d02c7e14af7 1.0000000000000001e+23
    444b1ae4d6e2ef4e 999999999999999700000
    444b1ae4d6e2ef4f 999999999999999900000
    444b1ae4d6e2ef50 1e+21
    3eb0c6f7a0b5ed8c 9.999999999999997e-7
    3eb0c6f7a0b5ed8d 0.000001
    41b3de4355555553 333333333.3333332
    41b3de4355555554 333333333.33333325
    41b3de4355555555 333333333.3333333
    41b3de4355555556 333333333.3333334
    41b3de4355555557 333333333.33333343
    becbf647612f3696 -0.0000033333333333333333
    43143ff3c1cb0959 1424953923781206.2
"""


@given(values)
def test_it_agrees_with_the_reference_package(value: Any) -> None:
    """For every value that the RFC covers, the text is the same."""
    assert canonical_json(value) == rfc8785.dumps(value).decode()


@given(st.integers(min_value=0, max_value=2**64 - 1))
def test_every_double_agrees_with_the_reference_package(bits: int) -> None:
    """The text of any double is the shortest one, as in ECMAScript."""
    (number,) = struct.unpack(">d", bits.to_bytes(8, "big"))

    if math.isfinite(number):
        assert canonical_json(number) == rfc8785.dumps(number).decode()


@pytest.mark.parametrize(
    "vector",
    [line.split() for line in NUMBERS.strip().splitlines()],
    ids=lambda v: v[0],
)
def test_the_numbers_of_the_rfc(vector: list[str]) -> None:
    """The table of RFC 8785, appendix B."""
    bits, expected = vector
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_json(number) == expected


def test_the_example_of_the_rfc() -> None:
    """RFC 8785, section 3.2.2 and 3.2.3: literals, escapes and the order of names."""
    example = parse_json(
        r"""{
        "numbers": [333333333.33333329, 1E30, 4.50, 2e-3,
                    0.000000000000000000000000001],
        "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
        "literals": [null, true, false]
        }"""
    )
    assert canonical_json(example) == (
        '{"literals":[null,true,false],'
        '"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )


def test_names_are_sorted_by_utf16() -> None:
    """RFC 8785, section 3.2.3: an emoji, above U+FFFF, comes before U+FB33."""
    names = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\x80", "\xf6"]
    in_order = ["\r", "1", "\x80", "\xf6", "\u20ac", "\U0001f600", "\ufb33"]
    found = parse_json(canonical_json(dict.fromkeys(names, 1)))
    assert list(found) == in_order


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (0, -0.0, True),
        (1e20, 10**20, True),
        ({"a": 1, "b": [2]}, {"b": [2.0], "a": 1}, True),
        (True, 1, False),
        (False, 0, False),
        (None, 0, False),
        ("1", 1, False),
        ([1, 2], [2, 1], False),
        ("é", "e\u0301", False),
        ({"a": None}, {}, False),
        (2**53, 2**53 + 1, False),
    ],
)
def test_which_values_have_the_same_text(one: Any, other: Any, same: bool) -> None:
    """Equal numbers and objects do; values of different types do not."""
    assert (canonical_json(one) == canonical_json(other)) is same


@given(st.integers())
def test_an_integer_is_written_in_full(number: int) -> None:
    """The RFC would round it to a double; here no digit is lost."""
    assert canonical_json([number]) == f"[{number}]"


def test_the_longest_integer_is_written_in_full() -> None:
    """The longest integer that a JSON value may have is 4,300 digits long."""
    longest = 10**4300 - 1
    assert canonical_json(longest) == "9" * 4300
