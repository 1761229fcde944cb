"""The worker process: one agent for each conversation, paused at each kill point.

An agent reports the moment that it has reached to the parent, and pauses until the
parent resumes it or kills this process. Reports are lines of JSON on standard output.
Standard input has the job, and then the threads to resume.
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
    BackendUnavailable,
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


class KillPoints:
    """Reports what agents do to the parent, and pauses them where it may kill them."""

    def __init__(self) -> None:
        self._paused: dict[str, asyncio.Event] = {}

    def report(self, thread_id: str, what: str, **facts: Any) -> None:
        print(json.dumps({"thread": thread_id, "what": what, **facts}), flush=True)

    async def pause(self, thread_id: str, moment: str, **facts: Any) -> None:
        """Report a moment, and wait until the parent resumes the thread."""
        resumed = self._paused[thread_id] = asyncio.Event()
        self.report(thread_id, moment, **facts)
        await resumed.wait()

    async def resume_from(self, orders: asyncio.StreamReader) -> None:
        """Resume the threads that the parent names, until it closes the pipe."""
        while line := await orders.readline():
            self._paused.pop(json.loads(line)).set()

        raise EOFError("the parent process has ended")


class PausingWorld(RecordedWorld):
    """The recorded world, paused after each call that changed something."""

    def __init__(
        self, conversation: Conversation, books: Books, pace: float, points: KillPoints
    ) -> None:
        super().__init__(conversation, books, pace)
        self._thread_id = conversation.thread_id
        self._points = points

    async def use(self, tool: str, args: dict[str, JsonValue], key: str) -> str:
        answer = await super().use(tool, args, key)

        if not is_read_only(tool):
            await self._points.pause(self._thread_id, "effect", tool=tool)

        return answer


class PausingStore:
    """A store whose writes are reported, with a pause at each kill point."""

    def __init__(self, cp: Checkpointer[Message], points: KillPoints) -> None:
        self._cp = cp
        self._points = points
        self._unclear: dict[str, str] = {}

    async def load(self, thread_id: str) -> CheckpointData[Message] | None:
        data = await self._cp.load(thread_id)
        pending = data.pending if data else []
        self._points.report(
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
        extra: Mapping[str, JsonValue] | None = None,
    ) -> int:
        await self._points.pause(thread_id, "append")
        version = await self._cp.append(
            thread_id, messages, expected_version=expected_version, extra=extra
        )
        self._points.report(thread_id, "appended", version=version)
        return version

    async def save_extra(self, thread_id: str, extra: Mapping[str, JsonValue]) -> None:
        await self._cp.save_extra(thread_id, extra)
        self._points.report(thread_id, "planned", plan=extra["plan"])

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        holder = await self._cp.record_issued(thread_id, call)

        if holder is None:
            await self._points.pause(thread_id, "claimed", tool=call.tool_name)
        elif holder.status == "completed":
            self._points.report(thread_id, "replayed", tool=call.tool_name)
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
            self._points.report(
                thread_id,
                "resolved",
                tool=self._unclear.pop(call_id),
                call=call_id,
                landed=success,
            )

        record = await self._cp.record_result(
            thread_id, call_id, result, success=success
        )
        await self._points.pause(thread_id, "recorded", tool=record.call.tool_name)
        return record

    async def find_completed(self, idempotency_key: str) -> CallRecord | None:
        return await self._cp.find_completed(idempotency_key)


class ForgetfulStore(PausingStore):
    """The same store without the record of calls, like that of most agents."""

    async def record_issued(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        self._call = call
        await self._points.pause(thread_id, "claimed", tool=call.tool_name)
        return None

    async def record_result(
        self,
        thread_id: str,
        call_id: str,
        result: JsonValue,
        *,
        success: bool = True,
    ) -> CallRecord:
        await self._points.pause(thread_id, "recorded", tool=self._call.tool_name)
        now = datetime.now(UTC)
        return CallRecord(thread_id, self._call, "completed", 1, now, result, now)


async def work(orders: asyncio.StreamReader, job: dict[str, Any]) -> None:
    points = KillPoints()
    books = Books(Path(job["books"]))
    chosen = choose(read(Path(job["data"]), job["run"]), job["conversations"])
    kind = PausingStore if job["ledger"] else ForgetfulStore

    async with open_checkpointer(job["url"]) as store, asyncio.TaskGroup() as tasks:
        resuming = tasks.create_task(points.resume_from(orders))
        talks = [
            tasks.create_task(
                converse(
                    kind(store, points),
                    conversation.thread_id,
                    PausingWorld(conversation, books, job["pace"], points),
                )
            )
            for conversation in chosen
        ]
        await asyncio.wait(talks)
        resuming.cancel()


async def converse(
    cp: Checkpointer[Message], thread_id: str, world: PausingWorld
) -> None:
    for is_last in (False, False, True):
        try:
            return await Agent(cp, thread_id, world).run()
        except (VersionConflict, BackendUnavailable):
            # A write of the killed worker reached the server after this worker's load;
            # or a server of the store died, and a write may have taken effect or not,
            # or was lost. The next load shows it.
            if is_last:
                raise


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
        # Print one error only: the parent shows the last line of the log.
        traceback.print_exception(group.exceptions[0])
        status = 1

    return status


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
