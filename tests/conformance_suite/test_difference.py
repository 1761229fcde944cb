"""Messages show the part of two values that differs."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.difference import check_equal, difference, shown
from conformance.failure import Failure
from conformance.sample_dumps import made_dump
from conformance.sample_values import exactly
from tests.conformance_suite.test_explain import failed

LONG = "".join(f"{n}," for n in range(20_000))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        ("a", "b"),
        (None, 0),
        ([10**5000], [10**5000 + 1]),
    ],
)
def test_what_differs_is_told(seen: Any, expected: Any) -> None:
    """Types and the bits of a float count; equal values have no difference."""
    assert difference(seen, expected) is not None
    assert difference(seen, seen) is None


def test_the_place_of_a_difference_is_told() -> None:
    """A path to it, ten characters on each side, and the sizes; and no dots."""
    cut = LONG[:65_536]

    with pytest.raises(Failure) as caught:
        check_equal([{"text": cut}], [{"text": LONG}], "a load")

    failure = caught.value
    assert failure.seen == (
        f"[0]['text'] at character 65536: {cut[-10:]!r} of 65536 characters"
    )
    assert f"{LONG[65_526:65_546]!r} of {len(LONG)} characters" in failure.expected
    assert "..." not in f"{failure}"


def test_a_list_that_is_short_is_told() -> None:
    """The sizes, and the item that one side lacks."""
    found = difference(made_dump("t", messages=[{"n": 1}]), made_dump("t"))
    assert found == (".messages", "1 items", "2 items, [1] is {'n': 2}")


def test_a_long_value_says_how_long_it_is() -> None:
    """The beginning is shown, and not dots."""
    text = shown([LONG])
    assert text.startswith("['0,1,2,")
    assert text.endswith(f"(the first 400 of {len(LONG) + 4} characters, 1 in all)")


def test_an_assert_shows_where_long_sides_differ() -> None:
    """The two sides of a comparison without a call are looked at again."""

    async def check(case: Any) -> None:
        loaded = [{"n": n} for n in range(1000)]
        batch = [{"n": n} for n in range(1000)]
        loaded[700] = {"n": -1}
        assert [m["n"] for m in loaded] == [m["n"] for m in batch]

    first, *_ = failed(check).seen.splitlines()
    assert first == "[m['n'] for m in loaded][700]: -1, and not 700"


def test_a_copy_or_exactly_shows_where_it_differs() -> None:
    """What only copies its argument is evaluated again; so is `exactly`."""

    async def copied(case: Any) -> None:
        numbers = tuple({"n": n} for n in range(1000))
        expected = [{"n": n} for n in range(999)] + [{"n": -1}]
        assert list(numbers) == expected

    async def exact(case: Any) -> None:
        numbers = [{"n": n} for n in range(1000)]
        expected: list[Any] = [{"n": n} for n in range(999)] + [{"n": 999.0}]
        assert exactly(numbers, expected)

    assert failed(copied).seen.splitlines()[0] == (
        "list(numbers)[999]['n']: 999, and not -1"
    )
    assert failed(exact).seen.splitlines()[0] == (
        "numbers[999]['n']: 999, and not 999.0"
    )
