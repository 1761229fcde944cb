"""``cpkit copy``: copy a whole store into any other, despite crashes and conflicts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cpkit import ToolCall, open_checkpointer
from cpkit.cli.stores import Store
from cpkit.tools.copying import copy_store
from cpkit.tools.copying.calls import GRAVES
from tests.cli.command import call, cpkit, environment, in_store, invoke
from tests.cli.dying import Dying
from tests.cli.stocked import everything, stock
from tests.effects.shop import OnlySix
from tests.stores import SHARED, fresh_url


@asynccontextmanager
async def memory() -> AsyncIterator[Any]:
    """A store in memory, for tests that pass on any store."""
    async with open_checkpointer("memory://", message_type=Any) as cp:
        yield cp


@pytest.mark.parametrize(
    ("source", "destination"),
    [*zip(SHARED, [*SHARED[1:], SHARED[0]], strict=True)],
)
def test_a_copy_has_everything(tmp_path: Path, source: str, destination: str) -> None:
    """Messages, extra and calls are equal, and a second copy writes nothing."""
    src = fresh_url(source, tmp_path, "from")
    dst = fresh_url(destination, tmp_path, "to")
    in_store(src, stock)

    first = cpkit("copy", src, dst, "--json")
    assert (first.code, first.err) == (0, "")
    assert first.json["complete"]
    assert in_store(dst, everything) == in_store(src, everything)
    assert first.json["checked"] == first.json["threads"] == first.json["copied"] == 7
    assert first.json["messages"] == 1200 + 4 + 1
    assert (first.json["calls"], first.json["erased_calls"]) == (7, 3)

    again = invoke("copy", src, dst)
    assert again.code == 0
    assert "0 copied, 7 there already; 7 verified" in again.out
    assert "0 messages, 0 extra keys, 0 calls" in again.out
    assert in_store(dst, everything) == in_store(src, everything)


def test_a_copy_of_a_copy_keeps_erased_keys(tmp_path: Path) -> None:
    """A second copy finds the calls of deleted threads in the first copy."""
    urls = [fresh_url("sqlite", tmp_path, name) for name in ("a", "b", "c")]
    in_store(urls[0], stock)

    for src, dst in ((urls[0], urls[1]), (urls[1], urls[2])):
        assert invoke("copy", src, dst).code == 0

    assert in_store(urls[2], everything) == in_store(urls[0], everything)


def test_a_deleted_thread_is_copied_by_its_name(tmp_path: Path) -> None:
    """--deleted copies the keys of a thread that no list shows."""
    src, dst = fresh_url("sqlite", tmp_path, "a"), fresh_url("file", tmp_path, "b")

    async def paid_and_pruned(cp: Store) -> None:
        await call(cp, "gone", "c", "k", success=True)
        await cp.delete_thread("gone")

    async def holder(cp: Store) -> Any:
        found = await cp.find_call("k")
        return found and (found.status, found.erased)

    in_store(src, paid_and_pruned)
    assert invoke("copy", src, dst).code == 0
    assert in_store(dst, holder) is None
    assert invoke("copy", src, dst, "--deleted", "gone").code == 0
    assert in_store(dst, holder) == ("completed", True)


def test_a_second_copy_adds_later_changes(tmp_path: Path) -> None:
    """It adds messages, extra keys, calls, and outcomes of earlier calls."""
    src, dst = fresh_url("sqlite", tmp_path, "a"), fresh_url("file", tmp_path, "b")
    in_store(src, stock)
    assert invoke("copy", src, dst).code == 0

    async def go_on(cp: Store) -> None:
        await cp.append("plain", [{"more": 1}])
        await cp.save_extra("plain", {"more": 1})
        await cp.record_result("plain", "waits", "done")
        await call(cp, "plain", "retried", "failed", success=True)

    in_store(src, go_on)
    again = invoke("copy", src, dst, "--json").json
    assert again["complete"]
    assert (again["copied"], again["messages"], again["extra"]) == (1, 1, 1)
    assert again["calls"] == 1
    assert in_store(dst, everything) == in_store(src, everything)


async def _other_messages(cp: Store) -> None:
    await cp.append("plain", [{"n": "another"}])


async def _more_messages(cp: Store) -> None:
    await cp.append("plain", [{"n": n, "x": 1.0, "big": 10**30} for n in range(1300)])


async def _other_extra(cp: Store) -> None:
    await cp.save_extra("plain", {"a": 1})


async def _own_extra(cp: Store) -> None:
    await cp.save_extra("plain", {"own": 1})


async def _own_call(cp: Store) -> None:
    await call(cp, "plain", "own", "own", success=True)


async def _other_outcome(cp: Store) -> None:
    await cp.record_issued("plain", ToolCall("pays", "charge", {"by": "pays"}, "paid"))
    await cp.record_result("plain", "pays", "another")


async def _other_call(cp: Store) -> None:
    await cp.record_issued("plain", ToolCall("pays", "charge", {"by": "you"}, "paid"))


async def _held_elsewhere(cp: Store) -> None:
    await call(cp, "other", "x", "paid", success=True)


async def _deleted(cp: Store) -> None:
    await call(cp, "plain", "pays", "paid", success=True)
    await cp.delete_thread("plain")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_messages, "message 0 is another one"),
        (_more_messages, "100 messages more"),
        (_other_extra, "extra key 'a' has another value"),
        (_own_extra, "the extra key 'own', which the source has not"),
        (_own_call, "call 'own' is in the destination alone"),
        (_other_outcome, "call 'pays' has another result"),
        (_other_call, "call 'pays' is another one"),
        (_held_elsewhere, "held in the destination by call 'x' of thread 'other'"),
        (_deleted, "it was deleted in the destination"),
    ],
)
def test_nothing_is_overwritten(tmp_path: Path, change: Any, words: str) -> None:
    """A thread with other content in the destination is not changed; the others are
    copied."""
    src, dst = fresh_url("sqlite", tmp_path, "a"), fresh_url("sqlite", tmp_path, "b")
    in_store(src, stock)
    in_store(dst, change)

    async def plain(cp: Store) -> Any:
        return await cp.load("plain"), await cp.list_calls("plain")

    before = in_store(dst, plain)
    ended = invoke("copy", src, dst)
    assert ended.code == 1
    assert ended.err.startswith("conflict: thread 'plain': ")
    assert words in ended.err
    assert in_store(dst, plain) == before
    copied, whole = in_store(dst, everything), in_store(src, everything)
    assert copied["values"] == whole["values"]
    assert copied["key across"] == whole["key across"]


def test_extra_can_be_overwritten_on_request(tmp_path: Path) -> None:
    """--overwrite-extra writes the source's values, so that a store in use can be
    copied twice."""
    src, dst = fresh_url("sqlite", tmp_path, "a"), fresh_url("sqlite", tmp_path, "b")
    in_store(src, stock)
    assert invoke("copy", src, dst).code == 0

    async def change(cp: Store) -> None:
        await cp.save_extra("plain", {"a": "newer"})

    in_store(src, change)
    assert invoke("copy", src, dst).code == 1
    assert invoke("copy", src, dst, "--overwrite-extra").code == 0
    assert in_store(dst, everything) == in_store(src, everything)


def test_a_message_that_is_too_large_fails_alone(tmp_path: Path) -> None:
    """The error names the thread and the option; the other threads are copied."""
    src, dst = fresh_url("sqlite", tmp_path, "a"), fresh_url("sqlite", tmp_path, "b")
    in_store(src, stock)

    async def grow(cp: Store) -> None:
        await cp.append("large", ["x" * 2000])

    in_store(src, grow)
    ended = invoke("copy", src, f"{dst}?max_payload=1000")
    assert ended.code == 1
    assert "failed: thread 'large'" in ended.err
    assert "max_payload" in ended.err
    assert invoke("copy", src, dst).code == 0


async def test_changes_during_a_copy_are_reported() -> None:
    """The report names a thread that grew and a thread that was created."""
    async with memory() as src, memory() as dst:
        await src.append("quiet", [{"n": 1}])
        await src.append("busy", [{"n": 1}])
        written = False

        class Moving:
            list_threads = staticmethod(src.list_threads)
            list_calls = staticmethod(src.list_calls)

            async def load(self, thread_id: str) -> Any:
                nonlocal written
                data = await src.load(thread_id)

                if not written:
                    written = True
                    await src.append("busy", [{"n": 2}])
                    await src.append("new", [{"n": 1}])

                return data

        report = await copy_store(Moving(), dst)
        assert report.moved == ["busy", "new"]
        assert not report.is_complete
        report = await copy_store(Moving(), dst)
        assert report.is_complete
        busy = await dst.load("busy")
        assert busy.messages == [{"n": 1}, {"n": 2}]


async def test_two_copies_do_not_conflict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other copy records an outcome between this copy's read and its claim."""
    async with memory() as src, memory() as dst:
        paid = ToolCall("c", "pay", {}, "key")

        for cp in (src, dst):
            await cp.append("t", [{"n": 1}])
            await cp.record_issued("t", paid)

        await src.record_result("t", "c", "done")
        claim = dst.record_issued

        async def claim_too_late(thread_id: str, asked: ToolCall) -> Any:
            await dst.record_result(thread_id, asked.call_id, "done")
            return await claim(thread_id, asked)

        monkeypatch.setattr(dst, "record_issued", claim_too_late)
        report = await copy_store(src, dst)
        assert report.failures == []
        assert report.is_complete


async def test_a_destination_that_cannot_delete_keeps_the_keys() -> None:
    """The keys stay held, and a note names the missing ability."""
    async with memory() as src, memory() as dst:
        await stock(src)
        plain: Any = OnlySix(dst)
        plain.list_calls, plain.find_call = dst.list_calls, dst.find_call
        report = await copy_store(src, plain)
        assert report.is_complete
        assert "the destination cannot delete threads" in report.notes[0]
        holder = await dst.find_completed("erased")
        assert holder is not None
        assert holder.thread_id == GRAVES


class Dead(Exception):
    """Raised in place of a process's death."""


@pytest.mark.parametrize("is_applied", [False, True])
async def test_a_copy_can_die_at_any_write(is_applied: bool) -> None:
    """After a death before or after any write, the next copy completes the work."""
    async with memory() as src:
        await stock(src)
        whole = await everything(src)
        deaths = 0

        while True:
            async with memory() as dst:
                dying: Any = Dying(dst, deaths + 1, Dead, is_applied=is_applied)

                try:
                    await copy_store(src, dying)
                    break
                except Dead:
                    deaths += 1

                report = await copy_store(src, dst)
                assert report.is_complete, (deaths, report)
                assert await everything(dst) == whole

        assert deaths > 20


KILLED = [("sqlite", "file"), ("postgres", "redis"), ("file", "sqlite")]


@pytest.mark.parametrize(("source", "destination"), KILLED)
def test_a_copy_that_is_killed_is_completed(
    tmp_path: Path, source: str, destination: str
) -> None:
    """After kill -9 at any write, the command copies the rest, and nothing twice."""
    src = fresh_url(source, tmp_path, "from")
    in_store(src, stock)
    whole = in_store(src, everything)
    dst = fresh_url(destination, tmp_path, "to")
    deaths = 0

    # Each process continues where the last one died, and dies some writes later.
    for limit in (1, 2, 3, 5, 4, 3):
        worker = subprocess.run(
            [sys.executable, "-m", "tests.cli.dying", src, dst, str(limit)],
            capture_output=True,
            env=environment(),
            timeout=50,
            check=False,
        )
        deaths += worker.returncode == -signal.SIGKILL
        assert worker.returncode in (0, -signal.SIGKILL), worker.stderr

    assert deaths >= 4
    ended = cpkit("copy", src, dst, "--json")
    assert ended.json["complete"], ended.out
    assert in_store(dst, everything) == whole


def test_a_copy_that_died_between_claim_and_outcome(tmp_path: Path) -> None:
    """A claim without its outcome is completed, although its key has later attempts."""
    src, dst = fresh_url("sqlite", tmp_path, "a"), fresh_url("sqlite", tmp_path, "b")
    in_store(src, stock)

    async def half(cp: Store) -> None:
        await call(cp, "z-first", "one", "across")

    in_store(dst, half)
    assert invoke("copy", src, dst).code == 0
    assert in_store(dst, everything) == in_store(src, everything)


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
    process = subprocess.Popen(
        [sys.executable, "-m", "cpkit.cli", "copy", src, dst], env=environment()
    )

    try:
        while not (tmp_path / "b.db").exists() or in_store(dst, size) < 10:
            assert process.poll() is None, "it was over before it was killed"
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()

    assert process.returncode == -signal.SIGKILL
    ended = invoke("copy", src, dst, "--json").json
    assert ended["complete"]
    assert ended["already"] > 0
    assert ended["copied"] + ended["already"] == ended["checked"] == 400
    assert in_store(dst, size) == 400


def test_two_copies_at_once(tmp_path: Path) -> None:
    """Both succeed, and the destination has everything once."""
    src, dst = fresh_url("sqlite", tmp_path, "a"), fresh_url("file", tmp_path, "b")
    in_store(src, stock)
    command = [sys.executable, "-m", "cpkit.cli", "copy", src, dst]
    both = [
        subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [process.wait(50) for process in both] == [0, 0]
    assert in_store(dst, everything) == in_store(src, everything)
