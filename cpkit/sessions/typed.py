"""Messages of people's own types: told apart by a field, dumped and loaded again."""

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

USUAL = ("role", "kind", "type")


def message_union(*types: type, by: str | None = None) -> Any:
    """Return the ``message_type`` for classes that a field tells apart.

    For dataclasses and pydantic models, of which each has a field, ``by`` or else the
    first of ``role``, ``kind`` and ``type`` that all have, whose value is fixed by a
    ``Literal`` or a default, and no other class's::

        @dataclass
        class User:
            text: str
            kind: str = "user"

        open_checkpointer(url, message_type=message_union(User, Assistant))

    Raises ``TypeError`` where the classes cannot be told apart.
    """
    names = USUAL if by is None else (by,)
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
    """The messages of a session as their owner has them: dicts, or of a type."""

    def __init__(self, message_type: Any = dict) -> None:
        self._is_typed = message_type is not dict
        # How large an entry may be is the store's to say.
        self._codec: Codec[Any] = Codec(message_type, max_payload=sys.maxsize)

    def dump(self, message: Any, session_id: str) -> Message:
        """Return a message's JSON; one that could not be loaded again is refused."""
        body = self._codec.append(session_id, [message], None).bodies[0]
        dumped: Message = parse_json(body)

        if not isinstance(dumped, dict):
            raise SerializationError((0,), "a session's message is a JSON object")

        return dumped

    def load(self, entry: Entry, session_id: str) -> Any:
        """Return the message of a message entry.

        Raises ``SerializationError``, with the entry's id, where it does not fit.
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
    """Return the values that the class's field can have, if they are fixed."""
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
