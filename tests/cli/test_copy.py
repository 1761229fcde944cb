"""``cpkit copy``: copy a whole store into any other, despite crashes and conflicts."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpkit import open_checkpointer
from cpkit.cli.stores import Store
from cpkit.records import ThreadDump
from cpkit.tools.copying import copy_store
from tests.cli.command import call, forked, in_store, invoke, run_main
from tests.cli.dying import Dying
from tests.cli.stocked import everything, stock
from tests.processes import Forked
from tests.stores import SHARED, fresh_url


@asynccontextmanager
async def memory() -> AsyncIterator[Any]:
    """A store in memory, for tests that pass on any store."""
    async with open_checkpointer("memory://", message_type=Any) as cp:
        yield cp


@pytest.fixture
def urls(tmp_path: Path) -> tuple[str, str]:
    """A stocked store to copy from and a missing one to copy into."""
    src, dst = fresh_url("sqlite", tmp_path, "a"), fresh_url("sqlite", tmp_path, "b")
    in_store(src, stock)
    return src, dst


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        pytest.param(*pair, marks=pytest.mark.long if n else ())
        for n, pair in enumerate(zip(SHARED, [*SHARED[1:], SHARED[0]], strict=True))
    ],
)
def test_a_copy_is_exact(tmp_path: Path, source: str, destination: str) -> None:
    """Messages, extra, calls and times are equal, and a second copy writes nothing."""
    src = fresh_url(source, tmp_path, "from")
    dst = fresh_url(destination, tmp_path, "to")
    in_store(src, stock)

    first = run_main("copy", src, dst, "--json")
    assert (first.code, first.err) == (0, "")
    assert first.json["complete"]
    assert in_store(dst, everything) == in_store(src, everything)
    assert first.json["checked"] == first.json["threads"] == first.json["copied"] == 8
    assert first.json["messages"] == 1200 + 4 + 1
    assert first.json["calls"] == 10

    again = invoke("copy", src, dst, "--update")
    assert again.code == 0
    assert "0 copied, 0 updated, 8 already in DST; 8 verified" in again.out
    assert "0 messages, 0 calls" in again.out
    assert in_store(dst, everything) == in_store(src, everything)


async def _append(cp: Any) -> None:
    await cp.append("plain", [{"more": 1}])


async def _new_extra(cp: Any) -> None:
    await cp.save_extra("plain", {"more": 1})


async def _changed_extra(cp: Any) -> None:
    await cp.save_extra("plain", {"a": "newer"})


async def _outcome(cp: Any) -> None:
    await cp.record_result("plain", "waits", "done")


async def _new_attempt(cp: Any) -> None:
    await call(cp, "plain", "retried", "failed", success=True)


async def _outcome_of_an_erased_call(cp: Any) -> None:
    await cp.record_result("reborn", "gone-open", "late")


async def _second_life(cp: Any) -> None:
    await cp.append("pruned", [{"back": True}])


async def _trim(cp: Any) -> None:
    await cp.trim("plain", 700)


async def _trim_and_append(cp: Any) -> None:
    await cp.append("plain", [{"more": 1}])
    await cp.trim("plain", 1201)


@pytest.mark.parametrize(
    "change",
    [
        _trim,
        _trim_and_append,
        _append,
        _new_extra,
        _changed_extra,
        _outcome,
        _new_attempt,
        _outcome_of_an_erased_call,
        _second_life,
    ],
)
async def test_a_changed_thread_is_replaced_on_request(change: Any) -> None:
    """Without the option it is reported and not changed."""
    async with memory() as src, memory() as dst:
        await stock(src)
        assert (await copy_store(src, dst)).is_complete
        before = await everything(dst)
        await change(src)

        report = await copy_store(src, dst)
        assert not report.is_complete
        assert len(report.changed) == 1
        assert (report.conflicts, report.moved) == ([], [])
        assert await everything(dst) == before

        report = await copy_store(src, dst, update=True)
        assert report.is_complete
        assert (report.updated, report.copied, report.already) == (1, 0, 7)
        assert await everything(dst) == await everything(src)


def test_the_command_updates_a_copy(urls: tuple[str, str]) -> None:
    """It names the threads that changed, and the option that replaces them."""
    src, dst = urls
    assert invoke("copy", src, dst).code == 0
    in_store(src, _append)
    ended = invoke("copy", src, dst)
    assert ended.code == 1
    assert ended.err == "changed since an earlier copy, add --update: plain\n"
    ended = invoke("copy", src, dst, "--update")
    assert (ended.code, ended.err) == (0, "")
    assert "0 copied, 1 updated, 7 already in DST; 8 verified" in ended.out
    assert "1 message, 0 calls" in ended.out
    assert in_store(dst, everything) == in_store(src, everything)


async def _other_messages(cp: Store) -> None:
    await cp.append("plain", [{"n": "another"}])


async def _more_messages(cp: Store) -> None:
    await cp.append("plain", [{"n": n, "x": 1.0, "big": 10**30} for n in range(1300)])


async def _other_number(cp: Store) -> None:
    await cp.append("plain", [{"n": 0.0, "x": 1.0, "big": 10**30}])


async def _own_extra(cp: Store) -> None:
    await cp.save_extra("plain", {"own": 1})


async def _created_apart(cp: Store) -> None:
    await cp.append("plain", [{"n": 0, "x": 1.0, "big": 10**30}])


async def _own_call(cp: Store) -> None:
    await call(cp, "plain", "own", "own", success=True)


async def _held_elsewhere(cp: Store) -> None:
    await call(cp, "other", "x", "paid", success=True)


async def _deleted(cp: Store) -> None:
    await call(cp, "plain", "pays", "paid", success=True)
    await cp.delete_thread("plain")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_messages, "message 0 differs in the destination"),
        (_other_number, "message 0 differs in the destination"),
        (_more_messages, "the destination has 100 more messages"),
        (_own_extra, "the extra key 'own', which the source lacks"),
        (_created_apart, "a thread that was created at another time"),
        (_own_call, "call 'waits' differs in the destination (call_id, "),
        (_held_elsewhere, "key 'paid' is on record in thread 'other'"),
        (_deleted, "the destination has deleted it, and keeps its keys"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--update"]])
def test_nothing_is_overwritten(
    urls: tuple[str, str], change: Any, words: str, options: list[str]
) -> None:
    """A thread with other content in the destination is not changed; the others are
    copied."""
    src, dst = urls
    in_store(dst, change)

    async def plain(cp: Store) -> Any:
        return await cp.dump_thread("plain")

    before = in_store(dst, plain)
    ended = invoke("copy", src, dst, *options)
    assert ended.code == 1
    assert ended.err.startswith("conflict: thread 'plain': ")
    assert words in ended.err
    assert in_store(dst, plain) == before
    copied, whole = in_store(dst, everything), in_store(src, everything)
    assert {**copied, "plain": 0, "other": 0} == {**whole, "plain": 0, "other": 0}


async def _appended_here(cp: Any) -> None:
    await cp.append("plain", [{"here": 1}])


async def _called_here(cp: Any) -> None:
    await call(cp, "plain", "here", "here")


async def _extra_here(cp: Any) -> None:
    await cp.save_extra("plain", {"a": "here"})


async def _other_outcome(cp: Any) -> None:
    await cp.record_result("plain", "waits", "here")


async def _source_deletes(src: Any) -> None:
    await src.delete_thread("plain")


async def _nothing(_: Any) -> None:
    """Change nothing."""


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        (_trim, _nothing, "the destination has trimmed 700 messages that the source"),
        (_appended_here, _trim, "the destination has 1 more messages"),
        (_appended_here, _nothing, "the destination has 1 more messages"),
        (_called_here, _nothing, "the call 'here', which the source lacks"),
        (_extra_here, _nothing, "the destination has a later change"),
        (_other_outcome, _outcome, "call 'waits' differs in the destination (result,"),
        (_nothing, _source_deletes, "the source has deleted it"),
    ],
)
async def test_a_copy_that_was_used_is_not_replaced(
    here: Any, there: Any, words: str
) -> None:
    """A change in the destination, or a deletion in the source, is a conflict."""
    async with memory() as src, memory() as dst:
        await stock(src)
        await copy_store(src, dst)
        await there(src)
        await here(dst)
        before = await everything(dst)
        report = await copy_store(src, dst, update=True)
        assert [one.thread_id for one in report.conflicts] == ["plain"]
        assert words in report.conflicts[0].reason
        assert await everything(dst) == before


def test_a_message_that_is_too_large_fails_alone(urls: tuple[str, str]) -> None:
    """The error names the thread and the option; the other threads are copied."""
    src, dst = urls

    async def grow(cp: Store) -> None:
        await cp.append("large", ["x" * 2000])

    in_store(src, grow)
    ended = invoke("copy", src, f"{dst}?max_payload=1000")
    assert ended.code == 1
    assert "failed: thread 'large'" in ended.err
    assert "max_payload" in ended.err
    assert invoke("copy", src, dst).code == 0


async def test_an_update_that_fails_keeps_the_earlier_copy() -> None:
    """The destination refuses a new message, and still has the thread as it was."""
    async with (
        memory() as src,
        open_checkpointer("memory://", message_type=Any, max_payload=1000) as dst,
    ):
        cp: Any = dst
        await stock(src)
        assert (await copy_store(src, cp)).is_complete
        before = await everything(cp)
        await src.append("plain", ["x" * 2000])
        report = await copy_store(src, cp, update=True)
        assert [one.thread_id for one in report.failures] == ["plain"]
        assert await everything(cp) == before


async def test_an_update_frees_the_key_of_another_thread() -> None:
    """A later attempt is copied although its thread is listed before the earlier one's.

    Until the thread ``z`` is updated, the destination has its attempt as issued.
    """
    async with memory() as src, memory() as dst:
        await call(src, "z", "one", "key")
        assert (await copy_store(src, dst)).is_complete
        await src.record_result("z", "one", "failed", success=False)
        await call(src, "a", "two", "key", success=True)

        report = await copy_store(src, dst)
        assert report.changed == ["z"]
        assert [one.thread_id for one in report.conflicts] == ["a"]

        assert (await copy_store(src, dst, update=True)).is_complete
        assert await everything(dst) == await everything(src)


class Meddled:
    """A store where something happens before or after a method's first call."""

    def __init__(
        self, cp: Any, method: str, before: Any = None, after: Any = None
    ) -> None:
        self._cp = cp
        self._method = method
        self._before = before
        self._after = after

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self._cp, name)

        if name != self._method:
            return method

        async def meddled(*args: Any, **options: Any) -> Any:
            before, self._before = self._before, None
            after, self._after = self._after, None

            if before is not None:
                await before(*args)

            answer = await method(*args, **options)

            if after is not None:
                await after(*args)

            return answer

        return meddled


async def test_changes_during_a_copy_are_reported() -> None:
    """The report names a thread that grew, one that was created, and one that was
    deleted but keeps its keys."""
    async with memory() as src, memory() as dst:
        await src.append("quiet", [{"n": 1}])
        await src.append("busy", [{"n": 1}])
        await src.append("deleted", [{"n": 1}])
        await call(src, "deleted", "c", "k")

        async def go_on() -> None:
            await src.append("busy", [{"n": 2}])
            await src.append("a-new-one", [{"n": 1}])
            await src.delete_thread("deleted")

        meddled: Any = Meddled(dst, "list_threads", before=go_on)
        report = await copy_store(src, meddled)
        assert report.moved == ["a-new-one", "busy", "deleted"]
        assert not report.is_complete
        report = await copy_store(src, dst, update=True)
        assert (report.copied, report.updated) == (1, 1)
        assert [one.thread_id for one in report.conflicts] == ["deleted"]


async def test_two_copies_do_not_conflict() -> None:
    """Another copy creates the thread between this copy's read and its write."""
    async with memory() as src, memory() as dst:
        await stock(src)
        meddled: Any = Meddled(dst, "restore_thread", before=dst.restore_thread)
        report = await copy_store(src, meddled)
        assert report.is_complete
        assert (report.copied, report.already) == (7, 1)
        assert await everything(dst) == await everything(src)


async def test_two_updates_do_not_conflict() -> None:
    """Another update replaces the thread between this one's deletion and its write."""
    async with memory() as src, memory() as dst:
        await stock(src)
        await copy_store(src, dst)
        await src.append("plain", [{"more": 1}])
        meddled: Any = Meddled(dst, "restore_thread", before=dst.restore_thread)
        assert (await copy_store(src, meddled, update=True)).is_complete
        assert await everything(dst) == await everything(src)


async def test_a_write_right_after_the_copy_is_reported() -> None:
    """The thread is compared after it was written."""
    async with memory() as src, memory() as dst:
        await src.append("t", [{"n": 1}])

        async def append(dump: ThreadDump) -> None:
            await dst.append(dump.thread_id, [{"n": 2}])

        meddled: Any = Meddled(dst, "restore_thread", after=append)
        report = await copy_store(src, meddled)
        assert "1 more messages" in report.conflicts[0].reason
        assert report.checked == 0


async def test_a_dump_that_makes_no_sense_fails_alone() -> None:
    """A person may have edited an export."""
    async with memory() as src, memory() as dst:
        await stock(src)
        dump = await src.dump_thread("plain")
        broken = replace(dump.calls[0], attempt=0)

        class Edited:
            list_threads = staticmethod(src.list_threads)

            async def dump_thread(self, thread_id: str) -> Any:
                found = await src.dump_thread(thread_id)
                is_plain = thread_id == "plain"
                return replace(found, calls=[broken]) if is_plain else found

        report = await copy_store(Edited(), dst)
        assert [one.thread_id for one in report.failures] == ["plain"]
        assert "attempt 0" in report.failures[0].reason
        assert report.copied == 7


class Dead(Exception):
    """Raised in place of a process's death."""


@pytest.mark.parametrize("is_applied", [False, True])
@pytest.mark.parametrize("update", [False, True])
async def test_a_copy_can_die_at_any_write(is_applied: bool, update: bool) -> None:
    """After a death before or after any write, the next copy completes the work."""
    deaths = 0

    while True:
        async with memory() as src, memory() as dst:
            await stock(src)

            if update:
                assert (await copy_store(src, dst)).is_complete
                await _append(src)
                await _new_attempt(src)
                await _second_life(src)

            dying: Any = Dying(dst, deaths + 1, Dead, is_applied=is_applied)

            try:
                await copy_store(src, dying, update=update)
                break
            except Dead:
                deaths += 1

            report = await copy_store(src, dst, update=update)
            assert report.is_complete, (deaths, report)
            assert await everything(dst) == await everything(src)

    assert deaths >= (4 if update else 8)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "destination"),
    [
        *zip(SHARED, [*SHARED[1:], SHARED[0]], strict=True),
    ],
)
def test_a_copy_that_is_killed_is_completed(
    tmp_path: Path, source: str, destination: str
) -> None:
    """After kill -9 at any write, the command copies the rest."""
    src = fresh_url(source, tmp_path, "from")
    in_store(src, stock)
    whole = in_store(src, everything)
    dst = fresh_url(destination, tmp_path, "to")
    deaths = 0

    # Each process continues where the last one died, and dies some writes later.
    for limit in (1, 2, 1, 3):
        ended = forked(src, dst, str(limit), module="tests.cli.dying")
        deaths += ended.code == -signal.SIGKILL
        assert ended.code in (0, -signal.SIGKILL), ended.err

    assert deaths >= 2
    ended = run_main("copy", src, dst, "--json")
    assert ended.json["complete"], ended.out
    assert in_store(dst, everything) == whole


def test_the_command_itself_is_killed(tmp_path: Path) -> None:
    """The next run reports which threads the killed run had copied."""
    src, dst = fresh_url("sqlite", tmp_path, "a"), fresh_url("sqlite", tmp_path, "b")

    async def many(cp: Store) -> None:
        for n in range(400):
            await cp.append(f"t{n:03}", [{"n": n}] * 5)
            await call(cp, f"t{n:03}", "c", f"k{n}", success=True)

    async def size(cp: Store) -> int:
        return len(await cp.list_threads(limit=1000))

    in_store(f"{src}?durability=normal", many)

    with Forked("cpkit", "copy", src, dst) as process:
        while not (tmp_path / "b.db").exists() or in_store(dst, size) < 10:
            assert process.returncode is None, "it was over before it was killed"
            time.sleep(0.01)

    assert process.returncode == -signal.SIGKILL
    ended = invoke("copy", src, dst, "--json").json
    assert ended["complete"]
    assert ended["already"] > 0
    assert ended["copied"] + ended["already"] == ended["checked"] == 400
    assert in_store(dst, size) == 400


@pytest.mark.long
def test_two_copies_at_once(urls: tuple[str, str]) -> None:
    """Both succeed, and the destination has everything once."""
    src, dst = urls

    with Forked("cpkit", "copy", src, dst) as one:
        assert forked("copy", src, dst).code == 0
        assert one.wait() == 0

    assert in_store(dst, everything) == in_store(src, everything)
