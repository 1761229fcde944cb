"""The check of ids, and the arithmetic of ranges."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkit import InvalidId
from cpkit.driver.ids import check_id, check_page, prefix_end, span

# Code points where an order may go wrong: the first and last of each UTF-8 length, of
# the surrogates, and of Unicode.
EDGES = "\x01aA\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010fffe\U0010ffff"
texts = st.text(
    st.sampled_from(EDGES) | st.characters(exclude_categories=["Cs"], min_codepoint=1),
    max_size=5,
)


class Name(str):
    __slots__ = ()


@given(texts, texts)
def test_a_prefix_is_a_range(prefix: str, text: str) -> None:
    """Exactly the strings with the prefix lie between the prefix and its end."""
    for candidate in (text, prefix + text, prefix[:-1] + text):
        end = prefix_end(prefix)
        inside = candidate >= prefix and (end is None or candidate < end)
        assert inside is candidate.startswith(prefix)


@given(texts, texts)
def test_ids_have_the_order_of_their_bytes(one: str, other: str) -> None:
    """Code points and UTF-8 bytes sort alike, so a store may compare bytes."""
    assert (one < other) is (one.encode() < other.encode())


@pytest.mark.parametrize(
    ("prefix", "end"),
    [
        ("", None),
        ("a", "b"),
        ("a\U0010ffff", "b"),
        ("\U0010ffff", None),
        ("a\ud7ff", "a\ue000"),
        ("\x7f", "\x80"),
    ],
)
def test_the_end_of_a_prefix(prefix: str, end: str | None) -> None:
    """The largest code point carries over, and surrogates are skipped."""
    assert prefix_end(prefix) == end


@given(
    st.integers(-20, 20) | st.just(10**30),
    st.none() | st.integers(-20, 20) | st.just(-(10**30)),
    st.integers(0, 15),
)
def test_a_span_is_a_slice(start: int, stop: int | None, version: int) -> None:
    """The positions are the same as for a Python slice."""
    first, last = span(start, stop, version)
    assert list(range(first, last)) == list(range(version))[start:stop]
    assert 0 <= first <= last <= version


@pytest.mark.parametrize(("start", "stop"), [(None, 1), ("0", 1), (0, 1.0), (True, 1)])
def test_the_bounds_of_a_span_are_ints(start: Any, stop: Any) -> None:
    """Any other type raises ``TypeError``."""
    with pytest.raises(TypeError):
        span(start, stop, 3)


@pytest.mark.parametrize("size", [1, 511, 512])
@pytest.mark.parametrize("letter", ["a", "é", "\U0001f600"])
def test_an_id_has_1_to_512_bytes(size: int, letter: str) -> None:
    """The limit counts bytes of UTF-8, not characters."""
    fitting = letter * (size // len(letter.encode())) or "a"
    assert check_id("thread_id", fitting) == fitting

    with pytest.raises(InvalidId, match="thread_id has 51[3-9] bytes"):
        check_id("thread_id", "a" * (513 - len(letter.encode())) + letter)


@pytest.mark.parametrize(
    "bad", ["", "\0", "a\0b", "\ud800", "a" * 513, None, 1, b"bytes", ["a"]]
)
def test_anything_else_is_refused(bad: Any) -> None:
    """The error names the parameter, and its message can be printed."""
    with pytest.raises(InvalidId) as raised:
        check_id("call_id", bad)

    assert raised.value.name == "call_id"
    assert str(raised.value).startswith("call_id ")
    str(raised.value).encode()


@pytest.mark.parametrize("odd", ["../x", "*", "%", "'", ":", "|", "{}", " ", "\n", "é"])
def test_an_id_is_opaque(odd: str) -> None:
    """An id is never trimmed, case-folded or escaped."""
    assert check_id("thread_id", odd) == odd


def test_an_id_is_returned_as_a_plain_string() -> None:
    """A subclass of ``str`` does not reach the store."""
    assert type(check_id("thread_id", Name("a"))) is str


def test_a_page_is_checked() -> None:
    """A prefix may be empty; a limit is at least 1, and a larger one is capped."""
    assert check_page("", None, 10**12) == ("", None, 2**31 - 1)

    for prefix, after, limit, error in [
        (1, None, 1, InvalidId),
        ("\0", None, 1, InvalidId),
        ("", "", 1, InvalidId),
        ("", None, 0, ValueError),
        ("", None, True, TypeError),
        ("", None, 1.0, TypeError),
    ]:
        with pytest.raises(error):
            check_page(prefix, after, limit)
