"""Typed messages: any type that pydantic validates, by ``message_type``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, Field, field_serializer
from typing_extensions import TypedDict

from conformance.case import Case, raises
from conformance.clause import clause
from cpkit import MovesThreads, ReadsRanges, SerializationError
from cpkit.messages import AssistantMessage, Message, UserMessage


@dataclass
class Note:
    text: str
    tags: list[str]


class Line(TypedDict):
    text: str
    count: int


class Circle(BaseModel):
    kind: Literal["circle"] = "circle"
    radius: float


class Square(BaseModel):
    """Is loaded by the alias of its field only."""

    kind: Literal["square"] = "square"
    side: float = Field(alias="sideLength")


class Forgetful(BaseModel):
    """Loses a field when it is written."""

    text: str
    secret: str = Field(default="", exclude=True)


class Tagged(BaseModel):
    """Writes its tags in the order of their table, which a copy has another of."""

    tags: set[int]


class Broken(BaseModel):
    """Writes a value that it cannot load."""

    count: int

    @field_serializer("count")
    def _as_text(self, count: int) -> str:
        return "many"


@clause("typed.comes-back", "message_type")
async def comes_back(case: Case) -> None:
    """Messages of any type that pydantic validates come back as equal objects."""
    kinds: list[tuple[Any, list[Any]]] = [
        (Note, [Note("a\0é", ["x"]), Note("", [])]),
        (Line, [{"text": "a", "count": 2**70}]),
        (Circle | Square, [Circle(radius=0.1), Square(sideLength=2.0)]),
        (
            Message,
            [UserMessage(content="hi"), AssistantMessage(content=[], model="m")],
        ),
    ]

    for kind, messages in kinds:
        async with case.open(message_type=kind) as cp:
            thread = case.id()
            version = await cp.append(thread, messages)
            loaded = await cp.load(thread)
            assert version == len(messages)
            assert loaded is not None
            assert loaded.messages == messages
            assert [type(m) for m in loaded.messages] == [type(m) for m in messages]

            if isinstance(cp, ReadsRanges):
                assert await cp.read(thread, 0, 1) == messages[:1]
                assert [type(m) for m in await cp.read(thread)] == [
                    type(m) for m in messages
                ]
                assert await cp.load_range(thread) == loaded

            if isinstance(cp, MovesThreads):
                dump = await cp.dump_thread(thread)
                assert dump is not None
                moved = replace(dump, thread_id=case.id())
                await cp.restore_thread(moved)
                loaded = await cp.load(moved.thread_id)
                assert all(type(one) is dict for one in dump.messages)
                assert loaded is not None
                assert loaded.messages == messages


@clause("typed.keeps-unknown-fields", "message_type")
async def keeps_unknown_fields(case: Case) -> None:
    """Metadata and unknown fields of cpkit.messages are kept."""
    message = UserMessage.model_validate(
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi", "cache": {"ttl": 5}}],
            "metadata": {"id": "x", "n": None},
            "future": [1, {"a": 2}],
        }
    )

    async with case.open(message_type=Message) as cp:
        thread = case.id()
        await cp.append(thread, [message])
        loaded = await cp.load(thread)
        assert loaded is not None
        assert loaded.messages == [message]
        assert loaded.messages[0].model_dump() == message.model_dump()


@clause("typed.refuses-another-type", "message_type")
async def refuses_another_type(case: Case) -> None:
    """A message of another type is refused with its index; nothing is written."""
    thread = case.id()
    wrong: list[Any] = [Circle.model_construct(radius="wide"), object(), 5, None]

    async with case.open(message_type=Circle) as cp:
        for value in wrong:
            with raises(SerializationError, repr(value)) as caught:
                await cp.append(thread, [Circle(radius=1), value])

            assert caught.error.path[0] == 1

        assert await cp.load(thread) is None


@clause("typed.refuses-the-unloadable", "message_type")
async def refuses_the_unloadable(case: Case) -> None:
    """append refuses a typed message that could not be loaded again."""
    thread = case.id()

    async with case.open(message_type=Broken) as cp:
        with raises(SerializationError) as caught:
            await cp.append(thread, [Broken(count=1)])

        assert caught.error.path[0] == 0
        assert await cp.load(thread) is None

    async with case.open(message_type=Circle) as cp:
        with raises(SerializationError, "an infinite float"):
            await cp.append(thread, [Circle(radius=float("inf"))])

        assert await cp.load(thread) is None


@clause("typed.strict-roundtrip", "message_type", "strict_roundtrip")
async def strict_roundtrip(case: Case) -> None:
    """With strict_roundtrip append refuses a message that would load differently."""
    thread = case.id()

    async with case.open(message_type=Forgetful, strict_roundtrip=True) as cp:
        with raises(SerializationError) as caught:
            await cp.append(thread, [Forgetful(text="a", secret="b")])

        assert caught.error.path[0] == 0
        assert await cp.load(thread) is None
        assert await cp.append(thread, [Forgetful(text="a")]) == 1

    async with case.open(message_type=Forgetful) as cp:
        assert await cp.append(case.id(), [Forgetful(text="a", secret="b")]) == 1

    tags = set(range(100))

    for n in {*tags} - {1, 8}:
        tags.discard(n)  # its table stays large: 1 is before 8, and not in a copy

    message = Tagged(tags={0})
    message.tags = tags

    async with case.open(message_type=Tagged, strict_roundtrip=True) as strict:
        assert await strict.append(case.id(), [message]) == 1


@clause("typed.misfit-is-told-at-load", "message_type", "handles")
async def misfit_raises_at_load(case: Case) -> None:
    """Loading a message of another type raises with the thread id and position."""
    thread = case.id()
    await case.cp.append(thread, [{"kind": "circle", "radius": 1}, {"radius": "wide"}])

    async with case.open(message_type=Circle) as cp:
        with raises(SerializationError) as caught:
            await cp.load(thread)

        assert caught.error.thread_id == thread
        assert caught.error.path[0] == 1

        if isinstance(cp, ReadsRanges):
            with raises(SerializationError, "a read") as caught:
                await cp.read(thread, 1)

            assert caught.error.thread_id == thread
            assert caught.error.path[0] == 1, "the position in the thread"
            with raises(SerializationError, "a range") as caught:
                await cp.load_range(thread, 1)

            assert caught.error.path[0] == 1, "the position in the thread"
            assert await cp.read(thread, 0, 1) == [Circle(radius=1)]

        assert await cp.append(thread, [Circle(radius=2)]) == 3
