"""cubeloop's own agent on a store without an adapter."""

from __future__ import annotations

import ast
import asyncio
import re
import signal
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any
from uuid import uuid4

import cubeloop
import pytest
from cubeloop import Message, ToolResultMessage
from cubeloop.hitl import CheckpointedChannel

from cpkit import open_checkpointer
from cpkit.driver.abilities import FullHandle
from tests.integrations.cubeloop_worker import agent, payer, pays, says, texts

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations" / "cubeloop.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)

OURS = {"load", "append", "save_extra"}
"""What cubeloop asks of any checkpointer, and all that it may find in ours."""


@pytest.fixture
def thread_id() -> str:
    """An id that is not used in any store."""
    return uuid4().hex


async def test_an_agent_continues_on_another_handle(url: str, thread_id: str) -> None:
    """Messages are loaded as equal objects of cubeloop's classes, with extra."""
    shown: list[list[str]] = []

    def watches(messages: list[Message], _model: object) -> Any:
        shown.append(texts(messages))
        return says("done")

    async with open_checkpointer(url, message_type=Message) as cp:
        pay = payer(cp, thread_id, [])
        first = agent(cp, thread_id, [pays(7), says("paid it")], pay)
        first.state.extra["plan"] = ["pay", "rest"]
        await first.prompt("pay 7")
        said = list(first.state.messages)

    assert texts(said) == ["pay 7", "tool_call", "paid 7", "paid it"]

    async with open_checkpointer(url, message_type=Message) as cp:
        second = agent(cp, thread_id, [watches], payer(cp, thread_id, []))
        await second.prompt("and now?")
        data = await cp.load(thread_id)

    assert second.state.messages[:4] == said
    assert [type(m) for m in second.state.messages[:4]] == [type(m) for m in said]
    assert second.state.extra == {"plan": ["pay", "rest"]}
    assert shown == [[*texts(said), "and now?"]]
    assert data is not None
    assert data.messages == second.state.messages
    assert data.extra == {"plan": ["pay", "rest"]}


async def test_a_cancelled_tool_gets_its_result(url: str, thread_id: str) -> None:
    """cubeloop appends the missing result, and the thread can continue."""
    started = asyncio.Event()

    async def pay(amount: int) -> str:
        """Pay an amount."""
        started.set()
        await asyncio.Event().wait()
        return str(amount)

    async with open_checkpointer(url, message_type=Message) as cp:
        run = asyncio.create_task(agent(cp, thread_id, [pays(7)], pay).prompt("pay"))
        await started.wait()
        run.cancel()

        with pytest.raises(asyncio.CancelledError):
            await run

    async with open_checkpointer(url, message_type=Message) as cp:
        data = await cp.load(thread_id)
        assert data is not None
        last = [m for m in data.messages if isinstance(m, ToolResultMessage)]
        assert [m.tool_call_id for m in last] == ["call"]
        second = agent(cp, thread_id, [says("fine")], pay)
        await second.prompt("go on")
        assert texts(second.state.messages)[-1] == "fine"


async def test_a_killed_agent_resumes_and_pays_once(
    shared_url: str, thread_id: str
) -> None:
    """The open call gets the recorded result, as on the page."""
    command = [sys.executable, "-m", "tests.integrations.cubeloop_worker"]
    dead = await asyncio.to_thread(
        subprocess.run, [*command, shared_url, thread_id], cwd=ROOT
    )
    assert dead.returncode == -signal.SIGKILL
    shown: dict[str, Any] = {}
    exec(BLOCKS[1], shown)
    paid: list[int] = []

    async with open_checkpointer(shared_url, message_type=Message) as cp:
        left = await cp.load(thread_id)
        assert left is not None
        assert texts(left.messages) == ["pay", "tool_call"]
        pay = payer(cp, thread_id, paid)
        again = agent(cp, thread_id, [says("All paid.")], pay)
        await shown["go_on"](again, cp, thread_id, {"pay": pay})
        data = await cp.load(thread_id)

    assert paid == []
    assert data is not None
    assert texts(data.messages) == ["pay", "tool_call", "paid 7", "All paid."]
    assert data.messages == again.state.messages


def probed() -> set[str]:
    """Return every attribute of a checkpointer that cubeloop's source uses."""
    names = set()

    for path in Path(cubeloop.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")

        for node in ast.walk(ast.parse(text if "checkpointer" in text else "")):
            if isinstance(node, ast.Attribute) and is_checkpointer(node.value):
                names.add(node.attr)
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
                and is_checkpointer(node.args[0])
            ):
                assert isinstance(node.args[1], ast.Constant)
                names.add(str(node.args[1].value))

    return names


def is_checkpointer(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return str(name).endswith("checkpointer")


def test_cubeloop_finds_only_the_three_methods() -> None:
    """No handle has another name that cubeloop looks for."""
    assert version("cubeloop") == "0.15.3"
    names = probed()
    assert names >= {*OURS, "claim_run", "save_pending_request", "load_hitl_answer"}

    drivers = [driver.load() for driver in entry_points(group="cpkit.drivers")]
    # A driver is a store behind a handle, or a handle itself.
    handles = [driver for driver in drivers if hasattr(driver, "record_issued")]

    for handle in (FullHandle, *handles):
        assert names & set(dir(handle)) == OURS


async def test_cubeloop_refuses_features_that_need_other_methods(
    thread_id: str,
) -> None:
    """It raises its own errors at once."""
    async with open_checkpointer("memory://", message_type=Message) as cp:
        own = agent(cp, thread_id, [], payer(cp, thread_id, []))

        assert await own.load_pending_hitl_request() is None

        with pytest.raises(Exception, match="does not support fork"):
            await own.fork(thread_id, "other", after_run_id="run")

        with pytest.raises(Exception, match="CheckpointedChannel requires"):
            CheckpointedChannel(
                checkpointer=cp,
                thread_id=thread_id,
            )
