"""A policy erases the content of old calls, and no effect is repeated."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from conformance.operations import LATER
from cpkit import ToolCall, open_checkpointer
from cpkit.effects import EffectErased, EffectLedger, EffectTimeout
from cpkit.retention import Retention, prune
from cpkit.worker import submit

NOTHING = timedelta(0)
OLD = Retention(calls_older_than=NOTHING)


@pytest.mark.parametrize("dry_run", [True, False])
async def test_the_content_of_ended_calls_goes(any_url: str, dry_run: bool) -> None:
    """Keys and status stay; messages, extra and cpkit's own threads are left."""
    async with open_checkpointer(any_url) as cp:
        for thread in ("a", "cpkit:own"):
            await cp.append(thread, [{"n": 1}], extra={"k": 1})

            for key in ("paid", "failed"):
                call = ToolCall(key, "pay", {"card": 1}, f"{thread} {key}")
                await cp.record_issued(thread, call)
                await cp.record_result(thread, key, 22, success=key == "paid")

        before = await cp.load("a")
        report = await prune(cp, OLD, dry_run=dry_run)
        assert report.erased_calls == 2
        assert report.bytes == (2 * len('{"card":1}22') if dry_run else None)
        assert "the content of 2 calls" in str(report)
        assert await cp.load("a") == before
        calls = await cp.list_calls("a")
        assert [one.erased for one in calls] == [not dry_run] * 2
        assert [one.status for one in calls] == ["completed", "failed"]
        assert not any(one.erased for one in await cp.list_calls("cpkit:own"))
        assert bool(await prune(cp, OLD)) == dry_run


async def test_younger_calls_stay() -> None:
    """The age is that of the outcome."""
    async with open_checkpointer("memory://") as cp:
        await cp.record_issued("a", ToolCall("c", "pay", {}, "k"))
        await cp.record_result("a", "c", 22)
        assert not await prune(cp, Retention(calls_older_than=timedelta(hours=1)))
        found = await cp.find_completed("k")
        assert found is not None
        assert found.result == 22


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_thread_in_use_keeps_everything(dry_run: bool) -> None:
    """It has a pending call, or an open run: a later run may replay what it did."""
    async with open_checkpointer("memory://") as cp:
        for thread in ("done", "pending", "run"):
            await cp.record_issued(thread, ToolCall("c", "pay", {}, thread))
            await cp.record_result(thread, "c", 22)

        await cp.record_issued("pending", ToolCall("open", "pay", {}, "open"))
        await submit(cp, "run")
        report = await prune(cp, OLD, dry_run=dry_run)
        assert report.erased_calls == 1
        assert report.pending == ["pending", "run"]
        assert not any(one.erased for one in await cp.list_calls("pending"))
        assert not any(one.erased for one in await cp.list_calls("run"))


async def test_a_thread_that_is_written_to_meanwhile_keeps_its_calls() -> None:
    """The writer's version does not fit any more."""
    async with open_checkpointer("memory://") as opened:
        cp: Any = opened
        await cp.record_issued("a", ToolCall("c", "pay", {}, "k"))
        await cp.record_result("a", "c", 22)
        erase = cp.erase_calls

        async def append_and_erase(*args: Any, **options: Any) -> int:
            await cp.append("a", [{"n": 1}])
            return int(await erase(*args, **options))

        cp.erase_calls = append_and_erase
        report = await prune(cp, OLD)
        assert (report.erased_calls, report.touched) == (0, ["a"])
        assert (await cp.find_completed("k")).result == 22


async def test_an_effect_whose_content_is_erased_is_not_run_again(any_url: str) -> None:
    """Its key is held: another run raises, and does not call the handler."""
    ran = []

    async def charge(effect: Any) -> str:
        ran.append(effect.key)
        return "receipt"

    async with open_checkpointer(any_url) as cp:
        ledger = EffectLedger(cp)
        assert await ledger.run("t", "charge", {"n": 1}, charge) == "receipt"
        assert (await prune(cp, OLD)).erased_calls == 1

        with pytest.raises(EffectErased, match="completed"):
            await ledger.run("t", "charge", {"n": 1}, charge)

        assert len(ran) == 1
        assert await ledger.run("t", "charge", {"n": 2}, charge) == "receipt"


async def test_a_failure_that_was_reopened_is_run_again_after_an_erasure() -> None:
    """The way from the first key to the next is found without its content."""

    async def fail(effect: Any) -> None:
        raise ValueError("no")

    async def charge(effect: Any) -> str:
        return "receipt"

    async with open_checkpointer("memory://") as cp:
        ledger = EffectLedger(cp)

        with pytest.raises(ValueError, match="no"):
            await ledger.run("t", "charge", {"n": 1}, fail)

        await ledger.reopen(ledger.key("t", "charge", {"n": 1}))
        assert (await prune(cp, OLD)).erased_calls
        assert await ledger.run("t", "charge", {"n": 1}, charge) == "receipt"


async def test_an_approval_counts_beside_an_erased_request() -> None:
    """An older request was denied and erased; the newer one is found and decided."""

    async def charge(effect: Any) -> str:
        return "receipt"

    async with open_checkpointer("memory://") as cp:
        ledger = EffectLedger(cp, requires_approval=lambda _: True, approval_timeout=0)
        key = ledger.key("t", "charge", {"n": 1})

        with pytest.raises(EffectTimeout):
            await ledger.run("t", "charge", {"n": 1}, charge)

        assert await ledger.deny(key)
        await ledger.ask_again(key)
        assert await cp.erase_calls("t", LATER) == 1
        assert await ledger.approve(key)
        assert await ledger.run("t", "charge", {"n": 1}, charge) == "receipt"


async def test_a_late_outcome_is_recorded_although_its_release_is_erased() -> None:
    """Its holder was only slow: the effect happened, and must hold its key."""
    async with open_checkpointer("memory://") as cp:
        ledger = EffectLedger(cp)
        begun = await ledger.begin("t", "charge", {"n": 1})
        call_id = begun.record.call.call_id
        await cp.record_result("t", call_id, {"released": "silent"}, success=False)
        assert await cp.erase_calls("t", LATER) == 1
        done = await ledger.commit(begun.record, "receipt")
        assert (done.status, done.erased) == ("completed", False)
        assert await cp.find_completed(begun.record.call.idempotency_key) == done
