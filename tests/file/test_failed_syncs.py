"""After a sync that failed, a handle does not use that file any more.

The kernel may have dropped the bytes, and marks them as written: so a later sync that
succeeds proves nothing about them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from conformance.operations import LATER
from cpkit import BackendUnavailable, ToolCall
from cpkit_file import FileCheckpointer
from cpkit_file.schema import register_name

Store = FileCheckpointer[Any]

CALL = ToolCall("c", "pay", {}, "key")
USES: dict[str, Callable[[Store], Coroutine[Any, Any, Any]]] = {
    "append": lambda cp: cp.append("t", [{}]),
    "append nothing": lambda cp: cp.append("t", []),
    "save_extra": lambda cp: cp.save_extra("t", {"a": 1}),
    "record_issued": lambda cp: cp.record_issued("t", CALL),
    "record_result": lambda cp: cp.record_result("t", "c", 1),
    "erase_calls": lambda cp: cp.erase_calls("t", LATER),
    "trim": lambda cp: cp.trim("t", 1),
    "delete_thread": lambda cp: cp.delete_thread("t"),
    "load": lambda cp: cp.load("t"),
    "list_calls": lambda cp: cp.list_calls("t"),
}


def fail(*_: Any) -> None:
    raise OSError(5, "Input/output error")


async def test_a_failed_sync_closes_the_log_for_the_handle(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other handles use it, and so does this process when it opens the store again."""
    async with Store(home) as cp, Store(home) as other:
        await cp.append("t", [{"n": 1}])

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)

            with pytest.raises(BackendUnavailable, match="Input/output") as raised:
                await cp.append("t", [{"n": 2}])

        assert raised.value.maybe_applied
        assert isinstance(raised.value.__cause__, OSError)

        for use in USES.values():
            with pytest.raises(BackendUnavailable, match="open the store again") as no:
                await use(cp)

            assert no.value.rejected

        assert await cp.append("u", [{}]) == 1
        assert len(await cp.list_threads()) == 2
        assert await other.read("t") == [{"n": 1}, {"n": 2}]
        assert await other.append("t", [{"n": 3}]) == 3

    async with Store(home) as cp:
        assert await cp.append("t", [{"n": 4}]) == 4


async def test_a_failed_sync_fails_the_writes_of_its_log_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes to other logs at the same time are done."""
    threads = [f"t{i}" for i in range(40)]
    sync = os.fdatasync
    failed: list[int] = []

    def fail_first(fd: int) -> None:
        if not failed:
            failed.append(fd)
            fail()

        sync(fd)

    async with Store(home) as cp:
        for thread_id in threads:
            await cp.append(thread_id, [{}])

        monkeypatch.setattr(os, "fdatasync", fail_first)
        outcomes = await asyncio.gather(
            *(cp.append(thread_id, [{}]) for thread_id in threads),
            return_exceptions=True,
        )
        (refused,) = [i for i, outcome in enumerate(outcomes) if outcome != 2]
        assert isinstance(outcomes[refused], BackendUnavailable)


async def test_a_register_that_cannot_be_synced_takes_no_claims(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim was not made; keys of other registers can be claimed."""
    others = [ToolCall("d", "pay", {}, f"key {n}") for n in range(2)]
    assert register_name("key") not in {register_name(f"key {n}") for n in range(2)}

    async with Store(home) as cp, Store(home) as other:
        await cp.append("t", [{}])

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)

            with pytest.raises(BackendUnavailable):
                await cp.record_issued("t", CALL)

        assert await cp.list_calls("t") == []

        for use in (cp.record_issued("u", CALL), cp.find_completed("key")):
            with pytest.raises(BackendUnavailable, match="open the store again"):
                await use

        assert await cp.record_issued("t", others[0]) is None
        assert await other.find_call("key") is None
        assert await other.record_issued("u", CALL) is None
        assert await cp.append("t", [{}]) == 2


async def test_a_name_that_cannot_be_synced_is_not_written_to(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was written, and the next write tries again."""
    async with Store(home) as cp:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)

            with pytest.raises(BackendUnavailable) as raised:
                await cp.append("t", [{}])

        assert not raised.value.maybe_applied
        assert list((home / "threads").iterdir()) == []
        assert await cp.append("t", [{}], expected_version=0) == 1


@pytest.mark.parametrize("forget", [True, False])
async def test_a_deletion_with_an_unknown_outcome_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch, forget: bool
) -> None:
    """It is unknown after the log was replaced; before that nothing was done."""
    async with Store(home) as cp:
        await cp.append("t", [{}])
        await cp.record_issued("t", CALL)
        first = "unlink" if forget else "rename"

        with monkeypatch.context() as patch:
            patch.setattr(os, first, fail)

            with pytest.raises(BackendUnavailable) as raised:
                await cp.delete_thread("t", forget_keys=forget)

        assert not raised.value.maybe_applied
        assert await cp.read("t") == [{}]

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)

            with pytest.raises(BackendUnavailable) as raised:
                await cp.delete_thread("t", forget_keys=forget)

        assert raised.value.maybe_applied

    async with Store(home) as cp:
        assert await cp.load("t") is None
        assert (await cp.find_call("key") is None) is forget


async def test_a_trim_with_an_unknown_outcome_says_so(
    home: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unknown after the log was replaced; before that nothing was done."""
    async with Store(home) as cp:
        await cp.append("t", [{"n": 1}, {"n": 2}])

        for name, applied in (("write", False), ("rename", False), ("fsync", True)):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, fail)

                with pytest.raises(BackendUnavailable) as raised:
                    await cp.trim("t", 1)

            assert raised.value.maybe_applied is applied, name
            assert applied or await cp.read("t") == [{"n": 1}, {"n": 2}], name

    async with Store(home) as cp:
        assert await cp.read("t") == [{"n": 2}]
        assert await cp.trim("t", 2) == 1
        assert [path.name for path in log.parent.iterdir()] == [log.name]
