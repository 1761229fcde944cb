"""Where two values differ: the place, a few characters around it, and the sizes."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from conformance.failure import Failure

__all__ = ["check_equal", "difference", "shown"]

WHOLE = 400
"""Characters up to which a value is shown whole."""

AROUND = 10
"""Characters that are shown on each side of a difference."""


def shown(value: object) -> str:
    """Return the repr of a value; of a long one its beginning, and how long it is."""
    text = _repr(value)

    if len(text) <= WHOLE:
        return text

    size = f", {len(value)} in all" if isinstance(value, (list, tuple, dict)) else ""
    return f"{text[:WHOLE]} (the first {WHOLE} of {len(text)} characters{size})"


def check_equal(seen: object, expected: object, where: str) -> None:
    """Raise `Failure` with the part that differs; types and float bits count too."""
    found = difference(seen, expected)

    if found is not None:
        place, one, other = found
        raise Failure(f"{place}: {other}", f"{place}: {one}", where)


def difference(
    seen: Any, expected: Any, place: str = ""
) -> tuple[str, str, str] | None:
    """Return the first place where two values differ, and both sides of it.

    ``None`` where they are equal. The place is a path such as ``[3].result['text']``.
    The order of the keys of an object does not count.
    """
    if seen is expected:
        return None

    if isinstance(seen, str) and isinstance(expected, str):
        return _of_texts(seen, expected, place or "the text")

    if isinstance(seen, dict) and isinstance(expected, dict):
        if seen.keys() != expected.keys():
            return _of_keys(seen, expected, place or "the value")

        pairs = [(f"[{_short(key)}]", seen[key], expected[key]) for key in seen]
    elif isinstance(seen, (list, tuple)) and isinstance(expected, (list, tuple)):
        pairs = [
            (f"[{n}]", one, other)
            for n, (one, other) in enumerate(zip(seen, expected, strict=False))
        ]
    elif is_dataclass(seen) and type(seen) is type(expected):
        names = [field.name for field in fields(seen)]
        pairs = [(f".{n}", getattr(seen, n), getattr(expected, n)) for n in names]
    elif _is_same(seen, expected):
        return None
    else:
        return place or "the value", shown(seen), shown(expected)

    for step, one, other in pairs:
        found = difference(one, other, place + step)

        if found is not None:
            return found

    if len(seen) != len(expected) if isinstance(seen, (list, tuple)) else False:
        return _of_lengths(seen, expected, place or "the list")

    return None


def _is_same(seen: Any, expected: Any) -> bool:
    """Compare what has no parts; a number by its type, and a float by its bits."""
    if isinstance(seen, float) or isinstance(expected, float):
        return type(seen) is type(expected) and repr(seen) == repr(expected)

    if isinstance(seen, int) and isinstance(expected, int):
        return type(seen) is type(expected) and seen == expected

    return bool(seen == expected)


def _of_keys(
    seen: dict[Any, Any], expected: dict[Any, Any], place: str
) -> tuple[str, str, str]:
    more = [key for key in seen if key not in expected]
    less = [key for key in expected if key not in seen]
    sizes = [f"{len(one)} keys" for one in (seen, expected)]
    return (
        place,
        f"{sizes[0]}, with {_some(more)}" if more else f"{sizes[0]}, no {_some(less)}",
        f"{sizes[1]}, with {_some(less)}" if less else f"{sizes[1]}, no {_some(more)}",
    )


def _of_lengths(seen: Any, expected: Any, place: str) -> tuple[str, str, str]:
    same = min(len(seen), len(expected))
    sides = [
        f"{len(one)} items"
        + (f", [{same}] is {shown(one[same])}" if len(one) > same else "")
        for one in (seen, expected)
    ]
    return place, sides[0], sides[1]


def _of_texts(seen: str, expected: str, place: str) -> tuple[str, str, str] | None:
    if seen == expected:
        return None

    if max(len(seen), len(expected)) <= WHOLE:
        return place, repr(seen), repr(expected)

    at = next(
        (n for n, (a, b) in enumerate(zip(seen, expected, strict=False)) if a != b),
        min(len(seen), len(expected)),
    )
    part = slice(max(0, at - AROUND), at + AROUND)
    return (
        f"{place} at character {at}",
        f"{seen[part]!r} of {len(seen)} characters",
        f"{expected[part]!r} of {len(expected)} characters",
    )


def _some(keys: list[Any]) -> str:
    named = ", ".join(map(_short, keys[:5]))
    return named if len(keys) <= 5 else f"{named} and {len(keys) - 5} others"


def _short(key: object) -> str:
    text = _repr(key)
    return text if len(text) <= 60 else f"{text[:50]} ({len(text)} characters)"


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as exc:  # of a store's own class, or an integer of 5,000 digits
        return f"<{type(value).__name__} without a repr: {type(exc).__name__}>"
