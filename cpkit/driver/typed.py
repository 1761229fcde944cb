"""Typed messages: any type that pydantic validates, to JSON and back."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import CoreConfig, PydanticSerializationError, SchemaSerializer

from cpkit.driver.jsontext import encode_json, has_surrogates, parse_json
from cpkit.errors import SerializationError
from cpkit.records import JsonValue

__all__ = ["TypedMessages", "in_one_line", "is_misfit"]


class TypedMessages:
    """Encodes and decodes messages of one type.

    A message keeps what the JSON of its type keeps. That includes computed fields
    that the type reads back. ``strict`` refuses a message that would come back
    different.
    """

    def __init__(self, message_type: Any, *, strict: bool) -> None:
        if isinstance(message_type, str):
            raise TypeError(
                f"message_type is a type, not a text: write message_type={message_type}"
            )

        self._strict = strict
        self._one: TypeAdapter[Any] = TypeAdapter(message_type)
        self._one.rebuild()  # where the type puts off building its schema
        # An adapter's own serializer makes null of an infinity in a field of Any.
        self._serializer = SchemaSerializer(
            self._one.core_schema, CoreConfig(ser_json_inf_nan="constants")
        )
        self._has_computed = _has_computed(self._one.core_schema)

    def encode(self, message: object, path: tuple[int]) -> bytes:
        """Return the message as JSON that loads as the message.

        Raises ``SerializationError`` if the message is of another type, or could not be
        loaded again.
        """
        body = self._with_computed(message, path, self._dumped(message, path))

        try:
            again = self.decode(body)
        except ValidationError as exc:
            where = (*path, *exc.errors()[0]["loc"])
            fault = f"could not be loaded again: {in_one_line(exc)}"
            raise SerializationError(where, fault) from exc

        # The JSON is compared too: the type's equality may leave fields out.
        if self._strict and (
            again != message or not self._is_same_json(message, again, path)
        ):
            raise SerializationError(
                path, f"would come back different: {again!r} for {message!r}"
            )

        return body

    def decode(self, body: bytes | str) -> Any:
        """Return the message; ``ValidationError`` if it does not fit the type."""
        try:
            return self._one.validate_json(body)
        except ValidationError as exc:
            if is_misfit(exc) or not has_surrogates(body):
                raise

        return self._one.validate_python(parse_json(body))

    def _with_computed(self, message: object, path: tuple[int], body: bytes) -> bytes:
        """Return the JSON with computed fields, if the type reads them back.

        Without these fields, a value that the caller gave explicitly would be lost.
        Other types have no computed fields, refuse them, or keep them as unknown ones.
        """
        if not self._has_computed:
            return body

        try:
            complete = self._dumped(message, path, round_trip=False)
            again = self._dumped(self.decode(complete), path)
        except (SerializationError, ValidationError):
            return body

        return complete if _same_json(body, again) else body

    def _is_same_json(self, one: object, other: object, path: tuple[int]) -> bool:
        return all(
            _same_json(
                self._dumped(one, path, round_trip=kind),
                self._dumped(other, path, round_trip=kind),
            )
            for kind in (True, False)  # without computed fields, and with them
        )

    def _dumped(
        self, message: object, path: tuple[int], *, round_trip: bool = True
    ) -> bytes:
        try:
            dumped = self._serializer.to_python(
                message,
                mode="json",
                by_alias=True,
                round_trip=round_trip,
                warnings="error",
            )
        except (PydanticSerializationError, ValueError, TypeError) as exc:
            fault = f"does not fit message_type: {self._misfit(message) or exc}"
            raise SerializationError(path, fault) from exc

        return encode_json(dumped, path)

    def _misfit(self, message: object) -> str | None:
        """Say that a message is of another class, such as the JSON of the right one."""
        try:
            made = self._one.validate_python(message)
        except ValidationError as exc:
            return f"{in_one_line(exc)} (it is of type {type(message).__name__})"

        if isinstance(message, type(made)):
            return None

        name = type(made).__name__
        advice = f"; append {name}(**message)" if isinstance(message, dict) else ""
        return f"it is a {type(message).__name__}, not a {name}{advice}"


def in_one_line(error: ValidationError) -> str:
    """Return what is wrong in which field, without links."""
    return "; ".join(
        ": ".join([*map(str, fault["loc"]), fault["msg"]])
        for fault in error.errors(include_url=False, include_input=False)
    )


def is_misfit(error: ValidationError) -> bool:
    """Tell whether a message could not be decoded because of its type."""
    return error.errors(include_url=False)[0]["type"] != "json_invalid"


def _has_computed(schema: object) -> bool:
    """Return whether a type with this core schema has computed fields anywhere."""
    if isinstance(schema, dict):
        return bool(schema.get("computed_fields")) or any(
            map(_has_computed, schema.values())
        )

    return isinstance(schema, list | tuple) and any(map(_has_computed, schema))


def _same_json(one: bytes, other: bytes) -> bool:
    """Return whether two JSON texts are equal, but for the order in arrays.

    A set is dumped in any order.
    """
    return one == other or _sorted(parse_json(one)) == _sorted(parse_json(other))


def _sorted(value: JsonValue) -> str:
    match value:
        case dict():
            items = [f"{name!r}:{_sorted(item)}" for name, item in value.items()]
            return "{" + ",".join(items) + "}"
        case list():
            return "[" + ",".join(sorted(map(_sorted, value))) + "]"
        case _:
            return repr(value)
