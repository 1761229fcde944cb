"""One canonical text for each JSON value, to compare calls and to derive keys.

RFC 8785 (JSON Canonicalization Scheme) with one difference: an integer of any size is
written in full. The RFC allows only integers that a double can hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from json.encoder import encode_basestring

from cpkit.records import JsonValue

__all__ = ["canonical_json"]


def canonical_json(value: JsonValue | Mapping[str, JsonValue]) -> str:
    """Return the canonical text of a JSON value.

    Values that differ only in key order have the same text, and so have ``1`` and
    ``1.0``; ``true`` has another. The value must be valid JSON: finite floats, string
    keys. A surrogate stays as it is in the text.
    """
    if value is None:
        return "null"

    if value is True:
        return "true"

    if value is False:
        return "false"

    if isinstance(value, str):
        text: str = encode_basestring(value)
        return text

    if isinstance(value, int):
        return int.__repr__(value)

    if isinstance(value, float):
        return _number(value)

    if isinstance(value, Mapping):
        # RFC 8785, 3.2.3: names are sorted as arrays of UTF-16 code units.
        # Two names can have the same units, if one has surrogates.
        names = sorted(
            value, key=lambda name: (name.encode("utf-16-be", "surrogatepass"), name)
        )
        members = (f"{encode_basestring(n)}:{canonical_json(value[n])}" for n in names)
        return "{" + ",".join(members) + "}"

    return "[" + ",".join(map(canonical_json, value)) + "]"


def _number(value: float) -> str:
    """Write a double as ECMAScript does (ECMA-262, Number::toString)."""
    if value == 0:
        return "0"

    sign = "-" if value < 0 else ""
    mantissa, _, exponent = float.__repr__(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    # value == 0.digits * 10 ** point
    point = len(whole) + int(exponent or 0)
    point -= len(whole + fraction) - len(digits)
    digits = digits.rstrip("0")

    if len(digits) <= point <= 21:
        return sign + digits.ljust(point, "0")

    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"

    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"

    tail = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{tail}e{point - 1:+d}"
