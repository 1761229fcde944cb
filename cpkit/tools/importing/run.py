"""`import_from`: read a source, conversation by conversation, into a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from cpkit.errors import CorruptThread, PayloadTooLarge, SerializationError
from cpkit.protocol import Checkpointer
from cpkit.registry import redacted
from cpkit.tools.importing.chatgpt import read_chatgpt
from cpkit.tools.importing.coding import read_claude_code, read_codex
from cpkit.tools.importing.detect import checked, files_of, local
from cpkit.tools.importing.openai_agents import read_openai_agents
from cpkit.tools.importing.report import Report, Status, ThreadReport
from cpkit.tools.importing.sessions import read_sessions
from cpkit.tools.importing.source import BadSource, Conversation, Differs, Found, Left
from cpkit.tools.importing.transcripts import read_transcripts

__all__ = ["import_from"]

T = TypeVar("T")

# What reads the files of a kind; LangGraph and the Agents SDK have databases.
_READERS: dict[str, Any] = {
    "claude-code": read_claude_code,
    "codex": read_codex,
    "chatgpt": read_chatgpt,
    "sessions": read_sessions,
    "transcripts": read_transcripts,
}


async def import_from(
    source: str,
    cp: Checkpointer[Any],
    *,
    kind: str | None = None,
    dry_run: bool = False,
    skip_corrupt: bool = False,
    on_thread: Callable[[ThreadReport], None] | None = None,
) -> Report:
    """Import every conversation of the source into the store, and report on each.

    ``source`` is a path or the URL of LangGraph's Postgres; it is only read. ``kind``
    is one of `KINDS`; without it, the kind is detected. One fenced append writes a
    conversation, or the messages that the store does not have yet. If the thread has
    other messages, the conversation is left.

    With ``dry_run`` nothing is written. With ``skip_corrupt`` corrupt lines are left
    out; otherwise a text in the place of each says so. So does one in the place of what
    the store refuses, such as the largest parts of a message above its limit.
    ``on_thread`` is called with each conversation's report.

    Raises ``BadSource``, and the store's errors that do not concern one conversation.
    """
    reader = _Reader()

    try:
        kind = await reader.call(partial(checked, source, kind))
        report = Report(redacted(source), kind, dry_run)
        found = _found(kind, source, skip_corrupt)

        try:
            while item := await reader.call(partial(next, found, None)):
                await _import(item, cp, report, on_thread)
        finally:
            closed = reader.submit(found.close)

        await asyncio.wrap_future(closed)
    except OSError as exc:
        raise BadSource(f"{redacted(source)}: {exc.strerror or exc}") from exc
    finally:
        reader.end()

    return report


class _Reader:
    """A daemon thread that reads the source, one call after the other.

    A pipe or a large file may take long, and neither a cancelled import nor the end of
    the program waits for it. What was submitted before is still done.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = SimpleQueue()
        Thread(target=self._work, name="cpkit-import", daemon=True).start()

    async def call(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self.submit(function))

    def submit(self, function: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._calls.put((answer, function))
        return answer

    def end(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            answer, function = call

            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function())
                except BaseException as exc:
                    answer.set_exception(exc)


def _found(kind: str, source: str, skip_corrupt: bool) -> Generator[Found, None, None]:
    """Yield the conversations of the source. It blocks, and keeps the source open."""
    if kind == "langgraph-postgres" or kind == "langgraph-sqlite":
        yield from _found_by_langgraph(kind, source)
    elif kind == "openai-agents":
        yield from read_openai_agents(local(source))
    else:
        read = _READERS[kind]
        yield from read(files_of(local(source)), skip_corrupt=skip_corrupt)


def _found_by_langgraph(kind: str, source: str) -> Generator[Found, None, None]:
    try:
        from cpkit.tools.importing import langgraph
    except ModuleNotFoundError as exc:
        raise BadSource(
            f"reading checkpoints needs {exc.name}: pip install 'cpkit[langgraph]'"
        ) from None

    if kind == "langgraph-postgres":
        yield from langgraph.read_langgraph_postgres(source)
    else:
        yield from langgraph.read_langgraph_sqlite(local(source))


async def _import(
    item: Found,
    cp: Checkpointer[Any],
    report: Report,
    on_thread: Callable[[ThreadReport], None] | None,
) -> None:
    """Import one conversation, or report why it is left."""
    if isinstance(item, Left):
        report.left.setdefault(item.reason, []).append(item.name)

        if not item.is_thread:
            return

        outcome = ThreadReport(item.name, None, "left", reason=item.reason)
    else:
        outcome, missing = await _bring(item, cp, report.dry_run)

        for reason in missing:
            report.left.setdefault(reason, []).append(outcome.name)

    report.threads.append(outcome)

    if on_thread is not None:
        on_thread(outcome)


async def _bring(
    item: Conversation, cp: Checkpointer[Any], dry_run: bool
) -> tuple[ThreadReport, list[str]]:
    """Return the outcome, and what is left, the reason for all of it included."""
    names = (item.name, item.thread_id)

    try:
        brought = await item.bring(cp, dry_run=dry_run)
    except (Differs, SerializationError, PayloadTooLarge, CorruptThread) as exc:
        outcome = ThreadReport(*names, "left", item.size, reason=str(exc))
        return outcome, [str(exc)]

    status: Status = "there"

    if brought.written:
        status = "grown" if brought.before else "new"

    outcome = ThreadReport(*names, status, item.size, brought.written)
    return outcome, brought.missing
