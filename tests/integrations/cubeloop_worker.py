"""A cubeloop agent that pays once, in this process or in one that is killed.

``python -m tests.integrations.cubeloop_worker URL THREAD``: runs the agent on "pay",
and is killed when the payment is on record and its tool has not returned.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from cubeloop import Agent, AssistantMessage, Message, TextContent, tool
from cubeloop.providers.faux import FauxProvider, faux_assistant_message, faux_tool_call

from cpkit import Checkpointer, open_checkpointer
from cpkit.effects import Effect, EffectLedger

Payer = Callable[[int], Awaitable[str]]


def payer(cp: Checkpointer[Any], thread_id: str, paid: list[int]) -> Payer:
    """Return a tool's function that pays each amount once in a thread."""
    ledger = EffectLedger(cp)

    async def charge(effect: Effect) -> str:
        amount = effect.args["amount"]
        assert isinstance(amount, int)
        paid.append(amount)
        return f"paid {amount}"

    async def pay(amount: int) -> str:
        """Pay an amount."""
        return str(await ledger.run(thread_id, "pay", {"amount": amount}, charge))

    return pay


def agent(
    cp: Checkpointer[Any],
    thread_id: str,
    script: list[Any],
    pay: Payer,
) -> Agent[Any]:
    """Return an agent whose model answers by a script."""
    provider = FauxProvider()
    provider.set_responses(script)
    return Agent(
        model=provider.model("faux"),
        tools=[tool(pay)],
        checkpointer=cp,
        thread_id=thread_id,
    )


def says(text: str) -> AssistantMessage:
    return faux_assistant_message(text)


def pays(amount: int) -> AssistantMessage:
    return faux_assistant_message(faux_tool_call("pay", {"amount": amount}, id="call"))


def texts(messages: list[Message]) -> list[str]:
    """Return the text of each message."""
    said = []

    for message in messages:
        block = message.content[0]
        said.append(block.text if isinstance(block, TextContent) else block.type)

    return said


async def die_paying(url: str, thread_id: str) -> None:
    async with open_checkpointer(url, message_type=Message) as cp:
        really_pay = payer(cp, thread_id, [])

        async def pay(amount: int) -> str:
            """Pay an amount."""
            await really_pay(amount)
            os.kill(os.getpid(), signal.SIGKILL)
            return "never"

        await agent(cp, thread_id, [pays(7)], pay).prompt("pay")


if __name__ == "__main__":
    asyncio.run(die_paying(sys.argv[1], sys.argv[2]))
