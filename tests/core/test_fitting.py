"""What replaces the parts of an entry that a store refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpkit import MemoryCheckpointer, PayloadTooLarge, SerializationError
from cpkit.driver.jsontext import encode_json
from cpkit.fitting import append_what_fits, fitting, same_but_missing, storable

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3000),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner)
    ),
    max_leaves=12,
)
any_values = st.recursive(
    st.none() | st.floats() | st.binary(max_size=3) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.integers() | st.text(max_size=4), inner, max_size=4)
        | st.tuples(inner)
    ),
    max_leaves=12,
)


def nested(levels: int) -> Any:
    value: Any = "end"

    for _ in range(levels):
        value = [value]

    return value


@given(any_values)
@settings(max_examples=25)
def test_any_value_becomes_json(value: Any) -> None:
    """What is JSON stays, and everything else is named."""
    missing: list[str] = []
    stored = storable({"value": value}, missing)
    encode_json([[stored]], ())

    try:
        encode_json(value, ())
    except SerializationError:
        assert missing
    else:
        assert missing == []


def test_only_the_bad_part_is_replaced() -> None:
    """Its neighbours and the form stay; an object without a JSON form is a text."""
    missing: list[str] = []
    value = {"id": 7, "n": float("nan"), "parts": [b"x", {"ok": True}], 3: "three"}
    assert storable(value, missing) == {
        "id": 7,
        "n": "[cpkit: not stored: nan is not a JSON number]",
        "parts": ["[cpkit: not stored: JSON has no bytes]", {"ok": True}],
        "3": "three",
    }
    assert len(missing) == 3
    deep = storable({"id": 7, "deep": nested(500)}, missing)
    assert deep["id"] == 7
    encode_json([[deep]], ())


@given(json_values, st.integers(600, 4000))
@settings(max_examples=25)
def test_a_value_is_made_to_fit(value: Any, limit: int) -> None:
    """It takes so many bytes at most; a value that fits is not touched."""
    entry = {"type": "user", "uuid": "u", "value": value}
    missing: list[str] = []
    stored = fitting(entry, limit, missing)
    assert len(encode_json(stored, ())) <= limit
    assert same_but_missing(stored, entry)
    assert (stored == entry) is (missing == [])
    assert stored["uuid"] == "u"


def test_the_largest_part_is_replaced() -> None:
    """The ids and the small parts of the entry stay."""
    missing: list[str] = []
    entry = {
        "uuid": "1",
        "message": {
            "role": "user",
            "content": [{"id": "2", "output": "x" * 9000}, "a"],
        },
    }
    stored = fitting(entry, 5000, missing)
    (text,) = missing
    assert stored == {
        "uuid": "1",
        "message": {
            "role": "user",
            "content": [{"id": "2", "output": f"[cpkit: not stored: {text}]"}, "a"],
        },
    }
    assert text == "9002 bytes are more than the store takes"
    many = fitting({"uuid": "1", "many": list(range(9000))}, 5000, missing)
    assert many["uuid"] == "1"
    assert str(many["many"]).startswith("[cpkit: not stored: ")


def test_a_stored_text_stands_for_what_is_missing_alone() -> None:
    """Other differences are differences, those of type too."""
    gone = "[cpkit: not stored: x]"
    assert same_but_missing([{"a": gone, "b": 1}], [{"a": [1, 2], "b": 1}])
    assert same_but_missing({"a": 1, "cpkit": gone}, {"a": 1, "b": 2})
    assert not same_but_missing({"a": gone, "b": 1}, {"a": 1, "b": True})
    assert not same_but_missing({"a": gone}, {"a": 1, "b": 1})
    assert not same_but_missing({"a": 2, "cpkit": gone}, {"a": 1})
    assert not same_but_missing([gone], [1, 2])
    assert not same_but_missing({"a": 1}, {"a": gone})


@given(st.lists(st.integers(0, 2500), max_size=12))
@example([1476])
@example([1477])
@settings(max_examples=20)
def test_no_entry_costs_another_one(sizes: list[int]) -> None:
    """Of any sizes: all are stored in order, those that fit as they are."""

    async def play() -> None:
        entries: list[Any] = [{"n": n, "x": "x" * k} for n, k in enumerate(sizes)]
        missing: list[str] = []

        async with MemoryCheckpointer[Any](max_payload=1500, max_append=4000) as cp:

            async def append(part: list[Any]) -> None:
                await cp.append("t", [{"entry": one} for one in part])

            await append_what_fits(append, entries, missing.extend)
            stored = [one["entry"] for one in await cp.read("t")]

        assert [one["n"] for one in stored] == list(range(len(sizes)))
        assert same_but_missing(stored, entries)

        for one, size in zip(stored, sizes, strict=True):
            assert one["x"] == "x" * size or size > 1000

        largest = max([len(encode_json({"entry": one}, ())) for one in entries] or [0])
        assert bool(missing) is (largest > 1500)

    asyncio.run(play())


async def test_what_cannot_be_replaced_is_an_error() -> None:
    """The store's own, and nothing is repeated for ever."""

    async def too_large(part: list[Any]) -> None:
        raise PayloadTooLarge(("extra", "a"), 10, 5)

    async def not_json(part: list[Any]) -> None:
        raise SerializationError(("extra", "a"), "no")

    missing: list[str] = []

    for append, error in ((too_large, PayloadTooLarge), (not_json, SerializationError)):
        with pytest.raises(error):
            await append_what_fits(append, [{"a": 1}], missing.extend)

    async with MemoryCheckpointer[Any](max_payload=100) as cp:

        async def append(part: list[Any]) -> None:
            await cp.append("t", part)

        with pytest.raises(PayloadTooLarge):
            await append_what_fits(append, [{"a": "x" * 200}], None)
