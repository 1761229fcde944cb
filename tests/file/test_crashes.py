"""A kill or power loss at every step of a write leaves the old state or the new."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cpkit import BackendUnavailable, CallRecord, ToolCall
from cpkit_file import FileCheckpointer
from cpkit_file.schema import log_name
from tests.file.disk import Disk, Tree, make_tree
from tests.sweeps import sweep

Store = FileCheckpointer[Any]
Step = Callable[[Store], Awaitable[Any]]

CALL = ToolCall("c", "pay", {"amount": 1}, "key")
OTHER = ToolCall("d", "pay", {"amount": 2}, "key")


@dataclass(frozen=True)
class State:
    """Everything that a store returns about the thread ``t`` and the key ``key``."""

    messages: list[Any] | None
    first: int | None
    extra: dict[str, Any] | None
    pending: list[CallRecord] | None
    calls: list[CallRecord]
    holder: CallRecord | None
    threads: list[tuple[str, int]]


async def state_of(cp: Store) -> State:
    data = await cp.load("t")
    return State(
        None if data is None else data.messages,
        None if data is None else data.first,
        None if data is None else data.extra,
        None if data is None else [timeless(record) for record in data.pending],
        [timeless(record) for record in await cp.list_calls("t")],
        timeless(await cp.find_call("key")),
        [(info.thread_id, info.version) for info in await cp.list_threads()],
    )


def timeless(record: Any) -> Any:
    """Return a record without its times, which differ from run to run."""
    if record is None:
        return None

    resolved = record.resolved_at and record.issued_at
    return CallRecord(
        record.thread_id,
        record.call,
        record.status,
        record.attempt,
        record.issued_at.min,
        record.result,
        resolved and record.issued_at.min,
        record.erased,
    )


async def nothing(cp: Store) -> None:
    """Leave the store as it is."""


async def append(cp: Store) -> None:
    await cp.append("t", [{"n": 1}])


async def tear(cp: Any) -> None:
    """Leave a write that a crash cut short, and that is on disk by now."""
    path = cp.store._folder.threads + "/" + log_name("t")

    with open(path, "ab") as file:
        file.write(b'{"add":{"pad":"' + b"x" * 3000)
        os.fsync(file.fileno())


async def append_large(cp: Store) -> None:
    await cp.append("t", [{"pad": "y" * 1500}])


async def append_three(cp: Store) -> None:
    await cp.append("t", [{"n": 2}, {"n": 3}, {"n": 4}])


async def trim(cp: Store) -> None:
    assert await cp.trim("t", 2) > 0


async def trim_all(cp: Store) -> None:
    assert await cp.trim("t", 99) > 0


async def merge(cp: Store) -> None:
    await cp.save_extra("t", {"a": 1, "b": [2]})


async def claim(cp: Store) -> None:
    await cp.record_issued("t", CALL)


async def claim_elsewhere(cp: Store) -> None:
    await cp.record_issued("elsewhere", OTHER)


async def claim_again(cp: Store) -> None:
    await cp.record_issued("t", OTHER)


async def fail(cp: Store) -> None:
    await cp.record_result("t", "c", "no", success=False)


async def fail_elsewhere(cp: Store) -> None:
    await cp.record_result("elsewhere", "d", "no", success=False)


async def complete(cp: Store) -> None:
    await cp.record_result("t", "c", {"paid": True})


async def delete(cp: Store) -> None:
    await cp.delete_thread("t")


async def forget(cp: Store) -> None:
    await cp.delete_thread("t", forget_keys=True)


SCENARIOS: dict[str, tuple[list[Step], Step]] = {
    "the first append": ([], append),
    "a later append": ([append], append_three),
    "an append behind a torn write": ([append, tear], append_large),
    "an append after a deletion": ([append, claim, complete, delete], append),
    "an append after all was forgotten": ([append, claim, forget], append),
    "the first merge": ([], merge),
    "a later merge": ([append, merge], merge),
    "the first claim": ([], claim),
    "a claim in a thread": ([append], claim),
    "a claim after a failure": ([claim, fail], claim_elsewhere),
    "a claim here after a failure": ([claim, fail], claim_again),
    "a claim after one elsewhere": ([claim_elsewhere, fail_elsewhere], claim),
    "a claim after its key was forgotten": ([claim, forget], claim),
    "a claim after a deletion": ([append, claim, fail, delete], claim_elsewhere),
    "a result": ([append, claim], complete),
    "a failure": ([claim], fail),
    "a late result of an erased call": ([append, claim, delete], complete),
    "a late result beside a new life": ([claim, delete, append], complete),
    "a trim": ([append, append_three, merge, claim, complete], trim),
    "a trim of all": ([append_three, claim], trim_all),
    "a second trim": ([append_three, trim, append], trim_all),
    "a trim behind a torn write": ([append_three, tear], trim),
    "an append after a trim": ([append_three, trim], append_three),
    "a result after a trim of all": ([append, claim, trim_all], complete),
    "a deletion of what was trimmed": ([append_three, claim, trim], delete),
    "a deletion": ([append, merge, claim, complete], delete),
    "a deletion of messages alone": ([append, merge], delete),
    "a deletion of what was erased": ([append, claim, delete], delete),
    "forgetting": ([append, claim, complete], forget),
    "forgetting what was erased": ([claim, complete, delete], forget),
    "forgetting the first attempt": (
        [claim, fail, claim_elsewhere, fail_elsewhere],
        forget,
    ),
    "forgetting the last attempt": (
        [claim_elsewhere, fail_elsewhere, claim, complete],
        forget,
    ),
}


QUICK = [
    "the first append",
    "an append after a deletion",
    "a later merge",
    "a claim after a failure",
    "a result",
    "a second trim",
    "a late result of an erased call",
    "a deletion of what was erased",
    "forgetting the first attempt",
]


async def check_goes_on(cp: Store, found: State) -> None:
    """Check that the next writes work and agree with what was read."""
    version = len(found.messages or []) + (found.first or 0)
    assert await cp.append("t", [{"n": 9}], expected_version=version) == version + 1
    again = await cp.record_issued("later", ToolCall("e", "pay", {}, "key"))
    assert (again is None) == (found.holder is None)

    if found.holder is None:
        holder = await cp.find_call("key")
        assert holder is not None
        attempts = [r.attempt for r in found.calls if r.call.idempotency_key == "key"]
        assert holder.attempt > max(attempts, default=0)
        await cp.record_result("later", "e", None)

    await cp.delete_thread("t", forget_keys=True)
    assert await cp.load("t") is None
    assert await cp.append("t", [{}]) == 1


class Outcomes:
    """What another process finds after a crash: the same where it left the same."""

    def __init__(self, place: Path, store: str = "") -> None:
        self._place, self._store = place, store
        self._found: dict[Tree, State] = {}

    async def found(self, tree: Tree) -> State:
        """Return the state of the store, and check that the store goes on with it."""
        if tree not in self._found:
            folder = self._place / "crashed"
            make_tree(folder, tree)

            async with Store(folder / self._store) as cp:
                self._found[tree] = await state_of(cp)
                await check_goes_on(cp, self._found[tree])

        return self._found[tree]


@pytest.mark.parametrize("name", sweep(SCENARIOS, QUICK))
async def test_a_crash_leaves_the_old_state_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After the acknowledgement it leaves the new one."""
    before, step = SCENARIOS[name]
    home = tmp_path / "store"
    home.mkdir()

    async with Store(home) as cp:
        for one in before:
            await one(cp)

        old = await state_of(cp)

        with Disk(home, monkeypatch) as disk:
            await step(cp)
            acknowledged = len(disk.crashes)
            disk.end()

        new = await state_of(cp)

    assert acknowledged > 1 or old == new, "the disk saw nothing"

    outcomes = Outcomes(tmp_path)

    for number, crash in enumerate(disk.crashes):
        for tree in crash.outcomes():
            found = await outcomes.found(tree)
            assert found in ([new] if number >= acknowledged else [old, new]), (
                f"after {crash.after}"
            )


@pytest.mark.parametrize("calls", [True, False])
async def test_a_repeated_deletion_is_on_disk_when_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: bool
) -> None:
    """Also if a killed process removed the log, and did not get to the sync."""
    home = tmp_path / "store"

    def killed(path: str) -> None:
        raise OSError("killed")

    async with Store(home) as first, Store(home) as second:
        await append(first)

        if calls:
            await claim(first)

        with Disk(home, monkeypatch) as disk:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("cpkit_file.writing.sync_folder", killed)

                with pytest.raises(BackendUnavailable):
                    await delete(first)

            await delete(second)
            disk.end()

    outcomes = Outcomes(tmp_path)

    for tree in disk.crashes[-1].outcomes():
        assert (await outcomes.found(tree)).messages is None


@pytest.mark.long
async def test_a_crash_at_the_first_opening_leaves_a_folder_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process completes the opening."""
    home = tmp_path / "home"
    home.mkdir()

    with Disk(home, monkeypatch) as disk:
        async with Store(home / "new" / "store") as cp:
            await cp.append("t", [{}])
            appended = len(disk.crashes)
            await cp.record_issued("t", CALL)
            claimed = len(disk.crashes)

        disk.end()

    outcomes = Outcomes(tmp_path, "new/store")

    for number, crash in enumerate(disk.crashes):
        for tree in crash.outcomes():
            found = await outcomes.found(tree)

            if number >= appended:
                assert found.messages == [{}]

            if number >= claimed:
                assert found.holder is not None
