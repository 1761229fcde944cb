"""Types of an application, for the tests of the saver's serializer."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple, TypedDict
from uuid import UUID

from pydantic import BaseModel


@dataclass
class Plan:
    text: str


class Person(BaseModel):
    name: str
    friends: list[Person] = []


class Mood(Enum):
    GOOD = "good"


class Place(NamedTuple):
    x: int
    y: int


class Tags(set[str]):
    pass


class Id(UUID):
    pass


class Price(Decimal):
    pass


class State(TypedDict, total=False):
    plan: Plan
    person: Person
    mood: Mood
    place: Place
    turns: int


FIRST: State = {
    "plan": Plan("go"),
    "person": Person(name="Ada", friends=[Person(name="Bo")]),
    "mood": Mood.GOOD,
    "place": Place(1, 2),
    "turns": 0,
}


def think(state: State) -> State:
    """Count the turns; the state has its types in each turn."""
    assert isinstance(state["person"].friends[0], Person)
    assert state["mood"] is Mood.GOOD
    return {"turns": state["turns"] + 1}


called: list[Any] = []


class Callable:
    """A class that is not of data, though LangGraph's serializer takes it."""

    def __init__(self, *given: Any) -> None:
        if given:
            called.append(given)

    def get_secret_value(self) -> str:
        return "x"
