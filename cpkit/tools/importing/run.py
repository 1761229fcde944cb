"""`import_from`: read a source, conversation by conversation, into a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cpkit.errors import CorruptThread, PayloadTooLarge, SerializationError
from cpkit.protocol import Checkpointer
from cpkit.registry import redacted
from cpkit.tools.importing.detect import checked, files_of, local
from cpkit.tools.importing.openai_agents import read_openai_agents
from cpkit.tools.importing.report import Report, Status, ThreadReport
from cpkit.tools.importing.sessions import read_sessions
from cpkit.tools.importing.source import BadSource, Conversation, Differs, Found, Left
from cpkit.tools.importing.transcripts import read_transcripts

__all__ = ["import_from"]


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

    With ``dry_run`` nothing is written. With ``skip_corrupt`` files are imported
    without their corrupt lines; otherwise such files are left. ``on_thread`` is called
    with each conversation's report.

    Raises ``BadSource``, and the store's errors that do not concern one conversation.
    """
    loop = asyncio.get_running_loop()
    reader = ThreadPoolExecutor(1, "cpkit-import")

    try:
        kind = await loop.run_in_executor(reader, checked, source, kind)
        report = Report(redacted(source), kind, dry_run)
        found = _found(kind, source, skip_corrupt)

        try:
            while item := await loop.run_in_executor(reader, next, found, None):
                await _import(item, cp, report, on_thread)
        finally:
            # If this task was cancelled, the worker thread may still read. It runs one
            # call at a time, so the source is closed after that read.
            await loop.run_in_executor(reader, found.close)
    except OSError as exc:
        raise BadSource(f"{redacted(source)}: {exc.strerror or exc}") from exc
    finally:
        reader.shutdown(wait=False)

    return report


def _found(kind: str, source: str, skip_corrupt: bool) -> Generator[Found, None, None]:
    """Yield the conversations of the source. It blocks, and keeps the source open."""
    if kind == "langgraph-postgres" or kind == "langgraph-sqlite":
        yield from _found_by_langgraph(kind, source)
    elif kind == "openai-agents":
        yield from read_openai_agents(local(source))
    elif kind == "sessions":
        yield from read_sessions(files_of(local(source)), skip_corrupt=skip_corrupt)
    else:
        yield from read_transcripts(files_of(local(source)), skip_corrupt=skip_corrupt)


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
        outcome = await _bring(item, cp, report.dry_run)

        if outcome.reason is not None:
            report.left.setdefault(outcome.reason, []).append(outcome.name)

    report.threads.append(outcome)

    if on_thread is not None:
        on_thread(outcome)


async def _bring(
    item: Conversation, cp: Checkpointer[Any], dry_run: bool
) -> ThreadReport:
    names = (item.name, item.thread_id)

    try:
        brought = await item.bring(cp, dry_run=dry_run)
    except (Differs, SerializationError, PayloadTooLarge, CorruptThread) as exc:
        return ThreadReport(*names, "left", item.size, reason=str(exc))

    if brought.written == 0:
        return ThreadReport(*names, "there", item.size)

    status: Status = "grown" if brought.before else "new"
    return ThreadReport(*names, status, item.size, brought.written)
