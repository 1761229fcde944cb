"""What a crash left is settled where it can be told, and shown where it cannot."""

from __future__ import annotations

import asyncio

import pytest

from cpkit import JsonValue, ToolCall
from cpkit.effects import (
    Effect,
    EffectTimeout,
    Landed,
    NotLanded,
    Tool,
    ToolRegistry,
)
from cpkit.lease import LeaseTimeout, thread_lease
from tests.effects.shop import OnlySix, Shop, Store, claim, quick, until


async def nothing() -> None:
    raise AssertionError("resume executes nothing")


def verify(effect: Effect) -> Landed | NotLanded | None:
    """Answer as the arguments say."""
    match effect.args["landed"]:
        case "yes":
            return Landed("found")
        case "no":
            return NotLanded()

    return None


READ = Tool(nothing, name="search", side_effects="read")
PAY = Tool(nothing, name="pay", verify=verify)
MAIL = Tool(nothing, name="mail")
TOOLS = [READ, PAY, MAIL]


async def leave(cp: Store, thread: str, tool: str, args: dict[str, JsonValue]) -> None:
    await claim(cp, thread, quick(cp).key(thread, tool, args), args, tool)


async def test_each_pending_call_is_settled_as_its_tool_allows(
    cp: Store, thread: str
) -> None:
    """Discarded, landed, released or surfaced; nothing is executed."""
    await leave(cp, thread, "search", {})
    await leave(cp, thread, "pay", {"landed": "yes"})
    await leave(cp, thread, "pay", {"landed": "no"})
    await leave(cp, thread, "pay", {"landed": "?"})
    await leave(cp, thread, "mail", {})
    await leave(cp, thread, "fax", {})
    await cp.record_issued(thread, ToolCall("c", "pay", {}, f"raw-{thread}"))
    report = await quick(OnlySix(cp)).resume(thread, ToolRegistry(quick(cp), TOOLS))
    assert [(call.record.call.tool_name, call.action) for call in report.calls] == [
        ("search", "discarded"),
        ("pay", "landed"),
        ("pay", "released"),
        ("pay", "surfaced"),
        ("mail", "surfaced"),
        ("fax", "surfaced"),
        ("pay", "surfaced"),
    ]
    statuses = [record.status for record in await cp.list_calls(thread)]
    assert statuses == ["failed", "completed", "failed"] + ["issued"] * 4
    ledger = quick(cp)
    shop = Shop("ran")
    told = [
        await ledger.run(thread, "pay", {"landed": answer}, shop.charge)
        for answer in ("yes", "no")
    ]
    assert told == ["found", "ran"]


async def test_the_report_reads_well_and_can_be_acted_on(
    cp: Store, thread: str
) -> None:
    """What it surfaces is settled by a person, in code."""
    await leave(cp, thread, "mail", {"to": "ann"})
    await leave(cp, thread, "mail", {"to": "bob"})
    ledger = quick(cp)
    report = await ledger.resume(thread, TOOLS)
    lines = str(report).splitlines()
    assert lines[0] == f"thread {thread!r}: 2 pending"
    assert "surfaced: mail {'to': 'ann'} (attempt 1" in lines[1]
    assert lines[1].endswith("its tool has no verify")
    ann, bob = report.surfaced
    await ledger.commit(ann.record, "sent")
    await ledger.release(bob.record, "the outbox has no such mail")
    assert str(await ledger.resume(thread, TOOLS)) == (
        f"thread {thread!r}: nothing was pending"
    )
    shop = Shop("sent now")
    told = [
        await ledger.run(thread, "mail", {"to": name}, shop.charge)
        for name in ("ann", "bob")
    ]
    assert told == ["sent", "sent now"]


async def test_approval_requests_are_not_touched(cp: Store, thread: str) -> None:
    """They wait for a person, not for a resume."""
    ledger = quick(cp, requires_approval=lambda _: True, approval_timeout=0)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "pay", {"landed": "no"}, Shop().charge)

    assert (await ledger.resume(thread, TOOLS)).calls == ()
    assert len(await ledger.pending(thread)) == 1


async def test_it_is_for_the_one_who_runs_the_thread(cp: Store, thread: str) -> None:
    """It takes the lease, or uses the caller's."""
    await leave(cp, thread, "search", {})

    async with thread_lease(cp, thread) as lease:
        with pytest.raises(LeaseTimeout):
            await quick(cp, timeout=0.05).resume(thread, TOOLS)

        report = await quick(cp).resume(thread, TOOLS, lease=lease)

    assert [call.action for call in report.calls] == ["discarded"]


async def test_what_this_ledger_is_running_is_left_alone(
    cp: Store, thread: str
) -> None:
    """A resume beside one's own runs does not take them for orphans."""
    shop = Shop(gate=asyncio.Event())
    ledger = quick(cp)
    task = asyncio.create_task(ledger.run(thread, "pay", {"landed": "no"}, shop.charge))
    await shop.began.wait()
    report = await ledger.resume(thread, TOOLS)
    assert [call.action for call in report.calls] == ["alive"]
    assert shop.gate is not None
    shop.gate.set()
    assert await task == {"charge": 1}


async def test_with_stale_after_only_the_silent_are_touched(
    cp: Store, thread: str
) -> None:
    """Beside other runners: what shows a sign of life is theirs."""
    shop = Shop(gate=asyncio.Event())
    task = asyncio.create_task(
        quick(cp, heartbeat=0.02).run(thread, "pay", {"landed": "no"}, shop.charge)
    )
    await shop.began.wait()
    await leave(cp, thread, "search", {})

    async with thread_lease(cp, thread):
        report = await quick(cp).resume(thread, TOOLS, stale_after=0.4)

    assert [call.action for call in report.calls] == ["alive", "discarded"]
    assert shop.gate is not None
    shop.gate.set()
    await task


async def test_a_runner_that_finishes_meanwhile_is_believed(
    cp: Store, thread: str
) -> None:
    """The first outcome stays; the report says that it was not ours."""

    async def late(_: Effect) -> NotLanded:
        data = await cp.load(thread)
        assert data is not None
        await quick(cp).commit(data.pending[0], "done")
        return NotLanded()

    await leave(cp, thread, "pay", {"landed": "?"})
    report = await quick(cp).resume(thread, [Tool(nothing, name="pay", verify=late)])
    assert [call.action for call in report.calls] == ["finished"]
    assert report.calls[0].record.result == {"value": "done"}


async def test_a_cancelled_run_is_an_orphan(cp: Store, thread: str) -> None:
    """Its own ledger may settle it afterwards."""
    shop = Shop(gate=asyncio.Event())
    ledger = quick(cp)
    task = asyncio.create_task(ledger.run(thread, "pay", {"landed": "no"}, shop.charge))
    await shop.began.wait()
    task.cancel()

    async def over() -> bool:
        return task.done()

    await until(over)
    report = await ledger.resume(thread, TOOLS)
    assert [call.action for call in report.calls] == ["released"]
