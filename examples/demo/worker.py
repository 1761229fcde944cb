"""The process that is killed: an agent for each conversation, each on a leash.

An agent on a leash tells its parent which moment it has come to and waits to be let go
on, so that the parent can kill this process exactly there. Lines of JSON go out by
standard output; threads to let go come in by standard input, after the job.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent import Agent, Message

from cpkit import (
    CallRecord,
    CheckpointData,
    Checkpointer,
    JsonValue,
    ToolCall,
    VersionConflict,
    open_checkpointer,
)

from .airline import Books
from .recordings import Conversation, RecordedWorld, choose, is_read_only, read


class Leash:
    """What the agents tell the parent, and how it holds them back."""

    def __init__(self) -> None:
        self._held: dict[str, asyncio.Event] = {}

    def tell(self, thread_id: str, what: str, **facts: Any) -> None:
        print(json.dumps({"thread": thread_id, "what": what, **facts}), flush=True)

    async def hold(self, thread_id: str, moment: str, **facts: Any) -> None:
        """Tell of a moment, and wait to be let go or to be killed."""
        let_go = self._held[thread_id] = asyncio.Event()
        self.tell(thread_id, moment, **facts)
        await let_go.wait()

    async def obey(self, orders: asyncio.StreamReader) -> None:
        while line := await orders.readline():
            self._held.pop(json.loads(line)).set()

        raise EOFError("the parent is gone")


class LeashedWorld(RecordedWorld):
    """The recorded world; a call that changed something is told."""

    def __init__(
        self, conversation: Conversation, books: Books, pace: float, leash: Leash
    ) -> None:
        super().__init__(conversation, books, pace)
        self._thread_id = conversation.thread_id
        self._leash = leash

    async def use(self, tool: str, args: dict[str, JsonValue], key: str) -> str:
        answer = await super().use(tool, args, key)

        if not is_read_only(tool):
            await self._leash.hold(self._thread_id, "effect", tool=tool)

        return answer


class LeashedStore:
    """The six methods of a store, told and held."""

    def __init__(self, cp: Checkpointer[Message], leash: Leash) -> None:
        self._cp = cp
        self._leash = leash
        self._unclear: dict[str, str] = {}

    async def load(self, thread_id: str) -> CheckpointData[Message] | None:
        data = await self._cp.load(thread_id)
        pending = data.pending if data else []
        self._leash.tell(
            thread_id,
            "loaded",
            version=data.version if data else 0,
            pending=len(pending),
        )
        self._unclear |= {r.call.call_id: r.call.tool_name for r in pending}
        return data

    async def append(
        self,
        thread_id: str,
        messages: Sequence[Message],
        *,
        expected_version: int | None = None,
    ) -> int:
        await self._leash.hold(thread_id, "append")
        version = await self._cp.append(
            thread_id, messages, expected_version=expected_version
        )
        self._leash.tell(thread_id, "appended", version=version)
        return version

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await self._cp.save_extra(thread_id, extra)
        self._leash.tell(thread_id, "planned", plan=extra["plan"])

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        holder = await self._cp.record_issued(thread_id, call)

        if holder is None:
            await self._leash.hold(thread_id, "claimed", tool=call.tool_name)
        elif holder.status == "completed":
            self._leash.tell(thread_id, "replayed", tool=call.tool_name)
        else:
            self._unclear[holder.call.call_id] = call.tool_name

        return holder

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        if call_id in self._unclear:
            self._leash.tell(
                thread_id,
                "settled",
                tool=self._unclear.pop(call_id),
                call=call_id,
                landed=success,
            )

        record = await self._cp.record_result(
            thread_id, call_id, result, success=success
        )
        await self._leash.hold(thread_id, "recorded", tool=record.call.tool_name)
        return record

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        return await self._cp.find_completed(idempotency_key)


class ForgetfulStore(LeashedStore):
    """The same store, with every call forgotten at once: what most agents have."""

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._call = call
        await self._leash.hold(thread_id, "claimed", tool=call.tool_name)
        return None

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        await self._leash.hold(thread_id, "recorded", tool=self._call.tool_name)
        now = datetime.now(UTC)
        return CallRecord(thread_id, self._call, "completed", 1, now, result, now)


async def work(orders: asyncio.StreamReader, job: dict[str, Any]) -> None:
    leash = Leash()
    books = Books(Path(job["books"]))
    chosen = choose(read(Path(job["data"]), job["run"]), job["conversations"])
    kind = LeashedStore if job["ledger"] else ForgetfulStore

    async with open_checkpointer(job["url"]) as store, asyncio.TaskGroup() as tasks:
        obeying = tasks.create_task(leash.obey(orders))
        talks = [
            tasks.create_task(
                converse(
                    kind(store, leash),
                    conversation.thread_id,
                    LeashedWorld(conversation, books, job["pace"], leash),
                )
            )
            for conversation in chosen
        ]
        await asyncio.wait(talks)
        obeying.cancel()


async def converse(
    cp: Checkpointer[Message], thread_id: str, world: LeashedWorld
) -> None:
    try:
        await Agent(cp, thread_id, world).run()
    except VersionConflict:
        # The worker that was killed had sent a write that reached the server after
        # our load. It can have been only one: what the store says now will stay.
        await Agent(cp, thread_id, world).run()


async def main() -> int:
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    job = json.loads(await orders.readline())
    status = 0

    try:
        await work(orders, job)
    except* Exception as group:
        # One of them, so that the last line says what was wrong.
        traceback.print_exception(group.exceptions[0])
        status = 1

    return status


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
