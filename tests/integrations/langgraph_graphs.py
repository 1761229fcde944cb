"""Graphs for the tests, and the visible state of a thread."""

from __future__ import annotations

import operator
import re
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Send, interrupt


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    seen: Annotated[list[str], operator.add]
    approved: bool
    inner: str


class Inner(TypedDict, total=False):
    inner: str
    steps: Annotated[list[str], operator.add]


def build() -> StateGraph[State]:
    """A graph with parallel nodes, sends, a subgraph and interrupts."""

    def plan(state: State) -> State:
        return {
            "messages": [AIMessage("a plan", id=f"a{len(state['messages'])}")],
            "seen": ["plan"],
        }

    def left(state: State) -> State:
        return {"seen": ["left"]}

    def right(state: State) -> State:
        return {"seen": ["right"]}

    def fan(state: State) -> list[Send]:
        return [Send("worker", {"seen": [str(n)]}) for n in range(3)]

    def worker(state: State) -> State:
        return {"seen": [f"worker {state['seen'][0]}"]}

    def ask(state: State) -> State:
        answer = interrupt({"question": "go on?", "seen": len(state["seen"])})
        return {"approved": bool(answer), "seen": [f"answered {answer}"]}

    def first(state: Inner) -> Inner:
        return {"inner": "first", "steps": ["first"]}

    def second(state: Inner) -> Inner:
        return {"inner": f"second {interrupt('inside?')}", "steps": ["second"]}

    def tidy(state: State) -> State:
        # Change a message in the middle, remove one, and add one.
        first_id = state["messages"][0].id
        assert first_id is not None
        changes: list[Any] = [
            RemoveMessage(id=first_id),
            AIMessage("a better plan", id=state["messages"][1].id),
            HumanMessage("done", id=f"d{len(state['messages'])}"),
        ]
        return {"messages": changes}

    sub = StateGraph(Inner)
    sub.add_node("first", first)
    sub.add_node("second", second)
    sub.add_edge(START, "first")
    sub.add_edge("first", "second")
    sub.add_edge("second", END)

    graph = StateGraph(State)
    graph.add_node("plan", plan)
    graph.add_node("left", left)
    graph.add_node("right", right)
    graph.add_node("worker", worker)
    graph.add_node("ask", ask)
    graph.add_node("sub", sub.compile())
    graph.add_node("tidy", tidy)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "left")
    graph.add_edge("plan", "right")
    graph.add_conditional_edges("plan", fan, ["worker"])
    graph.add_edge(["left", "right", "worker"], "ask")
    graph.add_edge("ask", "sub")
    graph.add_edge("sub", "tidy")
    graph.add_edge("tidy", END)
    return graph


class Seen:
    """The state of a thread, with ids that differ between runs replaced."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, dict):
            # The saver in memory returns a config with all keys of the caller.
            return {
                self(key): self(item)
                for key, item in value.items()
                if key != "created_at" and not key.startswith("__pregel")
            }

        if hasattr(value, "_asdict"):
            return self(value._asdict())

        if isinstance(value, list | tuple):
            return [self(one) for one in value]

        if hasattr(value, "model_dump"):
            return [type(value).__name__, self(value.model_dump())]

        if isinstance(value, str):
            return re.sub(r"[0-9a-f]{32}|[0-9a-f-]{36}", self._name, value)

        if isinstance(value, int | float | bool | None):
            return value

        return self({"type": type(value).__name__, **_slots(value)})

    def _name(self, found: re.Match[str]) -> str:
        return self._names.setdefault(found[0], f"<id {len(self._names)}>")


def _slots(value: Any) -> dict[str, Any]:
    names = getattr(value, "__slots__", None) or vars(value)
    return {name: getattr(value, name) for name in names}
