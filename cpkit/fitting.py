"""A text in the place of what a store cannot keep, so that all else is kept.

The agent SDKs hand over several entries at a time, and lose all of them if one is
refused. So adapters and imports replace only the part of an entry that cannot be
stored: a number that is not JSON, a value of another type, or the largest parts of an
entry above the store's limit. The entry keeps its form and its ids, and its neighbours
still refer to it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from cpkit.driver.jsontext import MAX_DEPTH, encode_json, parse_json, plain_key
from cpkit.errors import PayloadTooLarge, SerializationError
from cpkit.records import JsonValue

__all__ = [
    "append_what_fits",
    "fitting",
    "log_missing",
    "placeholder",
    "same_but_missing",
    "storable",
]

logger = logging.getLogger(__name__)

Append = Callable[[list[Any]], Awaitable[None]]
Report = Callable[[list[str]], None]

_BEGIN = "[cpkit: not stored: "

# Levels that are left for what the adapters store around an entry.
_DEEPEST = MAX_DEPTH - 10

# Smaller parts of an entry are not replaced, in bytes.
_SMALL = 1024

# Of the first keys of an entry that is replaced as a whole, the small ones are kept.
_FIRST_KEYS = 32

# Which parts of the limit are left, one after the other, for what the adapters store
# beside an entry.
_MARGINS = (256, 16, 4)


async def append_what_fits(
    append: Append,
    entries: list[Any],
    report: Report | None,
    margins: Sequence[int] = _MARGINS,
) -> None:
    """Append JSON objects; replace and report what the store refuses in them.

    More than ``max_append`` takes several appends. Without ``report`` nothing is
    replaced. Raises the store's error if the entries are not what it refuses.
    """
    try:
        await append(entries)
        return
    except (SerializationError, PayloadTooLarge) as exc:
        refusal = exc

    if getattr(refusal, "option", None) == "max_append" and len(entries) > 1:
        middle = len(entries) // 2
        await append_what_fits(append, entries[:middle], report, margins)
        await append_what_fits(append, entries[middle:], report, margins)
        return

    if report is None or not margins:
        raise refusal

    missing: list[str] = []

    if isinstance(refusal, SerializationError):
        entries = [storable(entry, missing) for entry in entries]
        margins = margins if missing else ()
    else:
        limit = refusal.limit - refusal.limit // margins[0]
        entries = [fitting(entry, limit, missing) for entry in entries]
        margins = margins[1:]

    report(missing)
    await append_what_fits(append, entries, report, margins)


def log_missing(thread_id: str, missing: Iterable[str]) -> None:
    """Warn of parts that are not stored."""
    for reason in missing:
        logger.warning("%s: a part of an entry is not stored: %s", thread_id, reason)


def placeholder(reason: str) -> str:
    """Return the text that stands for what is missing."""
    return f"{_BEGIN}{reason}]"


def same_but_missing(stored: Any, wanted: Any) -> bool:
    """Return whether a value is stored, maybe with texts for what is missing."""
    if isinstance(stored, str) and stored.startswith(_BEGIN):
        return True

    if isinstance(stored, dict) and isinstance(wanted, dict):
        is_replaced = str(stored.get("cpkit", "")).startswith(_BEGIN)
        keys = stored.keys() - {"cpkit"} if is_replaced else stored.keys()
        is_same = keys <= wanted.keys() if is_replaced else keys == wanted.keys()
        return is_same and all(same_but_missing(stored[k], wanted[k]) for k in keys)

    if isinstance(stored, list) and isinstance(wanted, list):
        pairs = zip(stored, wanted, strict=False)
        return len(stored) == len(wanted) and all(
            same_but_missing(one, other) for one, other in pairs
        )

    return type(stored) is type(wanted) and bool(stored == wanted)


def storable(value: Any, missing: list[str]) -> Any:
    """Return the value as JSON, and add to ``missing`` what is not JSON in it."""
    try:
        return parse_json(encode_json([[value]], ()))[0][0]
    except SerializationError:
        return _plain(value, 0, missing)


def fitting(value: Any, limit: int, missing: list[str]) -> Any:
    """Return the value with its largest parts replaced, if it takes more bytes.

    An object with many small parts keeps some of the first ones; a list becomes a text.
    """
    size = _size(value)

    if size <= limit:
        return value

    if isinstance(value, dict | list):
        result: Any = value.copy()
        keys: Iterable[Any] = value if type(value) is dict else range(len(value))
        sizes = sorted(
            (_size(value[key]), place, key) for place, key in enumerate(keys)
        )

        while size > limit and sizes and sizes[-1][0] > _SMALL:
            before, _, key = sizes.pop()
            rest = max(limit - (size - before), _SMALL // 2)
            result[key] = fitting(value[key], rest, missing)
            size += _size(result[key]) - before

        if size <= limit:
            return result

    reason = f"{_size(value)} bytes are more than the store takes"
    missing.append(reason)

    if type(value) is not dict:
        return placeholder(reason)

    small: dict[str, Any] = {}
    left = limit // 2

    for key in islice(value, _FIRST_KEYS):
        if (size := _size([key, value[key]])) <= min(left, _SMALL):
            small[key] = value[key]
            left -= size

    return {**small, "cpkit": placeholder(reason)}


def _plain(value: Any, depth: int, missing: list[str]) -> JsonValue:
    """Copy a value into JSON types, with a text for what is not JSON."""
    try:
        if depth == _DEEPEST:
            raise SerializationError((), f"nested deeper than {_DEEPEST} levels")

        if isinstance(value, dict):
            return {
                _key(key, missing): _plain(inner, depth + 1, missing)
                for key, inner in value.items()
            }

        if isinstance(value, list | tuple):
            return [_plain(inner, depth + 1, missing) for inner in value]

        plain: JsonValue = parse_json(encode_json(value, ()))
        return plain
    except SerializationError as exc:
        missing.append(exc.reason)
        return placeholder(exc.reason)


def _key(key: object, missing: list[str]) -> str:
    try:
        return plain_key(key, ())
    except SerializationError as exc:
        missing.append(exc.reason)
        return str(key)


def _size(value: Any) -> int:
    return len(encode_json(value, ()))
