"""The caller's own message types, in a store and in a session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from cpkit import SerializationError, open_checkpointer
from cpkit.messages import Message, UserMessage
from cpkit.sessions import Model, SessionLog, message_union
from tests.sessions.conftest import Store


@dataclass
class Said:
    text: str
    kind: str = "said"


@dataclass
class Asked:
    tools: list[str] = field(default_factory=list)
    kind: Literal["asked", "begged"] = "asked"


class Noted(BaseModel):
    kind: Literal["noted"] = "noted"
    at: dict[str, int] = {}


class Person:
    """A class that cannot be converted to JSON."""


MESSAGES = [Said("hello"), Asked(["book"]), Asked(kind="begged"), Noted(at={"x": 1})]


async def test_messages_are_loaded_as_their_own_classes(
    url: str, session_id: str
) -> None:
    """A field with a default or a Literal selects the class, in every store."""
    union = message_union(Said, Asked, Noted)

    async with open_checkpointer(url, message_type=union) as cp:
        await cp.append(session_id, MESSAGES)

    async with open_checkpointer(url, message_type=union) as cp:
        data = await cp.load(session_id)
        assert data is not None
        assert data.messages == MESSAGES

    async with open_checkpointer(url) as plain:
        raw = await plain.load(session_id)
        assert raw is not None
        assert raw.messages[0] == {"text": "hello", "kind": "said"}


async def test_the_field_is_role_kind_or_type_or_named() -> None:
    """The first of the three that all classes have, or the named field."""

    @dataclass
    class Mine:
        type: str = "mine"
        which: str = "m"

    @dataclass
    class Yours:
        role: str
        type: str = "yours"
        which: str = "y"

    for union in (message_union(Mine, Yours), message_union(Mine, Yours, by="which")):
        async with open_checkpointer("memory://", message_type=union) as cp:
            await cp.append("t", [Mine(), Yours("r")])
            data = await cp.load("t")
            assert data is not None
            assert data.messages == [Mine(), Yours("r")]


async def test_a_message_of_another_type_is_refused() -> None:
    """It raises when it is appended, not when it is loaded."""
    union = message_union(Said, Asked)

    async with open_checkpointer("memory://", message_type=union) as cp:
        for wrong in (Noted(), Said("x", kind="shouted"), Person(), {"kind": "said"}):
            with pytest.raises(SerializationError):
                await cp.append("t", [wrong])


@pytest.mark.parametrize(
    ("types", "by", "reason"),
    [
        ((), None, "told apart|all have"),
        ((Said, Person), None, "all have a field"),
        ((Said, Asked), "text", "all have a field text"),
        ((Said, type("Twin", (Said,), {})), None, "the same kind, 'said'"),
    ],
)
def test_types_without_a_distinct_field_are_refused(
    types: tuple[type, ...], by: str | None, reason: str
) -> None:
    """The union raises when it is made."""
    with pytest.raises(TypeError, match=reason):
        message_union(*types, by=by)


async def test_a_session_takes_and_returns_typed_messages(
    cp: Store, session_id: str
) -> None:
    """The log stores their JSON; projected messages are dicts."""
    union = message_union(Said, Asked, Noted)
    log = await SessionLog.open(cp, session_id, message_type=union)

    for message in MESSAGES:
        await log.append_message(message)

    await log.append_custom_message("hint", "be brief")
    again = await SessionLog.open(cp, session_id, message_type=union)
    *mine, hint = again.context().messages
    assert mine == MESSAGES
    assert hint["role"] == "custom"
    assert again.entries[0]["message"] == {"text": "hello", "kind": "said"}
    assert (await again.fork(session_id + "-fork")).context().messages[:4] == MESSAGES


async def test_a_typed_session_has_a_model(cp: Store, session_id: str) -> None:
    """The projection reads the JSON of messages."""
    log = await SessionLog.open(cp, session_id, message_type=Message)
    await log.append_message(UserMessage(content="hello"))
    await log.append_model_change("lab", "large")
    context = log.context()
    assert context.messages == [UserMessage(content="hello")]
    assert context.model == Model("lab", "large")


async def test_a_stored_message_of_another_type_is_an_error(
    cp: Store, session_id: str
) -> None:
    """The error has the id of the entry."""
    plain = await SessionLog.open(cp, session_id)
    entry_id = await plain.append_message({"role": "user", "content": "hello"})
    log = await SessionLog.open(cp, session_id, message_type=message_union(Said))

    with pytest.raises(SerializationError) as caught:
        log.context()

    assert caught.value.path == (entry_id,)
    assert caught.value.thread_id == session_id


async def test_a_message_must_be_a_json_object(cp: Store, session_id: str) -> None:
    """A text is refused."""
    log = await SessionLog.open(cp, session_id, message_type=str)
    words: Any = "hello"

    with pytest.raises(SerializationError, match="JSON object"):
        await log.append_message(words)
