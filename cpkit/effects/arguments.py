"""A tool's arguments as JSON that is the same in every process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import BaseModel, RootModel
from pydantic_core import to_jsonable_python

from cpkit.canonical import canonical_json
from cpkit.records import JsonValue

__all__ = ["arguments_json"]


def arguments_json(valid: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Return validated arguments as pydantic writes them, but each set in one order.

    A set's own order is another one in each process (``PYTHONHASHSEED``), which would
    make another effect of the same call.
    """
    arguments: dict[str, JsonValue] = _sorted(valid, to_jsonable_python(valid))
    return arguments


def _sorted(value: object, written: Any) -> Any:
    """Return what was written of a value, with the members of its sets sorted."""
    if isinstance(value, RootModel):
        return _sorted(value.root, written)

    if isinstance(written, list) and isinstance(value, (list, tuple, set, frozenset)):
        members = [_sorted(*pair) for pair in zip(value, written, strict=True)]
        ordered = isinstance(value, (list, tuple))
        return members if ordered else sorted(members, key=canonical_json)

    if isinstance(written, dict):
        for name, inner in _members(value, written):
            written[name] = _sorted(inner, written[name])

    return written


def _members(value: object, written: dict[str, Any]) -> Iterable[tuple[str, object]]:
    """Return what stands under which name of an object that was written."""
    if isinstance(value, Mapping):
        return zip(list(written), value.values(), strict=False)

    if isinstance(value, BaseModel):
        named = [
            (field.serialization_alias or name, getattr(value, name))
            for name, field in type(value).model_fields.items()
        ]
    elif is_dataclass(value):
        named = [(field.name, getattr(value, field.name)) for field in fields(value)]
    else:
        named = []

    return [(name, inner) for name, inner in named if name in written]
