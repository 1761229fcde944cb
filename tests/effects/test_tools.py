"""Tools: validated by their signature, and run once if they write."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    SecretStr,
    computed_field,
    field_serializer,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass

from cpkit import (
    JsonValue,
    MemoryCheckpointer,
    SerializationError,
    open_checkpointer,
)
from cpkit.effects import (
    Effect,
    EffectTimeout,
    NoEffect,
    NotLanded,
    Tool,
    ToolOutcome,
    ToolRegistry,
    tool,
)
from cpkit.effects.tools import arguments_json
from tests.effects.shop import Store, quick, until

BOOKS: list[Any] = []


class Guest(BaseModel):
    name: str
    seat: int = 0


@tool(key_fields=["guest", "day"])
async def book(
    effect: Effect,
    guest: Guest,
    day: date,
    nights: Annotated[int, Field(gt=0)] = 1,
) -> dict[str, Any]:
    """Book a room."""
    BOOKS.append((effect, guest, day, nights))
    return {"guest": guest, "until": day}


@tool(side_effects="read")
def search(city: str, limit: int = 3) -> list[str]:
    """Search for hotels."""
    BOOKS.append(threading.current_thread())

    if city == "nowhere":
        raise LookupError("no such city")

    return [city] * limit


@tool
def pay(amount: int) -> None:
    """Pay."""
    BOOKS.append(amount)

    if amount == 13:
        raise ValueError("bad luck")

    if amount == 14:
        raise NoEffect("closed")


@pytest.fixture
def registry(cp: Store) -> ToolRegistry:
    BOOKS.clear()
    return ToolRegistry(quick(cp), [book, search, pay])


ROOM: dict[str, JsonValue] = {"guest": {"name": "Ann"}, "day": "2026-11-21"}


async def test_a_write_runs_once_and_is_replayed_after(
    registry: ToolRegistry, thread: str
) -> None:
    """The tool-call id is stored with the record, and is not part of the key."""
    first = await registry.dispatch(thread, "book", ROOM, tool_call_id="call_0")
    again = await registry.dispatch(thread, "book", ROOM, tool_call_id="call_1")
    assert first.content == {"guest": {"name": "Ann", "seat": 0}, "until": "2026-11-21"}
    assert again.content == first.content
    assert [(o.is_error, o.replayed) for o in (first, again)] == [
        (False, False),
        (False, True),
    ]
    assert first.record is not None
    assert again.record == first.record
    assert first.record.call.args["tool_call_id"] == "call_0"
    ((effect, guest, day, nights),) = BOOKS
    assert (guest, day, nights) == (Guest(name="Ann"), date(2026, 11, 21), 1)
    assert effect.attempt == 1
    # The effect has the validated arguments, with defaults filled in.
    assert effect.args == {
        "guest": {"name": "Ann", "seat": 0},
        "day": "2026-11-21",
        "nights": 1,
    }


async def test_the_same_tool_call_id_with_other_arguments_is_another_effect(
    registry: ToolRegistry, thread: str
) -> None:
    """Models use the same ids again in later turns."""
    for amount in (1, 2):
        outcome = await registry.dispatch(
            thread, "pay", {"amount": amount}, tool_call_id="call_0"
        )
        assert outcome.content is None
        assert not outcome.replayed

    assert BOOKS == [1, 2]


async def test_a_read_runs_each_time_and_is_not_recorded(
    cp: Store, registry: ToolRegistry, thread: str
) -> None:
    """Its sync function runs in a worker thread."""
    for _ in range(2):
        outcome = await registry.dispatch(thread, "search", {"city": "Rome"})
        assert outcome == ToolOutcome(["Rome", "Rome", "Rome"])

    failed = await registry.dispatch(thread, "search", {"city": "nowhere"})
    assert failed == ToolOutcome("LookupError: no such city", True)
    assert await cp.list_calls(thread) == []
    assert threading.current_thread() not in BOOKS


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("book", {"guest": {"name": "Ann"}}, "day: Missing required argument"),
        ("book", {**ROOM, "nights": 0}, "nights: Input should be greater than 0"),
        ("book", {**ROOM, "effect": 1}, "effect: Unexpected keyword argument"),
        ("pay", {"amount": "ten"}, "amount: Input should be a valid integer"),
        ("fly", {}, "unknown tool 'fly'; known tools: book, pay, search"),
        ("pay", [1], "arguments of 'pay'"),
    ],
)
async def test_a_call_that_does_not_fit_is_an_error_outcome(
    cp: Store, registry: ToolRegistry, thread: str, name: str, args: Any, message: str
) -> None:
    """The outcome says what is wrong. Nothing runs, and nothing is recorded."""
    outcome = await registry.dispatch(thread, name, args)
    assert outcome.is_error
    assert message in str(outcome.content)
    assert outcome.record is None
    assert await cp.list_calls(thread) == []
    assert BOOKS == []


async def test_a_failure_is_an_error_outcome_and_replayed(
    registry: ToolRegistry, thread: str
) -> None:
    """The first outcome has the record, and the second is a replay of it."""
    outcomes = [
        await registry.dispatch(thread, "pay", {"amount": 13}) for _ in range(2)
    ]
    assert [o.is_error for o in outcomes] == [True, True]
    assert [o.replayed for o in outcomes] == [False, True]
    assert all("bad luck" in str(o.content) for o in outcomes)
    assert outcomes[0].record == outcomes[1].record
    assert BOOKS == [13]

    for _ in range(2):
        outcome = await registry.dispatch(thread, "pay", {"amount": 14})
        assert outcome.content == "nothing happened: closed"
        assert not outcome.replayed

    assert BOOKS == [13, 14, 14]


async def test_a_denial_is_an_outcome_and_a_timeout_is_raised(
    cp: Store, thread: str
) -> None:
    """The model gets the denial. The agent gets ``EffectTimeout``."""
    ledger = quick(cp, requires_approval=lambda _: True, approval_timeout=0)
    registry = ToolRegistry(ledger, [pay])
    BOOKS.clear()

    with pytest.raises(EffectTimeout):
        await registry.dispatch(thread, "pay", {"amount": 1})

    (request,) = await ledger.pending(thread)
    await ledger.deny(request.key, reason="not today")
    outcome = await registry.dispatch(thread, "pay", {"amount": 1})
    assert outcome == ToolOutcome("'pay' was denied: not today", True)
    assert BOOKS == []


async def test_policies_see_the_validated_arguments(cp: Store, thread: str) -> None:
    """Values are converted, and defaults are filled in."""
    seen: list[Any] = []

    def policy(effect: Effect) -> bool:
        seen.append(effect.args)
        return False

    @tool
    def give(amount: int = 500) -> int:
        return amount

    registry = ToolRegistry(quick(cp, requires_approval=policy), [give])
    assert (await registry.dispatch(thread, "give", {})).content == 500
    assert (await registry.dispatch(thread, "give", {"amount": "500"})).replayed
    assert seen == [{"amount": 500}]


async def test_a_cancelled_tool_raises_cancelled_error(cp: Store, thread: str) -> None:
    """A cancellation is not turned into an outcome."""
    began = asyncio.Event()

    @tool
    async def slow() -> None:
        began.set()
        await asyncio.Event().wait()

    registry = ToolRegistry(quick(cp), [slow])
    task = asyncio.create_task(registry.dispatch(thread, "slow", {}))
    await began.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_run_waits_for_its_thread_and_records(
    cp: Store, thread: str
) -> None:
    """A thread goes on when its run is cancelled; nothing may run beside it."""
    began, go = threading.Event(), threading.Event()
    paid: list[int] = []

    @tool(verify=lambda _: NotLanded())
    def pay(amount: int) -> str:
        began.set()
        go.wait(30)
        paid.append(amount)
        return "paid"

    ledger = quick(cp)
    registry = ToolRegistry(ledger, [pay])
    task = asyncio.create_task(registry.dispatch(thread, "pay", {"amount": 5}))
    await asyncio.to_thread(began.wait)
    task.cancel()
    await ledger.recover(thread, [pay])
    assert not task.done()
    task.cancel()
    go.set()

    with pytest.raises(asyncio.CancelledError):
        await task

    replayed = await registry.dispatch(thread, "pay", {"amount": 5})
    assert (replayed.content, replayed.replayed, paid) == ("paid", True, [5])


def test_a_cancelled_tool_that_reads_does_not_begin() -> None:
    """It waits for a thread; others may wait behind it."""
    began, go = threading.Event(), threading.Event()
    looked: list[int] = []

    @tool(side_effects="read")
    def look(number: int) -> None:
        looked.append(number)
        began.set()
        go.wait(30)

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            asyncio.get_running_loop().set_default_executor(pool)

            async with open_checkpointer("memory://") as cp:
                registry = ToolRegistry(quick(cp), [look])
                first, second = (
                    asyncio.create_task(registry.dispatch("t", "look", {"number": n}))
                    for n in (1, 2)
                )
                await until(lambda: asyncio.sleep(0, began.is_set()))
                second.cancel()
                await asyncio.wait([second])
                go.set()
                await first
                await registry.dispatch("t", "look", {"number": 3})

    asyncio.run(main())
    assert looked == [1, 3]


async def test_a_timeout_around_a_sync_tool_is_still_a_timeout(
    cp: Store, thread: str
) -> None:
    """The delayed cancellation is the one that asyncio.timeout asked for."""
    loop, go = asyncio.get_running_loop(), threading.Event()

    def end() -> None:
        limit.reschedule(loop.time())
        loop.call_later(0.1, go.set)

    @tool
    def pay() -> str:
        loop.call_soon_threadsafe(end)
        go.wait()
        return "paid"

    registry = ToolRegistry(quick(cp), [pay])

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            await registry.dispatch(thread, "pay", {})

    assert (await registry.dispatch(thread, "pay", {})).replayed


async def test_the_function_gets_what_people_approved(cp: Store, thread: str) -> None:
    """The caller changes its arguments while a person decides."""
    paid: list[Any] = []

    @tool
    async def pay(order: dict[str, Any]) -> None:
        paid.append(order["amount"])

    ledger = quick(cp, requires_approval=lambda _: True)
    args: dict[str, Any] = {"order": {"amount": 10}}
    dispatch = ToolRegistry(ledger, [pay]).dispatch(thread, "pay", args)
    task = asyncio.create_task(dispatch)
    key = ledger.key(thread, "pay", {"order": {"amount": 10}})

    async def requested() -> bool:
        return any(one.key == key for one in await ledger.requests())

    await until(requested)
    args["order"]["amount"] = 9999
    assert await ledger.approve(key)
    await task
    assert paid == [10]


class Masked(BaseModel):
    """Writes less than it reads."""

    secret: SecretStr = SecretStr("")
    amount: int = Field(10, exclude=True)
    renamed: int = Field(0, serialization_alias="other")


@pytest.mark.parametrize(
    "order",
    [{"secret": "token"}, {"amount": 500}, {"renamed": 5}],
    ids=["masked", "excluded", "renamed"],
)
async def test_arguments_that_json_does_not_keep_are_refused(
    cp: Store, thread: str, order: dict[str, JsonValue]
) -> None:
    """People would approve other arguments, and recover would run them."""
    ran: list[Masked] = []

    @tool
    async def pay(order: Masked) -> None:
        ran.append(order)

    outcome = await ToolRegistry(quick(cp), [pay]).dispatch(
        thread, "pay", {"order": order}
    )
    assert outcome.is_error
    assert "does not keep everything" in str(outcome.content)
    assert (ran, await cp.list_calls(thread)) == ([], [])


async def test_recover_skips_a_tool_that_reads_other_arguments_now(
    cp: Store, thread: str
) -> None:
    """A field outside the key got another default since the call was recorded."""
    ran: list[int] = []

    async def old(order: int, amount: int = 500) -> None:
        await asyncio.Event().wait()

    async def new(order: int, amount: int = 10, currency: str = "EUR") -> None:
        ran.append(amount)

    options: Any = {"name": "pay", "key_fields": ["order"]}
    before = Tool(old, **options)
    after = Tool(new, verify=lambda _: NotLanded(), **options)
    ledger = quick(cp, stale_after=0.2)
    run = ToolRegistry(ledger, [before]).dispatch(thread, "pay", {"order": 1})

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run, 0.2)

    await quick(cp).recover(thread, [after])
    assert ran == []


class Crowd(RootModel[frozenset[str]]):
    """A model that is a set."""


@dataclass
class House:
    rooms: dict[int, set[int]]


class Party(BaseModel):
    guests: Crowd = Field(alias="who")
    house: House


@tool
def invite(party: Party, tags: set[str], days: list[set[date]]) -> None:
    """Invite to a party."""


@pydantic_dataclass
class Aliased:
    tags: set[str] = Field(alias="Tags")


class Computed(BaseModel):
    names: list[str]

    @computed_field
    def unique(self) -> set[str]:
        return set(self.names)


class Extras(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, set[str]] = Field(init=False)


class Serialized(BaseModel):
    tags: list[str]

    @field_serializer("tags")
    def as_set(self, tags: list[str]) -> set[str]:
        return set(tags)


class Nested(BaseModel):
    pairs: set[tuple[str, frozenset[str]]]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)

    tags: frozenset[str]


class Wraps(BaseModel):
    crowds: set[Frozen]


class Crowds(BaseModel):
    nested: deque[frozenset[frozenset[str]]]


class Mixed(BaseModel):
    hidden: int = Field(0, exclude=True)
    tags: set[str]
    steps: list[str]


@tool
def mix(mixed: Mixed, queue: deque[str], rooms: dict[int, list[int]]) -> None:
    """Sets beside lists, of which the order counts."""


@tool
def pack(
    queue: deque[set[str]],
    aliased: Aliased,
    computed: Computed,
    extras: Extras,
    serialized: Serialized,
    nested: list[Nested],
    crowds: Crowds,
) -> None:
    """Sets in places of which pydantic alone knows."""


WORDS: list[JsonValue] = ["ash", "birch", "cedar", "date", "elm"]
PARTY: dict[str, JsonValue] = {
    "party": {"who": WORDS, "house": {"rooms": {"7": [1, 2, 3]}}},
    "tags": WORDS,
    "days": [["2026-11-20", "2026-11-21"]],
}


PACKED: dict[str, JsonValue] = {
    "queue": [WORDS, WORDS],
    "aliased": {"Tags": WORDS},
    "computed": {"names": WORDS[::-1], "unique": WORDS},
    "extras": {"more": WORDS},
    "serialized": {"tags": WORDS},
    "nested": [{"pairs": [["a", WORDS], ["b", WORDS], ["c", WORDS]]}],
    "crowds": {
        "nested": [[WORDS, WORDS[1:], WORDS[2:]]],
    },
}


@pytest.mark.long
def test_a_set_is_the_same_argument_in_every_process() -> None:
    """The order of a set differs between processes; the effect must not."""
    code = """
from cpkit.effects.tools import arguments_json
from tests.effects.test_tools import PACKED, PARTY, invite, pack
print(arguments_json(invite.validated(PARTY)), arguments_json(pack.validated(PACKED)))
"""
    written = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in range(3)
    ]
    assert {text.strip() for text in written} == {f"{PARTY} {PACKED}"}


def test_a_set_of_models_is_refused() -> None:
    """Its order is not known: pydantic writes models as dicts, which no set holds."""

    @tool
    def invite(crowds: set[Frozen]) -> None: ...

    @tool
    def wrap(wraps: Wraps) -> None: ...

    crowds: list[JsonValue] = [{"tags": ["a"]}]
    assert arguments_json(invite.validated({"crowds": crowds})) == {"crowds": crowds}

    with pytest.raises(SerializationError):
        arguments_json(wrap.validated({"wraps": {"crowds": crowds}}))


def test_a_list_beside_a_set_keeps_its_order() -> None:
    """The order of a list is part of the argument."""

    args: dict[str, JsonValue] = {
        "mixed": {"tags": ["a", "b"], "steps": ["z", "a"]},
        "queue": ["z", "a"],
        "rooms": {"9": [2, 1], "1": [2, 1]},
    }
    assert arguments_json(mix.validated(args)) == args


async def test_a_tool_with_a_result_that_json_cannot_hold_runs_once(
    cp: Store, thread: str
) -> None:
    """Its effect happened, so it is a final failure."""
    ran: list[int] = []

    @tool
    def send() -> object:
        ran.append(1)
        return object()

    registry = ToolRegistry(quick(cp), [send])

    for _ in range(2):
        outcome = await registry.dispatch(thread, "send", {})
        assert outcome.is_error
        assert "Unable to serialize" in str(outcome.content)

    assert ran == [1]
    assert [record.status for record in await cp.list_calls(thread)] == ["completed"]


async def test_arguments_that_no_record_can_hold_are_an_error_outcome(
    cp: Store, thread: str
) -> None:
    """They fit the signature, but the tool does not run."""

    @tool
    def give(amount: float, note: str) -> None:
        raise AssertionError

    registry = ToolRegistry(quick(cp), [give])
    args: dict[str, JsonValue] = {"amount": "NaN", "note": "x"}
    outcome = await registry.dispatch(thread, "give", args)
    assert outcome.is_error
    assert "arguments of 'give'" in str(outcome.content)
    assert await cp.list_calls(thread) == []


async def test_arguments_that_are_too_large_for_the_store_are_an_error_outcome(
    tmp_path: Path,
) -> None:
    """The model can give shorter ones."""

    @tool
    def give(note: str) -> None:
        raise AssertionError

    async with open_checkpointer(f"sqlite:///{tmp_path}/x.db?max_payload=500") as cp:
        registry = ToolRegistry(quick(cp), [give])
        outcome = await registry.dispatch("t", "give", {"note": "x" * 1000})
        assert outcome.is_error
        assert "max_payload" in str(outcome.content)


@pytest.mark.parametrize("side_effects", ["read", "write"])
async def test_an_exception_without_a_usable_message_is_an_outcome(
    cp: Store, thread: str, side_effects: Any
) -> None:
    """The outcome contains the type of the exception."""

    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fail() -> None:
        raise Rude

    registry = ToolRegistry(quick(cp), [Tool(fail, side_effects=side_effects)])
    outcome = await registry.dispatch(thread, "fail", {})
    assert outcome.is_error
    assert "Rude" in str(outcome.content)


@pytest.mark.parametrize("side_effects", ["read", "write"])
async def test_a_tool_that_raises_stop_iteration_fails(
    cp: Store, thread: str, side_effects: Any
) -> None:
    """A future cannot hold this exception, so the tool raises another."""

    def first() -> object:
        return next(iter([]))

    registry = ToolRegistry(quick(cp), [Tool(first, side_effects=side_effects)])
    outcome = await registry.dispatch(thread, "first", {})
    assert outcome.is_error
    assert outcome.content == "RuntimeError: the tool raised StopIteration"

    if side_effects == "write":
        assert (await registry.dispatch(thread, "first", {})).replayed


def test_a_tool_has_a_name_a_description_and_a_schema() -> None:
    """The schema has the model's arguments, without the effect."""
    assert (book.name, book.description, book.side_effects) == (
        "book",
        "Book a room.",
        "write",
    )
    assert list(book.parameters["properties"]) == ["guest", "day", "nights"]
    assert book.parameters["required"] == ["guest", "day"]
    assert search("Rome", limit=1) == ["Rome"]


def test_a_function_that_cannot_be_a_tool_is_refused() -> None:
    """The error comes when it is defined, and not when it is called."""

    def unnamed(amount: int, /) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="amount"):
        Tool(unnamed)

    with pytest.raises(ValueError, match="side_effects"):
        Tool(pay.function, side_effects="maybe")  # type: ignore[arg-type]  # the point

    registry = ToolRegistry(quick(MemoryCheckpointer()), [pay])

    with pytest.raises(ValueError, match="already"):
        registry.add(Tool(pay.function, name="pay"))

    registry.add(pay)  # a module may have a tool under two names
    assert registry["pay"] is pay
    assert list(registry) == [pay]


async def test_a_missing_argument_that_names_the_effect_is_an_answer_for_the_model(
    cp: Store, thread: str
) -> None:
    """The signature of ``**arguments`` does not ask for it."""

    @tool(key_fields=["order"])
    async def pay(**arguments: Any) -> None:
        raise AssertionError

    outcome = await ToolRegistry(quick(cp), [pay]).dispatch(thread, "pay", {"n": 1})
    assert outcome.is_error
    assert outcome.content == "arguments of 'pay': 'order' must be given"


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "args",
    [
        f'{{"x": {DEEP}}}',
        {"x": json.loads("[" * 300 + "]" * 300)},
        {"x": object()},
        {"x": b"\xff"},
        '{"x": {"\\ud800": 1}}',
        ["abc"],
        None,
    ],
    ids=["deep text", "deep", "object", "bytes", "surrogate", "list", "nothing"],
)
async def test_arguments_that_cannot_be_written_are_an_answer_for_the_model(
    args: Any, cp: Store, thread: str
) -> None:
    """A model may write anything, and its agent must not die of it."""

    @tool
    async def anything(x: Any = None) -> None:
        raise AssertionError

    outcome = await ToolRegistry(quick(cp), [anything]).dispatch(
        thread, "anything", args
    )
    assert outcome.is_error
    assert str(outcome.content).startswith("arguments of 'anything': ")
    assert await cp.list_calls(thread) == []


async def test_arguments_may_be_the_json_text_of_an_object(
    cp: Store, thread: str
) -> None:
    """Models hand over text. Other JSON, and text that is not JSON, is their error."""
    seen: list[str] = []

    @tool
    async def book(flight: str) -> str:
        seen.append(flight)
        return flight

    registry = ToolRegistry(quick(cp), [book])
    first = await registry.dispatch(thread, "book", '{"flight": "HAT170"}')
    again = await registry.dispatch(thread, "book", {"flight": "HAT170"})
    assert (first.content, again.replayed, seen) == ("HAT170", True, ["HAT170"])

    for wrong in ("[1]", '"text"', "{", "", "null", '{"flight": 1}'):
        outcome = await registry.dispatch(thread, "book", wrong)
        assert outcome.is_error, wrong
        assert outcome.record is None

    assert len(await cp.list_calls(thread)) == 1


async def test_what_cannot_be_called_is_refused_when_it_is_given(
    cp: Store, thread: str
) -> None:
    """No key is burnt by a mistake in a callback, a handler or ``key_fields``."""

    def plain(flight: str) -> str:
        raise AssertionError

    def no_parameter() -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="@tool"):
        ToolRegistry(quick(cp), [plain])  # type: ignore[list-item]

    with pytest.raises(TypeError, match="key_fields names some .* 'fligth'"):
        tool(key_fields=["fligth"])(plain)

    def decorated(*args: Any, **named: Any) -> str:  # without functools.wraps
        return plain(*args, **named)

    def unnamed(flight: str = "AZ1", /, **named: Any) -> str:
        return plain(flight, **named)

    for function in (decorated, unnamed):
        with pytest.raises(TypeError, match="passes arguments by name"):
            tool(function)

    with pytest.raises(TypeError, match="list of argument names"):
        tool(key_fields="flight")(plain)

    with pytest.raises(TypeError, match="verify must take"):
        tool(verify=no_parameter)(plain)

    with pytest.raises(TypeError, match="'book' is not a callable"):
        tool("book")  # type: ignore[call-overload]

    with pytest.raises(TypeError, match="verified"):
        tool(plain, verified=True)

    with pytest.raises(TypeError, match="is of one call, not of a tool"):
        tool(idempotency_key="k")(plain)

    for hook in ("requires_approval", "on_approval_required"):
        for wrong in (no_parameter, "text", 7):
            with pytest.raises(TypeError, match=hook):
                quick(cp, **{hook: wrong})

    ledger = quick(cp)

    for handler in (no_parameter, lambda a, b: None, "text", None):
        with pytest.raises(TypeError, match="handler must"):
            await ledger.run(thread, "charge", {}, handler)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="verify must"):
        await ledger.run(thread, "charge", {}, lambda _: None, verify=no_parameter)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="key_fields names 'order'"):
        await ledger.run(thread, "charge", {}, lambda _: None, key_fields=["order"])

    with pytest.raises(TypeError, match="colour"):
        await ledger.run(thread, "charge", {}, lambda _: None, colour=1)  # type: ignore[call-arg]

    assert await cp.load(thread) is None


@pytest.mark.parametrize("how", ["method", "partial", "default", "callable", "kwargs"])
async def test_every_usual_handler_is_accepted(
    cp: Store, thread: str, how: str
) -> None:
    """Bound methods, partials, defaults, callable objects and ``*args``."""

    class Bank:
        def pay(self, effect: Effect) -> str:
            return how

        def __call__(self, effect: Effect) -> str:
            return how

    handlers: dict[str, Any] = {
        "method": Bank().pay,
        "partial": partial(lambda extra, effect: extra, how),
        "default": lambda effect, extra=how: extra,
        "callable": Bank(),
        "kwargs": lambda *effects, **_: how,
    }
    assert await quick(cp).run(thread, "charge", {}, handlers[how]) == how
