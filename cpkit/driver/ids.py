"""The check of ids, and the arithmetic of ranges over ids and positions."""

from __future__ import annotations

from cpkit.errors import InvalidId

__all__ = ["check_id", "check_page", "prefix_end", "span"]

MAX_ID_BYTES = 512


def check_id(name: str, value: object) -> str:
    """Return the id as a plain ``str``, or raise ``InvalidId``.

    An id has 1 to 512 bytes of UTF-8 and no NUL, and is otherwise opaque.
    """
    # Most ids are short ASCII. A slice costs less than len().
    if type(value) is str and value and not value[MAX_ID_BYTES:] and value.isascii():
        if "\0" not in value:
            return value

    if not isinstance(value, str):
        raise InvalidId(name, f"must be a str, not {type(value).__name__}")

    if not value:
        raise InvalidId(name, "must not be empty")

    return _check_text(name, value)


def check_page(
    prefix: object, after: object, limit: object
) -> tuple[str, str | None, int]:
    """Check the arguments of ``list_threads``; a prefix may be empty."""
    if not isinstance(prefix, str):
        raise InvalidId("prefix", f"must be a str, not {type(prefix).__name__}")

    if type(limit) is not int:
        raise TypeError("limit must be an int")

    if limit < 1:
        raise ValueError("limit must be at least 1")

    # Larger than any store, and small enough for the API of every store.
    page = min(limit, 2**31 - 1)
    start = None if after is None else check_id("after", after)
    return _check_text("prefix", prefix), start, page


def prefix_end(prefix: str) -> str | None:
    """Return the smallest string greater than every string with the prefix, if any.

    The order is by code point, which is also the order of the UTF-8 bytes.
    """
    for cut in range(len(prefix) - 1, -1, -1):
        code = ord(prefix[cut])

        if code < 0x10FFFF:
            # Skip U+D800 to U+DFFF: surrogates, which no id can contain.
            following = 0xE000 if code == 0xD7FF else code + 1
            return prefix[:cut] + chr(following)

    return None


def span(start: object, stop: object, version: int, first: int = 0) -> tuple[int, int]:
    """Return the first position of a slice, and the position after its last.

    Messages below the position ``first`` were trimmed.
    """
    if type(start) is not int:
        raise TypeError("start must be an int")

    if stop is not None and type(stop) is not int:
        raise TypeError("stop must be an int or None")

    begin, end, _ = slice(start, stop).indices(version)
    begin = max(begin, first)
    return begin, max(begin, end)


def _check_text(name: str, value: str) -> str:
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidId(name, "has a lone surrogate, which UTF-8 cannot hold") from None

    if size > MAX_ID_BYTES:
        raise InvalidId(name, f"has {size} bytes of UTF-8; {MAX_ID_BYTES} is the limit")

    if "\0" in value:
        raise InvalidId(name, "must not contain NUL")

    return str.__str__(value)
