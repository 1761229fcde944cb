"""Messages of the caller's own types, to JSON objects and back."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Discriminator, Tag

from cpkit.driver.codec import Codec
from cpkit.driver.jsontext import encode_json, parse_json
from cpkit.errors import SerializationError
from cpkit.sessions.context import copied
from cpkit.sessions.entries import Entry, Message

__all__ = ["TypedMessages", "message_union"]

_USUAL_FIELDS = ("role", "kind", "type")


def message_union(*types: type, by: str | None = None) -> Any:
    """Return a ``message_type`` for several classes that differ in one field.

    The classes are dataclasses or pydantic models. The field is ``by``, or else the
    first of ``role``, ``kind`` and ``type`` that all classes have. A ``Literal`` type
    or a default fixes its values, and no two classes share a value::

        @dataclass
        class User:
            text: str
            kind: str = "user"

        open_checkpointer(url, message_type=message_union(User, Assistant))

    Raises ``TypeError`` if no field is different in all classes.
    """
    names = _USUAL_FIELDS if by is None else (by,)
    field = next((n for n in names if all(_values(t, n) for t in types)), None)

    if field is None or not types:
        raise TypeError(
            f"message_union takes classes that all have a field {' or '.join(names)} "
            "with a Literal type or a default"
        )

    tags: dict[str, type] = {}

    for one in types:
        for value in _values(one, field):
            if tags.setdefault(value, one) is not one:
                raise TypeError(
                    f"{tags[value].__name__} and {one.__name__} have the same "
                    f"{field}, {value!r}"
                )

    def tag(value: Any) -> object:
        return (
            value.get(field)
            if isinstance(value, Mapping)
            else getattr(value, field, None)
        )

    members = tuple(Annotated[one, Tag(value)] for value, one in tags.items())
    return Annotated[Union[members], Discriminator(tag)]  # noqa: UP007  # made at run time


class TypedMessages:
    """Converts a session's messages between the caller's type and JSON objects."""

    def __init__(self, message_type: Any = dict) -> None:
        self._is_typed = message_type is not dict
        # The store checks the size of entries.
        self._codec: Codec[Any] = Codec(message_type, max_payload=sys.maxsize)

    def dump(self, message: Any, session_id: str) -> Message:
        """Return a message's JSON; refuse a message that could not be loaded again."""
        body = self._codec.append(session_id, [message], None).bodies[0]
        dumped: Any = parse_json(body)

        if not isinstance(dumped, dict):
            kind = type(dumped).__name__
            raise SerializationError(
                (0,), f"a session's message must be a JSON object, not a {kind}"
            )

        return dumped

    def load(self, entry: Entry, session_id: str) -> Any:
        """Return the message of a message entry.

        Raises ``SerializationError``, with the entry's id, if it does not fit the type.
        """
        if not self._is_typed:
            return copied(entry["message"])

        try:
            return self._codec.messages(
                [encode_json(entry["message"], ())], session_id
            )[0]
        except SerializationError as exc:
            raise SerializationError((entry["id"],), exc.reason, session_id) from exc


def _values(one: type, name: str) -> tuple[str, ...]:
    """Return the fixed values of the class's field; none if they are not fixed."""
    hint = get_type_hints(one).get(name)

    if get_origin(hint) is Literal:
        return tuple(value for value in get_args(hint) if isinstance(value, str))

    default: object = None

    if dataclasses.is_dataclass(one):
        default = next(
            (f.default for f in dataclasses.fields(one) if f.name == name), None
        )
    elif issubclass(one, BaseModel) and name in one.model_fields:
        default = one.model_fields[name].default

    return (default,) if isinstance(default, str) else ()
