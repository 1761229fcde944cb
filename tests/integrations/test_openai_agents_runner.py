"""The SDK's own Runner with sessions in every store."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from agents import RunConfig, Runner, SessionSettings, function_tool
from agents.extensions.memory import EncryptedSession
from agents.run_state import RunState

from cpkit import open_checkpointer
from cpkit.integrations.openai_agents import Session
from cpkit.sync import SyncCheckpointer
from tests.integrations.openai_worker import (
    QUIET,
    ScriptedModel,
    agent,
    calls,
    says,
    texts,
)
from tests.stores import quick_on

ROOT = Path(__file__).parents[2]

TOOL_TURN = ["weather?", "weather()", "sunny in Oslo", "It is sunny."]


@pytest.fixture
def session_id() -> str:
    """An id that is not used in any store."""
    return uuid4().hex


def start(url: str, session_id: str, *work: str) -> subprocess.Popen[str]:
    """Start a worker that waits for a line."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.openai_worker"]
        + [url, session_id, *work],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_all(workers: list[subprocess.Popen[str]]) -> list[list[str]]:
    """Start the workers' work at once; return the lines of each."""
    printed = []

    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"

        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()

        for worker in workers:
            out, _ = worker.communicate()
            assert worker.returncode == 0
            printed.append(out.splitlines())
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()

    return printed


@pytest.mark.parametrize("streamed", [False, True], ids=["run", "streamed"])
async def test_two_turns_with_a_tool_and_a_new_handle(
    url: str, session_id: str, streamed: bool
) -> None:
    """The model sees the first turn in the second, from the store."""
    model = ScriptedModel(
        calls("weather", "1", city="Oslo"), says("It is sunny."), says("You asked.")
    )

    for turn in ("weather?", "what did I ask?"):
        async with open_checkpointer(url) as cp:
            session = Session(session_id, cp)

            if streamed:
                stream = Runner.run_streamed(
                    agent(model), turn, session=session, run_config=QUIET
                )
                kinds = [event.type async for event in stream.stream_events()]
                assert "raw_response_event" in kinds
            else:
                await Runner.run(agent(model), turn, session=session, run_config=QUIET)

    assert [texts(shown) for shown in model.shown] == [
        TOOL_TURN[:1],
        TOOL_TURN[:3],
        [*TOOL_TURN, "what did I ask?"],
    ]

    async with open_checkpointer(url) as cp:
        stored = await Session(session_id, cp).get_items()

    assert texts(stored) == [*TOOL_TURN, "what did I ask?", "You asked."]


@pytest.fixture
def thread_loop() -> Iterator[None]:
    """An event loop of this thread. ``Runner.run_sync`` would leave its own open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.mark.usefixtures("thread_loop")
def test_run_sync_with_a_store_of_its_own_loop(url: str, session_id: str) -> None:
    """``Runner.run_sync`` has an event loop of its own."""
    if url.startswith("memory://"):
        pytest.skip("a store in memory belongs to one event loop")

    model = ScriptedModel(says("Hello."), says("Again."))

    for turn in ("hi", "and?"):
        with SyncCheckpointer(url) as cp:
            session = Session(session_id, cp)
            Runner.run_sync(agent(model), turn, session=session, run_config=QUIET)

    assert texts(model.shown[1]) == ["hi", "Hello.", "and?"]


async def test_a_session_serves_a_loop_in_each_thread(
    url: str, session_id: str
) -> None:
    """Each loop adds an item, and each item is popped once."""

    async def use(number: int) -> list[Any]:
        await session.add_items([{"role": "user", "content": str(number)}])
        # The other loops may have popped every item by now.
        assert len(await session.get_items()) <= 4
        return [await session.pop_item() for _ in range(2)]

    async with open_checkpointer(url) as cp:
        session = Session(session_id, cp)
        runs = [asyncio.to_thread(asyncio.run, use(number)) for number in range(4)]
        popped = [item for items in await asyncio.gather(*runs) for item in items]
        assert await session.get_items() == []

    assert sorted(int(item["content"]) for item in popped if item) == [0, 1, 2, 3]


async def test_a_limit_is_honoured_by_the_runner(url: str, session_id: str) -> None:
    """The limit of a run replaces that of the session."""
    settings = SessionSettings(limit=3)

    async with open_checkpointer(url) as cp:
        session = Session(session_id, cp, session_settings=settings)
        await session.add_items([{"role": "user", "content": str(n)} for n in range(6)])
        model = ScriptedModel(says("a"), says("b"))
        await Runner.run(agent(model), "new", session=session, run_config=QUIET)
        config = RunConfig(tracing_disabled=True, session_settings={"limit": 1})
        await Runner.run(agent(model), "newer", session=session, run_config=config)

    assert texts(model.shown[0]) == ["3", "4", "5", "new"]
    assert texts(model.shown[1]) == ["a", "newer"]


async def test_a_run_that_waits_for_approval_resumes_on_a_new_handle(
    url: str, session_id: str
) -> None:
    """The history has each item once."""
    paid: list[int] = []

    @function_tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pay an amount."""
        paid.append(amount)
        return f"paid {amount}"

    model = ScriptedModel(calls("pay", "1", amount=7), says("Done."))
    payer = agent(model, pay)

    async with open_checkpointer(url) as cp:
        session = Session(session_id, cp)
        first = await Runner.run(payer, "pay 7", session=session, run_config=QUIET)
        assert len(first.interruptions) == 1
        saved = first.to_state().to_string()

    assert paid == []

    async with open_checkpointer(url) as cp:
        state: Any = await RunState.from_string(payer, saved)
        state.approve(state.get_interruptions()[0])
        session = Session(session_id, cp)
        result = await Runner.run(payer, state, session=session, run_config=QUIET)
        assert result.final_output == "Done."
        assert texts(await session.get_items()) == ["pay 7", "pay()", "paid 7", "Done."]

    assert paid == [7]


async def test_a_failed_run_leaves_its_items(url: str, session_id: str) -> None:
    """If a tool raises, the user's message and the call are stored."""

    @function_tool(failure_error_function=None)
    def breaks() -> str:
        """Break."""
        raise RuntimeError("broken")

    async with open_checkpointer(url) as cp:
        session = Session(session_id, cp)
        model = ScriptedModel(calls("breaks", "1"))

        with pytest.raises(Exception, match="broken"):
            await Runner.run(
                agent(model, breaks), "go", session=session, run_config=QUIET
            )

    async with open_checkpointer(url) as cp:
        again = Session(session_id, cp)
        assert texts(await again.get_items())[:1] == ["go"]
        model = ScriptedModel(says("Again."))
        await Runner.run(agent(model), "still there?", session=again, run_config=QUIET)
        assert texts(await again.get_items())[-2:] == ["still there?", "Again."]


async def test_the_sdks_encryption_wraps_it(url: str, session_id: str) -> None:
    """The store has only encrypted items, and they are decrypted on load."""
    async with open_checkpointer(url) as cp:
        session = Session(session_id, cp)
        sealed = EncryptedSession(session_id, session, "secret", ttl=3600)
        model = ScriptedModel(says("Hidden."), says("Still hidden."))
        await Runner.run(agent(model), "hide", session=sealed, run_config=QUIET)
        await Runner.run(agent(model), "and?", session=sealed, run_config=QUIET)
        assert texts(model.shown[1]) == ["hide", "Hidden.", "and?"]
        assert "Hidden" not in json.dumps(await session.get_items())
        popped: Any = await sealed.pop_item()
        assert texts([popped]) == ["Still hidden."]


@pytest.mark.long
async def test_another_process_continues_the_conversation(
    shared_url: str, session_id: str
) -> None:
    """Two processes run one turn each."""
    for text, shown in [
        ("first", ["first"]),
        ("second", ["first", "answer to first", "second"]),
    ]:
        worker = start(shared_url, session_id, "turn", text)
        (printed,) = await asyncio.to_thread(run_all, [worker])
        assert [json.loads(line) for line in printed] == [shown]


@pytest.mark.parametrize("shared_url", quick_on(), indirect=True)
async def test_each_item_is_popped_by_one_process(
    shared_url: str, session_id: str
) -> None:
    """Two processes and two handles pop every item once."""
    async with open_checkpointer(shared_url) as cp:
        session, other = Session(session_id, cp), Session(session_id, cp)
        await session.add_items(
            [{"role": "user", "content": str(n)} for n in range(40)]
        )
        workers = [start(shared_url, session_id, "pop") for _ in range(2)]
        racing = asyncio.to_thread(run_all, workers)
        printed, here = await asyncio.gather(racing, some(session, other))
        assert await session.get_items() == []

    popped = [json.loads(line) for lines in printed for line in lines] + here
    assert sorted(int(item["content"]) for item in popped) == list(range(40))


async def some(*sessions: Session) -> list[Any]:
    popped = await asyncio.gather(*(one.pop_item() for one in sessions * 3))
    return [item for item in popped if item is not None]


@pytest.mark.parametrize("shared_url", quick_on(), indirect=True)
async def test_items_of_one_call_stay_together(
    shared_url: str, session_id: str
) -> None:
    """Two processes add items, and none is lost."""
    workers = [start(shared_url, session_id, "add", name) for name in "ab"]
    await asyncio.to_thread(run_all, workers)

    async with open_checkpointer(shared_url) as cp:
        stored: list[Any] = await Session(session_id, cp).get_items()

    pairs = list(zip(stored[::2], stored[1::2], strict=True))
    assert all(first == {**second, "half": 0} for first, second in pairs)

    for name in "ab":
        numbers = [item["n"] for item, _ in pairs if item["of"] == name]
        assert numbers == list(range(20))


async def test_half_a_character_costs_no_turn(url: str, session_id: str) -> None:
    """A tool's output may be cut in the middle of one. The next turn sees it."""

    @function_tool
    def fetch() -> str:
        """Return the first bytes of a page."""
        return "cut \ud83d"

    model = ScriptedModel(calls("fetch", "1"), says("It is \udfff cut."), says("Yes."))

    for turn in ("fetch it", "is it \ud83d cut?"):
        async with open_checkpointer(url) as cp:
            session = Session(session_id, cp)
            await Runner.run(
                agent(model, fetch), turn, session=session, run_config=QUIET
            )

    assert texts(model.shown[-1]) == [
        "fetch it",
        "fetch()",
        "cut \ud83d",
        "It is \udfff cut.",
        "is it \ud83d cut?",
    ]
