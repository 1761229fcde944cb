"""Typed messages: they are loaded as they were written, or refused when written."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import pytest
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    computed_field,
)
from typing_extensions import TypedDict  # pydantic needs it below Python 3.12

from cpkit import CorruptThread, SerializationError
from cpkit.driver.codec import Codec


class User(BaseModel):
    role: Literal["user"] = "user"
    text: str


class Tool(BaseModel):
    role: Literal["tool"] = "tool"
    answer: dict[str, Any]


class Line(TypedDict):
    role: str
    parts: list[int]


@dataclass
class Turn:
    at: datetime
    tags: set[str] = field(default_factory=set)
    raw: bytes = b""


class Aliased(BaseModel):
    model_config = ConfigDict(extra="forbid")

    parent_id: str = Field(alias="parentId")

    @computed_field  # type: ignore[prop-decorator]  # the form in pydantic's manual
    @property
    def shout(self) -> str:
        return self.parent_id.upper()


class Base(BaseModel):
    x: int = 0


class Sub(Base):
    y: int = 0


class Holder(BaseModel):
    anything: Any = None
    mapping: dict[str, Any] = {}
    base: Base = Base()


class Measured(BaseModel):
    value: float = 0.0


class OtherWayBack(BaseModel):
    value: int = Field(
        validation_alias=AliasChoices("value_in"), serialization_alias="value_out"
    )


class Node(BaseModel):
    child: Node | None = None


Union = Annotated[User | Tool, Discriminator("role")]


def through(message_type: Any, *messages: Any, **options: Any) -> list[Any]:
    """Encode messages with one codec and decode them with another."""
    bodies = Codec[Any](message_type, **options).append("t", messages, None).bodies
    return Codec[Any](message_type).messages(bodies, "t")


def refusal(message_type: Any, *messages: Any, **options: Any) -> SerializationError:
    with pytest.raises(SerializationError) as raised:
        through(message_type, *messages, **options)

    return raised.value


@pytest.mark.parametrize(
    ("message_type", "messages"),
    [
        (Union, [User(text="é\0"), Tool(answer={"n": 10**40, "f": 0.1, "z": None})]),
        (User | Tool, [Tool(answer={}), User(text="")]),
        (Line, [{"role": "user", "parts": [1, 2]}]),
        (Turn, [Turn(datetime(2024, 1, 1, tzinfo=UTC), {"a", "b"}, b"raw")]),
        (Aliased, [Aliased(parentId="p")]),
        (Node, [Node(child=Node(child=Node()))]),
        (list[int], [[1], []]),
        (dict[str, int], [{"a": 1}]),
        (int | None, [1, None]),
        (str, ["a", ""]),
    ],
    ids="union bare-union typeddict dataclass alias node list dict int str".split(),
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_typed_message_is_loaded_equal(
    message_type: Any, messages: list[Any], strict: bool
) -> None:
    """Any type that pydantic validates can be the message type."""
    assert through(message_type, *messages, strict_roundtrip=strict) == messages


def test_fields_are_stored_by_alias() -> None:
    """A computed field is not stored: ``extra="forbid"`` would refuse it at load."""
    codec: Codec[Any] = Codec(Aliased)
    (body,) = codec.append("t", [Aliased(parentId="p")], None).bodies
    assert body == b'{"parentId":"p"}'


class File(BaseModel):
    """A type that reads its computed field back."""

    given: str | None = Field(default=None, alias="kind", exclude=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, File)

    @computed_field  # type: ignore[prop-decorator]  # the form in pydantic's manual
    @property
    def kind(self) -> str:
        return self.given or "unknown"


class Dropping(BaseModel):
    """A type that does not read its dumped field back, and does not compare it."""

    lost: str = Field(default="", validation_alias="other")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dropping)


class Keeping(BaseModel):
    model_config = ConfigDict(extra="allow")

    text: str

    @computed_field  # type: ignore[prop-decorator]  # the form in pydantic's manual
    @property
    def size(self) -> int:
        return len(self.text)


def test_a_computed_field_is_stored_where_the_type_reads_it_back() -> None:
    """Without it, a value that the caller gave would be lost."""
    (again,) = through(File, File(kind="pdf"), strict_roundtrip=True)
    assert again.kind == "pdf"

    (files,) = through(list[File], [File(kind="pdf"), File()], strict_roundtrip=True)
    assert [file.kind for file in files] == ["pdf", "unknown"]

    (kept,) = through(Keeping, Keeping(text="abc"), strict_roundtrip=True)
    assert kept.model_extra == {}


def test_strict_roundtrip_compares_the_json() -> None:
    """The type's own equality may leave fields out."""
    message = Dropping.model_validate({"other": "x"})
    assert through(Dropping, message) == [message]
    assert "different" in refusal(Dropping, message, strict_roundtrip=True).reason


@pytest.mark.parametrize(
    ("message_type", "message"),
    [
        (User, {"role": "user", "text": ""}),
        (Union, 1),
        (Turn, None),
        (Line, User(text="")),
    ],
)
def test_a_message_of_another_type_is_refused(message_type: Any, message: Any) -> None:
    """A dict in place of a model is refused too; the error has its index."""
    assert refusal(message_type, message).path == (0,)


def test_a_refusal_says_what_to_append() -> None:
    """It names the classes, in one line and without pydantic's links."""
    said = str(refusal(Union, {"role": "user", "text": "a"}))
    assert "it is a dict, not a User; append User(**message)" in said
    said = str(refusal(User, {"role": "user"}))
    assert "text: Field required (it is of type dict)" in said
    assert "\n" not in said


def test_the_name_of_a_type_is_not_a_type() -> None:
    with pytest.raises(TypeError, match="write message_type=User"):
        Codec(message_type="User")


def test_a_message_that_could_not_be_loaded_is_refused() -> None:
    """Its stored form does not validate against its own type."""
    error = refusal(OtherWayBack, OtherWayBack.model_validate({"value_in": 1}))
    assert error.path == (0, "value_in")
    assert "could not be loaded again" in error.reason


def test_a_message_changed_without_validation_is_refused() -> None:
    """Assignment and ``model_construct`` skip validation; append does not."""
    user = User(text="")
    user.text = 5  # type: ignore[assignment]  # the mistake under test
    assert refusal(User, User(text=""), user).path[0] == 1
    assert refusal(User, User.model_construct(text=None)).path[0] == 0


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", ["field", "any"])
def test_a_number_that_json_lacks_is_refused(number: float, place: str) -> None:
    """A stored null would make the thread impossible to load."""
    if place == "field":
        assert refusal(Measured, Measured(value=number)).path == (0, "value")
    else:
        assert refusal(Holder, Holder(anything=[number])).path == (0, "anything", 0)


@pytest.mark.parametrize(
    "holder",
    [
        Holder(anything=Sub(y=1)),
        Holder(mapping={"a": Sub(y=1)}),
        Holder(base=Sub(y=1)),
        Holder(anything=(1, 2)),
    ],
    ids="any dict base tuple".split(),
)
def test_strict_roundtrip_refuses_a_message_that_would_change(
    holder: Holder,
) -> None:
    """Without it, such a model is loaded as a dict or as the declared base class."""
    (again,) = through(Holder, holder)
    assert again != holder

    error = refusal(Holder, holder, strict_roundtrip=True)
    assert error.path == (0,)
    assert "different" in error.reason


def test_integer_keys_are_kept_or_refused_by_strict_roundtrip() -> None:
    """A typed field keeps them; in an untyped field they would become strings."""
    assert (
        "different"
        in refusal(Holder, Holder(anything={1: "a"}), strict_roundtrip=True).reason
    )
    assert through(dict[int, str], {1: "a"}, strict_roundtrip=True) == [{1: "a"}]


class Short(BaseModel):
    text: Annotated[str, Field(pattern=".*")]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Holder, Holder(anything=["\ud800", {"key": "\ud83d\ude00"}])),
        (User, User(text="\ude00")),
        (Any, "\udfff"),
    ],
)
def test_a_lone_surrogate_comes_back(kind: Any, message: Any) -> None:
    """Wherever the type takes it."""
    codec: Codec[Any] = Codec(kind, strict_roundtrip=True)
    body = codec.append("t", [message], None).bodies[0]
    assert body.isascii()
    assert codec.messages([body], "t") == [message]


def test_a_lone_surrogate_that_pydantic_refuses_is_named() -> None:
    """As in a text with a pattern; the path leads to the field."""
    short = Short.model_construct(text="\ud800")
    assert refusal(Short, short).path == (0, "text")


@pytest.mark.parametrize("position", [0, 3, 700])
@pytest.mark.parametrize("stored", [bytes, bytes.decode], ids=["bytes", "str"])
def test_a_stored_message_that_no_longer_fits_is_named(
    position: int, stored: Any
) -> None:
    """The error has the thread, the position and the field."""
    rows = [stored(b'{"text":"a"}')] * 800
    rows[position] = stored(b'{"txet":"a"}')

    with pytest.raises(SerializationError) as raised:
        Codec(User).messages(rows, "t", first=10)

    assert raised.value.thread_id == "t"
    assert raised.value.path == (position + 10,)
    assert "text" in raised.value.reason


def test_damaged_bytes_are_corrupt_for_typed_messages_too() -> None:
    """The error differs from that for a message of another type."""
    with pytest.raises(CorruptThread) as raised:
        Codec(User).messages([b'{"text":"a"}', b'{"text"'], "t")

    assert raised.value.where == "message 1"


def test_a_type_may_defer_its_schema() -> None:
    """``defer_build`` does not change what is stored."""

    class Later(BaseModel):
        model_config = ConfigDict(defer_build=True)
        text: str

    assert through(Later, Later(text="a")) == [Later(text="a")]
