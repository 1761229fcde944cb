"""An agent that can be killed at any moment: the whole loop, on cpkit's six methods.

Run it, kill it and see it resume::

    python examples/agent.py
    python examples/agent.py --url postgresql://localhost/mydb

Three habits make it safe, and all of them are in this file.

1. A final message is appended at the version that the agent knows. If another process
   writes to the thread, the agent gets `VersionConflict`, and two conversations never
   mix. The last write of a killed process can be such a write.
2. A call that changes something is claimed before it runs, and its result is recorded
   afterwards. Its key is its position in the transcript. The model's tool-call ids are
   not usable as keys, because models repeat them. The arguments are not usable either,
   because a customer may want the same thing twice.
3. A claimed call without a result is *unclear*: the process died, and the effect may
   or may not have happened. The agent asks the other side, which has the key, and acts
   on the answer. It never runs the call again without asking.

A thread must have one runner at a time. Two runners would not corrupt the thread, but
the second one could release a call that the first one is still running.
"""

from __future__ import annotations

import json
from typing import Any, Protocol
from uuid import uuid4

from cpkit import CallRecord, Checkpointer, JsonValue, ToolCall

Message = dict[str, Any]
"""A message in the OpenAI chat format."""


class World(Protocol):
    """The agent's environment: a model, a person, and tools."""

    async def think(self, messages: list[Message]) -> tuple[Message, float] | None:
        """Return the model's reply and its price in dollars, or None at the end."""
        ...

    async def listen(self, messages: list[Message]) -> Message | None:
        """Return the person's next message, or None if the person has left."""
        ...

    def is_read_only(self, tool: str) -> bool:
        """Return whether the tool changes nothing, so that it can run again."""
        ...

    async def use(self, tool: str, args: dict[str, JsonValue], key: str) -> str:
        """Run a tool; the other side stores the key with the request."""
        ...

    async def look_up(self, key: str) -> str | None:
        """Return the other side's answer to a key, or None for an unknown key."""
        ...


class Agent:
    """The runner of one thread."""

    def __init__(self, cp: Checkpointer[Message], thread_id: str, world: World) -> None:
        self.cp = cp
        self.thread_id = thread_id
        self.world = world
        self.replies = 0
        self.spent_usd = 0.0

    async def run(self) -> None:
        """Start the thread, or continue it from its stored state.

        Raises ``VersionConflict`` if another process writes to the thread.
        """
        data = await self.cp.load(self.thread_id)
        messages: list[Message] = []

        if data is not None:
            messages = data.messages
            extra: dict[str, Any] = data.extra
            self.replies = extra.get("replies", 0)
            self.spent_usd = extra.get("spent_usd", 0.0)

            for record in data.pending:
                await self.resolve(record)

        while (message := await self.next_message(messages)) is not None:
            await self.cp.append(
                self.thread_id, [message], expected_version=len(messages)
            )
            messages.append(message)

    async def next_message(self, messages: list[Message]) -> Message | None:
        """Return the next message; it depends on the transcript alone."""
        position, calls = asked_for(messages)
        answered = len(messages) - position - 1

        if answered < len(calls):
            key = call_key(self.thread_id, position, answered)
            return await self.act(calls[answered], key)

        if messages and messages[-1]["role"] in ("user", "tool"):
            return await self.think(messages)

        return await self.world.listen(messages)

    async def think(self, messages: list[Message]) -> Message | None:
        reply = await self.world.think(messages)

        if reply is None:
            return None

        message, price = reply
        self.replies += 1
        self.spent_usd = round(self.spent_usd + price, 6)
        # Before the message: if a crash loses the reply, its price is still spent.
        await self.cp.save_extra(
            self.thread_id,
            {
                "plan": [call["function"]["name"] for call in calls_of(message)],
                "replies": self.replies,
                "spent_usd": self.spent_usd,
            },
        )
        return message

    async def act(self, call: Message, key: str) -> Message:
        tool = call["function"]["name"]
        args = json.loads(call["function"]["arguments"])

        if self.world.is_read_only(tool):
            answer: JsonValue = await self.world.use(tool, args, key)
        else:
            answer = await self.use_once(tool, args, key)

        return {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": tool,
            "content": answer,
        }

    async def use_once(self, tool: str, args: dict[str, JsonValue], key: str) -> Any:
        """Claim, run and record the call, or return the recorded result."""
        while True:
            # The id is new for every attempt; the key names the effect.
            call = ToolCall(uuid4().hex, tool, args, key)
            holder = await self.cp.record_issued(self.thread_id, call)

            if holder is None:
                break

            if holder.status == "completed":
                return holder.result

            await self.resolve(holder)

        answer = await self.world.use(tool, args, key)
        record = await self.cp.record_result(self.thread_id, call.call_id, answer)

        if record.status != "completed":
            raise RuntimeError(f"another runner took over the call {key!r}")

        return record.result

    async def resolve(self, record: CallRecord) -> None:
        """Ask the other side about an unclear call, and record the answer.

        ``success=False`` says that the call had no effect, and frees its key.
        """
        answer = await self.world.look_up(record.call.idempotency_key)
        await self.cp.record_result(
            record.thread_id, record.call.call_id, answer, success=answer is not None
        )


def asked_for(messages: list[Message]) -> tuple[int, list[Message]]:
    """Return the position of the last message that is not a tool's, and its calls."""
    for position in range(len(messages) - 1, -1, -1):
        if messages[position]["role"] != "tool":
            return position, calls_of(messages[position])

    return -1, []


def calls_of(message: Message) -> list[Message]:
    return message.get("tool_calls") or []


def call_key(thread_id: str, position: int, index: int) -> str:
    """Return the key of a call: its message's position, and its index in there."""
    return f"{thread_id}:{position}:{index}"


if __name__ == "__main__":
    from demo.main import main

    raise SystemExit(main())
