"""After a crash, resume records known outcomes and reports the unknown ones."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import JsonValue, ToolCall, open_checkpointer
from cpkit.effects import (
    Effect,
    EffectTimeout,
    Landed,
    NotLanded,
    RecoverReport,
    Tool,
    ToolRegistry,
    tool,
)
from cpkit.effects.records import heartbeat_thread
from cpkit.lease import Lease, LeaseLost, LeaseTimeout, thread_lease
from cpkit.runs.threads import RunThread
from tests.effects.shop import Plain, Shop, Store, claim, quick, until


async def nothing() -> None:
    raise AssertionError("resume executes nothing")


def verify(effect: Effect) -> Landed | NotLanded | None:
    """Answer what the arguments say."""
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
    """Leave an issued call behind, like a process that was killed."""
    await claim(cp, thread, quick(cp).key(thread, tool, args), args, tool)


async def test_resume_handles_each_call_as_its_tool_allows(
    cp: Store, thread: str
) -> None:
    """A call is landed, released or surfaced, and never executed."""
    await leave(cp, thread, "search", {})
    await leave(cp, thread, "pay", {"landed": "yes"})
    await leave(cp, thread, "pay", {"landed": "no"})
    await leave(cp, thread, "pay", {"landed": "?"})
    await leave(cp, thread, "mail", {})
    await leave(cp, thread, "fax", {})
    raw = ToolCall("c", "pay", {"stale_after": 0.2}, f"raw-{thread}")
    await cp.record_issued(thread, raw)
    report = await quick(Plain(cp)).resume(thread, ToolRegistry(quick(cp), TOOLS))
    assert [(call.record.call.tool_name, call.action) for call in report.calls] == [
        ("search", "released"),
        ("pay", "landed"),
        ("pay", "released"),
        ("pay", "surfaced"),
        ("mail", "surfaced"),
        ("fax", "surfaced"),
        ("pay", "surfaced"),
    ]
    calls = await cp.list_calls(thread)
    statuses = [record.status for record in calls]
    assert statuses == ["failed", "completed", "failed"] + ["issued"] * 4
    assert report.calls[3].reason == "verify cannot know"
    ledger = quick(cp)
    shop = Shop("ran")
    got = [
        await ledger.run(thread, "pay", {"landed": answer}, shop.charge)
        for answer in ("yes", "no")
    ]
    assert got == ["found", "ran"]


async def test_a_person_can_decide_the_calls_in_the_report(
    cp: Store, thread: str
) -> None:
    """The report is readable, and its records work with ``commit`` and ``release``."""
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
    got = [
        await ledger.run(thread, "mail", {"to": name}, shop.charge)
        for name in ("ann", "bob")
    ]
    assert got == ["sent", "sent now"]


async def test_approval_requests_are_not_touched(cp: Store, thread: str) -> None:
    """Only a person decides approval requests."""
    ledger = quick(cp, requires_approval=lambda _: True, approval_timeout=0)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "pay", {"landed": "no"}, Shop().charge)

    assert (await ledger.resume(thread, TOOLS)).calls == ()
    assert len(await ledger.pending(thread)) == 1


async def test_recover_needs_the_lease_of_the_thread(cp: Store, thread: str) -> None:
    """It takes the lease, or uses the one that it is given or that its task holds."""
    await leave(cp, thread, "search", {})

    async with thread_lease(cp, thread) as lease:
        other = thread_lease(cp, thread, timeout=0)
        with pytest.raises(LeaseTimeout):
            await other.__aenter__()

        with pytest.raises(ValueError, match="not a lease of thread 'other'"):
            await quick(cp).recover("other", TOOLS, lease=lease)

        report = await quick(cp).recover(thread, TOOLS)
        assert [call.action for call in report.calls] == ["released"]

        # Also in a task that the holder of the lease started.
        report = await asyncio.create_task(quick(cp).recover(thread, TOOLS))
        assert report.calls == ()

    held = thread_lease(cp, thread)
    await asyncio.create_task(_enter(held))

    with pytest.raises(LeaseTimeout):
        await quick(cp, timeout=0.05).recover(thread, TOOLS)


async def _enter(lease: Lease) -> None:
    """Take a lease in another task, which does not hand it on."""
    await lease._acquire()


async def test_a_successor_runs_the_call_that_recover_finds(
    cp: Store, thread: str
) -> None:
    """A process that was paused before it loaded the thread has lost the lease."""
    ended = asyncio.Event()
    given: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()

    async def hold() -> None:
        async with thread_lease(cp, thread) as lease:
            given.set_result(lease)
            await ended.wait()

    holder = asyncio.create_task(hold())
    lease = await given
    list_calls = cp.list_calls

    async def late(thread_id: str) -> Any:
        vars(cp).pop("list_calls")
        ended.set()
        await holder

        async with thread_lease(cp, thread):  # the successor pays
            await leave(cp, thread, "pay", {"landed": "no"})
            return await list_calls(thread_id)

    vars(cp)["list_calls"] = late

    with pytest.raises(LeaseLost):
        await quick(cp).recover(thread, TOOLS, lease=lease)

    data = await cp.load(thread)
    assert data is not None
    assert len(data.pending) == 1


async def test_recover_runs_what_was_released(cp: Store, thread: str) -> None:
    """It verifies, runs released calls with their arguments, and heals last."""
    sent: list[str] = []
    healed: list[str] = []

    async def verify(effect: Effect) -> Landed | NotLanded:
        return Landed("m1") if effect.args["to"] == "ann" else NotLanded()

    @tool(verify=verify)
    async def mail(to: str) -> str:
        sent.append(to)
        return f"to {to}"

    @tool
    async def fax(to: str) -> str:
        raise AssertionError

    ledger = quick(cp)
    await leave(cp, thread, "mail", {"to": "ann"})
    await leave(cp, thread, "mail", {"to": "bob"})
    await leave(cp, thread, "fax", {"to": "eve"})
    # Its key is not one that the tool would give, so it is another effect.
    await claim(cp, thread, f"kim {thread}", {"to": "kim"}, "mail")

    async def heal(_: Any, thread_id: str, report: RecoverReport) -> str:
        healed.append(thread_id)
        assert len(report.outcomes) == 1
        return "closed"

    report = await quick(cp).recover(thread, [mail, fax], heal=heal)
    actions = [one.action for one in report.calls]
    assert actions == ["landed", "released", "surfaced", "released"]
    assert (sent, healed, report.healed) == (["bob"], [thread], "closed")
    assert report.outcomes[0][1].content == "to bob"
    key = ledger.key(thread, "mail", {"to": "bob"})
    record = await cp.find_completed(key)
    assert record is not None
    assert record.attempt == 2

    with pytest.raises(TypeError, match="@tool"):
        await quick(cp).recover(thread, [heal])  # type: ignore[list-item]


async def test_a_call_that_its_tool_takes_no_longer_does_not_end_the_recovery(
    cp: Store, thread: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A new release has other arguments. The next call is run."""
    sent: list[str] = []

    @tool(verify=lambda _: NotLanded())
    async def mail(to: str) -> None:
        sent.append(to)

    await leave(cp, thread, "mail", {"whom": "ann"})
    await leave(cp, thread, "mail", {"to": "bob"})
    report = await quick(cp).recover(thread, [mail])
    assert [one.action for one in report.calls] == ["released"] * 2
    assert (sent, len(report.outcomes)) == (["bob"], 1)
    assert "mail is not run again" in caplog.text


async def test_a_recover_that_dies_leaves_the_other_calls_pending(
    cp: Store, thread: str
) -> None:
    """It dies in the first call that it runs again; the next recover runs all."""
    dead = Shop(gate=asyncio.Event())
    sent: list[JsonValue] = []

    def verify(_: Effect) -> NotLanded:
        return NotLanded()

    @tool(name="mail", verify=verify)
    async def dies(effect: Effect, to: str) -> JsonValue:
        return await dead.charge(effect)

    @tool(verify=verify)
    async def mail(to: str) -> None:
        sent.append(to)

    for name in ("ann", "bob", "eve"):
        await leave(cp, thread, "mail", {"to": name})

    ledger = quick(cp, stale_after=0.3 * slowdown())
    task = asyncio.create_task(ledger.recover(thread, [dies]))
    await dead.began.wait()
    task.cancel()
    await asyncio.wait([task])
    await ledger.recover(thread, [mail])
    assert sorted(map(str, sent)) == ["ann", "bob", "eve"]


async def test_a_wait_for_a_dead_holder_is_reported_at_once(
    cp: Store, thread: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says for whom, and how long at most."""
    run = RunThread(cp, thread)
    await run.claim(run.new_term("host:7", 0.2))

    with caplog.at_level(logging.WARNING, "cpkit.lease"):
        await asyncio.create_task(quick(cp).recover(thread, TOOLS))

    assert f"waiting for the lease of thread {thread!r}: host:7 has it" in caplog.text
    assert "takes over after 0.2 s without a heartbeat" in caplog.text


async def test_a_call_of_this_process_is_alive(
    cp: Store, thread: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of any ledger of the handle; begun by hand, too. Nothing is watched."""
    shop = Shop(gate=asyncio.Event())
    begun = await quick(cp).begin(thread, "pay", {"landed": "no", "n": 2})
    run = quick(cp).run(thread, "pay", {"landed": "no"}, shop.charge)
    task = asyncio.create_task(run)
    await shop.began.wait()
    report = await quick(cp).resume(thread, TOOLS)
    assert [call.action for call in report.calls] == ["alive"] * 2
    assert caplog.text == ""
    await quick(cp).commit(begun.record)
    assert shop.gate is not None
    shop.gate.set()
    assert await task == {"charge": 1}


async def test_a_live_call_is_left_whatever_lease_its_run_holds(
    url: str, cp: Store, thread: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It shows by heartbeats that it lives; a recovery under a lease watches it."""
    if url.startswith("memory"):
        pytest.skip("it needs a second handle of the store")

    shop = Shop(gate=asyncio.Event())

    async with open_checkpointer(url) as other:
        task = asyncio.create_task(
            quick(other, stale_after=0.4).run(
                thread, "pay", {"landed": "no"}, shop.charge
            )
        )
        await shop.began.wait()
        await leave(cp, thread, "search", {})

        async with thread_lease(cp, thread) as lease:
            report = await quick(cp).recover(thread, TOOLS, lease=lease)

        assert [call.action for call in report.calls] == ["alive", "released"]
        assert "pay has no outcome; waits up to 0.4 s" in caplog.text
        assert "search has no outcome; waits up to 0.2 s" in caplog.text
        assert shop.gate is not None
        shop.gate.set()
        await task


async def test_a_lease_taken_over_is_proof_for_its_own_calls_alone(
    cp: Store, thread: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that carry its term are dead at once; another call is watched."""
    dead = thread_lease(cp, thread, stale_after=0.2)
    await dead._acquire()
    lease: JsonValue = [dead.term_id, thread]
    args: dict[str, JsonValue] = {"n": 1}
    await claim(cp, thread, f"k1 {thread}", args, "search", 900, lease=lease)
    other = await claim(cp, thread, f"k2 {thread}", {"n": 2}, "search", 0.2)

    async with thread_lease(cp, thread):
        report = await quick(cp).recover(thread, [READ])

    assert [one.action for one in report.calls] == ["released"] * 2
    assert "waits up to 900" not in caplog.text
    assert "search has no outcome; waits up to 0.2 s" in caplog.text
    assert other.call.idempotency_key == f"k2 {thread}"


async def test_a_heartbeat_during_verify_stops_the_resume(
    cp: Store, thread: str
) -> None:
    """The holder was paused and is alive, so the answer of ``verify`` is too old."""
    key = quick(cp).key(thread, "pay", {})
    call_id = (await claim(cp, thread, key, {}, "pay", 0.05)).call.call_id

    async def slow(effect: Effect) -> NotLanded:
        await cp.save_extra(heartbeat_thread(call_id), {call_id: 1})
        return NotLanded()

    tools = [Tool(nothing, name="pay", verify=slow)]
    report = await quick(cp).resume(thread, tools)
    assert [call.action for call in report.calls] == ["alive"]
    assert [record.status for record in await cp.list_calls(thread)] == ["issued"]


async def test_an_outcome_recorded_during_the_resume_wins(
    cp: Store, thread: str
) -> None:
    """The first outcome stays, and the report says ``finished``."""

    async def late(_: Effect) -> NotLanded:
        data = await cp.load(thread)
        assert data is not None
        await quick(cp).commit(data.pending[0], "done")
        return NotLanded()

    await leave(cp, thread, "pay", {"landed": "?"})
    report = await quick(cp).resume(thread, [Tool(nothing, name="pay", verify=late)])
    assert [call.action for call in report.calls] == ["finished"]
    assert report.calls[0].record.result == {"value": "done"}


@pytest.mark.parametrize("by", ["resume", "takeover"])
async def test_an_effect_that_verify_found_never_runs_again(
    cp: Store, thread: str, by: str
) -> None:
    """Not even if its attempt was released before the answer could be recorded."""
    shop = Shop()
    args: dict[str, JsonValue] = {"amount": 1}

    async def found(_: Effect) -> Landed:
        data = await cp.load(thread)

        if data is not None and data.pending:
            await quick(cp).release(data.pending[0])

        return Landed("found")

    await leave(cp, thread, "pay", args)

    if by == "resume":
        pay = Tool(nothing, name="pay", verify=found)
        report = await quick(cp).resume(thread, [pay])
        assert [call.action for call in report.calls] == ["landed"]
        assert report.calls[0].record.attempt == 2

    ledger = quick(cp, stale_after=0.05 * slowdown())
    assert await ledger.run(thread, "pay", args, shop.charge, verify=found) == "found"
    assert shop.effects == []
    statuses = [record.status for record in await cp.list_calls(thread)]
    assert statuses == ["failed", "completed"]


async def test_a_new_attempt_is_left_alone_by_what_verify_found(
    cp: Store, thread: str
) -> None:
    """The attempt of another run holds the key, so its own outcome counts."""
    args: dict[str, JsonValue] = {"amount": 1}

    async def found(_: Effect) -> Landed:
        data = await cp.load(thread)
        assert data is not None
        await quick(cp).release(data.pending[0])
        assert (await quick(cp).begin(thread, "pay", args)).fresh
        return Landed("found")

    await leave(cp, thread, "pay", args)
    report = await quick(cp).resume(thread, [Tool(nothing, name="pay", verify=found)])
    assert [call.action for call in report.calls] == ["alive"]
    assert (report.calls[0].record.status, report.calls[0].record.attempt) == (
        "issued",
        2,
    )


async def test_a_cancelled_run_is_an_orphan(cp: Store, thread: str) -> None:
    """A resume by the same ledger can recover it."""
    shop = Shop(gate=asyncio.Event())
    ledger = quick(cp, stale_after=0.2 * slowdown())
    task = asyncio.create_task(ledger.run(thread, "pay", {"landed": "no"}, shop.charge))
    await shop.began.wait()
    task.cancel()

    async def over() -> bool:
        return task.done()

    await until(over)
    report = await ledger.resume(thread, TOOLS)
    assert [call.action for call in report.calls] == ["released"]
