"""Approval requests over all threads: listed, decided by key, expired, asked again."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import (
    CallRecord,
    CorruptThread,
    JsonValue,
    MemoryCheckpointer,
    ThreadDump,
    ToolCall,
    open_checkpointer,
)
from cpkit.effects import (
    ApprovalExpired,
    ApprovalRequest,
    Effect,
    EffectDenied,
    EffectLedger,
    EffectTimeout,
    NotLanded,
    tool,
)
from cpkit.effects.requests import decision_at, request_of
from cpkit.effects.waiting_tools import waiting_tools
from tests.effects.shop import (
    Counting,
    Method,
    OnlySix,
    P,
    Shop,
    Store,
    T,
    quick,
    until,
)

ARGS: dict[str, JsonValue] = {"order": "7", "amount": 5000}

SOON = 0.15 * slowdown()
"""Seconds until a request expires: later than the run that asks, at any load."""


def careful(cp: Any, **options: Any) -> EffectLedger:
    """Return a ledger that needs an approval for every effect, and looks once."""
    settings = {"requires_approval": lambda _: True, "approval_timeout": 0}
    return quick(cp, **{**settings, **options})


async def ask(
    cp: Any, thread: str, args: dict[str, JsonValue] | None = None, **options: Any
) -> str:
    """Request an approval, and return the effect's key."""
    ledger = careful(cp, **options)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", args or ARGS, Shop().charge)

    return ledger.key(thread, "charge", args or ARGS)


async def own(cp: Any, *keys: str, **options: Any) -> list[ApprovalRequest]:
    """Return those undecided requests of the store that are for these keys."""
    return [one for one in await quick(cp).requests(**options) if one.key in keys]


class Finished(Counting):
    """A store that logs a call when it has ended."""

    def _logged(self, method: Method[P, T]) -> Method[P, T]:
        async def logged(*args: P.args, **options: P.kwargs) -> T:
            found = await method(*args, **options)
            self.calls.append(method.__name__)
            return found

        return logged


async def test_requests_lists_undecided_ones_of_all_threads_by_page(
    cp: Store, thread: str
) -> None:
    """The oldest comes first, a decided one leaves, and no thread is loaded."""
    keys = [await ask(cp, f"{thread}-{n}", {"n": n}) for n in range(5)]
    counting = Counting(cp, True)
    ledger = quick(counting)
    listed = await ledger.requests(limit=1_000)
    assert [one.key for one in listed if one.key in keys] == keys
    assert set(counting.calls) <= {"load", "find_call"}
    assert counting.calls.count("load") == 1

    first = await ledger.requests(limit=2)
    rest: list[ApprovalRequest] = []
    page = first

    while page:
        rest += page
        page = await ledger.requests(after=page[-1].cursor, limit=2)

    assert [one.key for one in rest] == [one.key for one in listed]
    assert (listed[-1].tool, listed[-1].args) == ("charge", {"n": 4})

    await ledger.approve(keys[0])
    await ledger.deny(keys[3])
    left = await own(cp, *keys)
    assert [one.key for one in left] == [keys[1], keys[2], keys[4]]

    with pytest.raises(ValueError, match="limit"):
        await ledger.requests(limit=0)


async def test_a_decision_says_by_whom_when_why_and_from_where(
    cp: Store, thread: str
) -> None:
    """Who decides second sees who was first."""
    key = await ask(cp, thread)
    ledger = quick(cp)
    assert await ledger.decision(key) is None
    assert await ledger.deny(key, by="ann", reason="too much", origin="the page")
    assert not await ledger.approve(key, by="bob")
    decision = await ledger.decision(key)
    assert decision is not None
    assert (decision.verdict, decision.by, decision.reason, decision.origin) == (
        "denied",
        "ann",
        "too much",
        "the page",
    )
    assert decision.at is not None
    assert abs((datetime.now(UTC) - decision.at).total_seconds()) < 600
    assert str(decision) == "denied by ann: too much"

    other = await ask(cp, thread, {"n": 1})
    await ledger.approve(other)
    approved = await ledger.decision(other)
    assert approved is not None
    assert approved.is_approved
    assert approved.origin  # host and process by default


async def test_requests_work_with_the_six_methods_alone(cp: Store, thread: str) -> None:
    """A store without receipts lists and decides by key too."""
    six = OnlySix(cp)
    key = await ask(six, thread)
    assert [one.key for one in await own(six, key, limit=1_000)] == [key]
    assert await quick(six).approve(key, by="ann")
    assert await own(six, key, limit=1_000) == []
    shop = Shop()
    assert await careful(six).run(thread, "charge", ARGS, shop.charge) == {"charge": 1}


async def test_pending_and_approve_do_not_read_messages(cp: Store, thread: str) -> None:
    """A long thread costs as much as a short one."""
    key = await ask(cp, thread)
    counting = Counting(cp, True)
    assert [one.key for one in await quick(counting).pending(thread)] == [key]
    assert counting.calls == ["list_calls"]
    loaded: list[str] = []

    async def load(thread_id: str) -> Any:
        loaded.append(thread_id)
        return await cp.load(thread_id)

    counting.load = load
    assert await quick(counting).approve(thread, key)
    assert loaded == ["cpkit:requests"]


async def test_a_decision_costs_four_operations_and_the_woken_run_three(
    cp: Store, thread: str
) -> None:
    """A person waits for each of them, from ``approve`` to the start of the handler."""
    people, runner = Finished(cp, True), Finished(cp, True)
    runner.watch = cp.watch  # type: ignore[attr-defined]  # the five stores have it
    before_handler: list[str] = []

    def handler(effect: Effect) -> None:
        before_handler.extend(runner.calls)

    ledger = careful(runner, approval_timeout=None)
    run = asyncio.create_task(ledger.run(thread, "charge", ARGS, handler))
    # Looks for the effect and its request, records the request and its entry, reads the
    # request, and looks at it again when it watches.
    asked = ["find_call"] * 2 + ["record_issued"] * 2 + ["find_call"] * 2

    async def has_asked() -> bool:
        return runner.calls == asked

    await until(has_asked)
    runner.calls.clear()

    assert await quick(people).approve(ledger.key(thread, "charge", ARGS))
    await run
    assert people.calls == ["load", "find_call", "record_result", "save_extra"]
    assert before_handler == ["find_call", "record_issued", "find_call"]


async def test_a_request_behind_an_undecided_one_is_found_by_its_arguments(
    cp: Store, thread: str
) -> None:
    """Also once it is off the list, because its run acted on the decision."""
    ledger = careful(cp)
    order: Any = {"key_fields": ["order"]}
    other: dict[str, JsonValue] = {"order": "7", "amount": 1}

    for args in (ARGS, other):
        with pytest.raises(EffectTimeout):
            await ledger.run(thread, "charge", args, Shop().charge, **order)

    key = ledger.key(thread, "charge", ARGS, **order)
    assert await ledger.deny(key, args=other, by="ann")

    with pytest.raises(EffectDenied):
        await ledger.run(thread, "charge", other, Shop().charge, **order)

    assert len([one for one in await ledger._requests.entries() if one.key == key]) == 1
    assert not await ledger.approve(key, args=other)
    assert not await ledger.approve(key, number=2)
    decision = await ledger.decision(key, args=other)
    assert decision is not None
    assert decision.by == "ann"
    assert await ledger.approve(key, by="bob")
    assert await ledger.run(thread, "charge", ARGS, Shop().charge, **order)


async def test_a_restored_request_is_listed_again(cp: Store, thread: str) -> None:
    """The list is not in the dump of its thread. A worker needs it, too."""
    key = await ask(cp, thread)
    dump = await cp.dump_thread(thread)  # type: ignore[attr-defined]  # all stores do

    async with MemoryCheckpointer[Any]() as other:
        await other.restore_thread(dump)
        assert await quick(other).requests() == []
        await ask(other, thread)
        assert [one.key for one in await quick(other).requests()] == [key]


async def test_a_request_after_a_forgotten_one_is_listed(
    cp: Store, thread: str
) -> None:
    """Its number was used before, and the entry of that request has ended."""
    ledger = careful(cp)

    for _ in range(3):
        key = await ask(cp, thread)
        assert [one.key for one in await own(cp, key)] == [key]
        dump = await cp.dump_thread(thread)  # type: ignore[attr-defined]  # all do
        assert await ledger.approve(key)
        assert await ledger.run(thread, "charge", ARGS, Shop("paid").charge) == "paid"
        assert not [one for one in await ledger._requests.entries() if one.key == key]
        await cp.delete_thread(thread, forget_keys=True)

    # A restored request is the old one, undecided again.
    await cp.restore_thread(dump)  # type: ignore[attr-defined]  # all stores do
    assert await ask(cp, thread) == key
    assert [one.key for one in await own(cp, key)] == [key]


async def test_a_late_decision_stays_listed_for_its_run(cp: Any, thread: str) -> None:
    """For 30 days from the decision, however long the person took to decide."""
    key = await ask(cp, thread)
    assert await quick(cp).approve(key)
    dumps = [await cp.dump_thread(one) for one in (thread, "cpkit:requests")]

    for days, left in ((29, 1), (31, 0)):
        async with MemoryCheckpointer[Any]() as other:
            for dump in dumps:
                assert dump is not None
                await other.restore_thread(_older(dump, asked=31, decided=days))

            assert await quick(other).requests() == []
            assert len(await quick(other)._requests.entries()) == left


def _older(dump: ThreadDump, asked: int, decided: int) -> ThreadDump:
    """Return a dump whose calls were claimed and resolved so many days ago."""
    now = datetime.now(UTC)
    calls = [
        replace(
            one,
            issued_at=now - timedelta(days=asked),
            resolved_at=one.resolved_at and now - timedelta(days=decided),
        )
        for one in dump.calls
    ]
    return replace(dump, calls=calls)


class TestExpiry:
    """``expires_after`` ends an undecided request, or an unused approval."""

    async def test_a_late_approval_licenses_nothing(
        self, cp: Store, thread: str
    ) -> None:
        """The run raises, whether it looks before or after the late approval."""
        shop = Shop()
        key = await ask(cp, thread, expires_after=SOON)
        await until_expired(cp, key)
        assert not await quick(cp).approve(key, by="ann")
        assert await own(cp, key) == []

        with pytest.raises(ApprovalExpired):
            await careful(cp).run(thread, "charge", ARGS, shop.charge)

        decision = await quick(cp).decision(key)
        assert decision is not None
        assert decision.verdict == "expired"
        assert shop.effects == []

    async def test_an_approval_in_the_last_moment_was_one(
        self, cp: Store, thread: str
    ) -> None:
        """The answer arrives after a run used it, and after the request expired."""
        key = await ask(cp, thread, expires_after=SOON)
        slow = Counting(cp, True)
        shop = Shop()

        async def record_late(*args: Any, **options: Any) -> CallRecord:
            record = await cp.record_result(*args, **options)
            await careful(cp).run(thread, "charge", ARGS, shop.charge)
            await until_expired(cp, key)
            return record

        slow.record_result = record_late
        assert await quick(slow).approve(key)
        assert len(shop.effects) == 1

    async def test_an_approval_that_the_store_records_too_late_never_counts(
        self, cp: Store, thread: str
    ) -> None:
        """Neither for the person nor for a run whose clock is behind."""
        key = await ask(cp, thread, expires_after=SOON)
        slow = Counting(cp, True)

        async def record_late(*args: Any, **options: Any) -> CallRecord:
            await until_expired(cp, key)
            return await cp.record_result(*args, **options)

        slow.record_result = record_late
        assert not await quick(slow).approve(key)
        (record,) = [
            one for one in await cp.list_calls(thread) if one.status == "completed"
        ]
        request = request_of(record)
        assert request is not None
        made = decision_at(request, request.requested_at)
        assert made is not None
        assert made.verdict == "expired"

    async def test_an_unused_approval_ends_too(self, cp: Store, thread: str) -> None:
        """An approval in time counts until the request expires."""
        shop = Shop()
        key = await ask(cp, thread, expires_after=SOON)
        assert await quick(cp).approve(key)
        await until_expired(cp, key)

        with pytest.raises(ApprovalExpired):
            await careful(cp).run(thread, "charge", ARGS, shop.charge)

        assert shop.effects == []

    async def test_a_waiting_run_ends_with_its_request(
        self, cp: Store, thread: str
    ) -> None:
        """It does not wait for a decision that would not count."""
        ledger = careful(cp, approval_timeout=None, expires_after=0.1)

        with pytest.raises(ApprovalExpired, match="ask_again"):
            await ledger.run(thread, "charge", ARGS, Shop().charge)

    @pytest.mark.parametrize("seconds", [0, -1, 1e12, inf, nan])
    async def test_the_time_is_positive_and_ends_before_the_calendar(
        self, seconds: float, cp: Store, thread: str
    ) -> None:
        """A request that can never be approved, or not be read, is a mistake."""
        with pytest.raises(ValueError, match="expires_after"):
            quick(cp, expires_after=seconds)

        with pytest.raises(ValueError, match="expires_after"):
            await ask(cp, thread, expires_after=seconds)

        assert await own(cp, quick(cp).key(thread, "charge", ARGS)) == []

    async def test_a_recorded_time_after_the_calendar_is_never(
        self, cp: Store, thread: str
    ) -> None:
        """Such a request does not hide those of other threads."""
        key = quick(cp).key(thread, "charge", ARGS)
        await quick(cp)._requests.create(
            key, 1, thread, thread, "charge", ARGS, expires_after=1e12
        )
        (request,) = await own(cp, key)
        assert request.expires_at is None


async def test_a_recovery_without_a_policy_heeds_the_decision(
    cp: Store, thread: str
) -> None:
    """The policy is the agent's; the command recovers without it."""
    dead, sent = Shop(gate=asyncio.Event()), Shop()

    @tool(name="charge", verify=lambda _: NotLanded())
    async def charge(effect: Effect, order: str, amount: int) -> JsonValue:
        return await sent.charge(effect)

    key = await ask(cp, thread, expires_after=5 * SOON)
    assert await quick(cp).approve(key)
    run = asyncio.create_task(careful(cp).run(thread, "charge", ARGS, dead.charge))
    await dead.began.wait()
    run.cancel()
    await asyncio.wait([run])
    await until_expired(cp, key)
    await quick(cp).ask_again(key)
    assert await quick(cp).deny(key, by="ann")
    report = await quick(cp).recover(thread, [charge])
    ((_, outcome),) = report.outcomes
    assert outcome.content == "'charge' was denied by ann"
    assert sent.effects == []


@pytest.mark.parametrize("way", ["run", "recover"])
async def test_a_denial_during_the_claim_stops_the_effect(
    cp: Store, thread: str, way: str
) -> None:
    """The answer to the claim arrives after the approval expired and was replaced."""
    sent = Shop()

    @tool(name="charge", verify=lambda _: NotLanded())
    async def charge(effect: Effect, order: str, amount: int) -> JsonValue:
        return await sent.charge(effect)

    key = await ask(cp, thread, expires_after=SOON if way == "run" else 5 * SOON)
    assert await quick(cp).approve(key)

    if way == "recover":  # a process claims, and dies
        await careful(cp).begin(thread, "charge", ARGS)

    issue = cp.record_issued

    async def late(thread_id: str, call: ToolCall) -> CallRecord | None:
        answer = await issue(thread_id, call)

        if call.tool_name == "charge":
            vars(cp).pop("record_issued")
            await until_expired(cp, key)
            await quick(cp).ask_again(key)
            assert await quick(cp).deny(key, by="ann")

        return answer

    vars(cp)["record_issued"] = late

    if way == "run":
        with pytest.raises(EffectDenied):
            await careful(cp).run(thread, "charge", ARGS, sent.charge)
    else:
        report = await quick(cp).recover(thread, [charge])
        ((_, outcome),) = report.outcomes
        assert outcome.content == "'charge' was denied by ann"

    assert "record_issued" not in vars(cp)
    assert sent.effects == []


async def until_expired(cp: Any, key: str) -> None:
    """Wait until the request of a key has expired."""

    async def expired() -> bool:
        decision = await quick(cp).decision(key)
        return decision is not None and decision.verdict == "expired"

    await until(expired)


class TestAskAgain:
    """`ask_again` is a new request with the next number."""

    async def test_a_denied_request_can_be_asked_again(
        self, cp: Store, thread: str
    ) -> None:
        """The old decision stays, and the new one lets the effect run."""
        shop = Shop()
        ledger = careful(cp)
        key = await ask(cp, thread)
        await ledger.deny(key, by="ann")
        again = await ledger.ask_again(key)
        assert (again.number, again.args, again.decision) == (2, ARGS, None)
        assert (await ledger.ask_again(key)).number == 2
        assert [one.number for one in await own(cp, key)] == [2]

        with pytest.raises(EffectTimeout):
            await ledger.run(thread, "charge", ARGS, shop.charge)

        assert not await ledger.approve(key, number=1)
        assert await ledger.approve(key, by="bob")
        assert await ledger.run(thread, "charge", ARGS, shop.charge) == {"charge": 1}
        first = await ledger.decision(key, number=1)
        assert first is not None
        assert (first.verdict, first.by) == ("denied", "ann")

        with pytest.raises(ValueError, match="approved already"):
            await ledger.ask_again(key)

    async def test_expired_and_withdrawn_requests_can_be_asked_again(
        self, cp: Store, thread: str
    ) -> None:
        """The new request expires after as long as the old one, from now on."""
        ledger = careful(cp)
        key = await ask(cp, thread, expires_after=SOON)
        await until_expired(cp, key)
        again = await ledger.ask_again(key)
        assert again.number == 2
        assert again.expires_at is not None

        other = await ask(cp, thread, {"n": 2})
        (request,) = await own(cp, other)
        await cp.record_result(
            request.thread_id, request.record.call.call_id, None, success=False
        )

        with pytest.raises(EffectDenied, match="withdrawn"):
            await ledger.run(thread, "charge", {"n": 2}, Shop().charge)

        with pytest.raises(ValueError, match="no approval request"):
            await ledger.ask_again("unknown")


async def test_two_processes_that_request_at_once_share_a_request(
    cp: Store, thread: str
) -> None:
    """With other arguments of one effect, each request gets a number of its own."""
    options: dict[str, Any] = {"resource": "order-7"}

    async def run(amount: int) -> None:
        with pytest.raises(EffectTimeout):
            await careful(cp).run(
                thread, "charge", {"amount": amount}, Shop().charge, **options
            )

    await asyncio.gather(*(run(n % 3) for n in range(9)))
    key = quick(cp).key(thread, "charge", {}, **options)
    requests = await own(cp, key, limit=1_000)
    assert sorted(one.number for one in requests) == [1, 2, 3]
    amounts = [one.args["amount"] for one in requests]
    assert sorted(str(one) for one in amounts) == ["0", "1", "2"]


async def test_the_notifier_gets_the_request_with_a_link(
    cp: Store, thread: str
) -> None:
    """The link leads to the page on which a person decides."""
    seen: list[ApprovalRequest] = []
    options: dict[str, Any] = {"on_approval_required": seen.append}
    await ask(cp, thread, **options)
    await ask(cp, thread, {"n": 1}, ui="https://ops.example/", **options)
    assert [one.link for one in seen][0] == ""
    assert seen[1].link.startswith(
        f"https://ops.example/waiting/decide?id={thread}&request="
    )
    assert seen[1].link.endswith(seen[1].record.call.idempotency_key)


async def test_an_entry_without_a_request_is_not_listed(cp: Store, thread: str) -> None:
    """A process may die between the two; its next run records the request."""
    key = quick(cp).key(thread, "charge", ARGS)

    class DiesAfterTheEntry(OnlySix):
        def __init__(self, inner: Store) -> None:
            super().__init__(inner)
            self.record_issued = self.refuse

        async def refuse(self, thread_id: str, call: ToolCall) -> CallRecord | None:
            if thread_id != "cpkit:requests":
                raise RuntimeError("died")

            return await cp.record_issued(thread_id, call)

    with pytest.raises(RuntimeError):
        await careful(DiesAfterTheEntry(cp)).run(thread, "charge", ARGS, Shop().charge)

    assert await own(cp, key, limit=1_000) == []
    assert not await quick(cp).approve(key)
    await ask(cp, thread)
    assert [one.key for one in await own(cp, key, limit=1_000)] == [key]


async def test_a_number_never_decides_other_arguments(cp: Store, thread: str) -> None:
    """Two requests share a key; a link shows the number and arguments of one."""
    ledger = careful(cp)
    order: Any = {"key_fields": ["order"]}
    shown: dict[str, JsonValue] = {"order": "7", "amount": 10}
    other: dict[str, JsonValue] = {"order": "7", "amount": 9999}

    for args in (shown, other):
        with pytest.raises(EffectTimeout):
            await ledger.run(thread, "charge", args, Shop().charge, **order)

    key = ledger.key(thread, "charge", shown, **order)
    assert not await ledger.approve(key, number=2, args=shown)
    assert {one.decision for one in await own(cp, key)} == {None}
    assert await ledger.approve(key, number=1, args=shown)


async def test_a_withdrawn_request_does_not_hide_a_later_approval(
    cp: Store, thread: str
) -> None:
    """The second of three requests is withdrawn; the third one licenses the run."""
    ledger, shop = careful(cp), Shop()
    key = await ask(cp, thread)
    await ledger.deny(key)
    second = await ledger.ask_again(key)
    await cp.record_result(thread, second.record.call.call_id, {}, success=False)
    third = await ledger.ask_again(key)

    assert (second.number, third.number) == (2, 3)
    assert await ledger.approve(key, number=3)
    await ledger.run(thread, "charge", ARGS, shop.charge)
    assert len(shop.effects) == 1


async def test_a_withdrawn_request_does_not_hide_a_later_denial(
    cp: Store, thread: str
) -> None:
    """A run acted on the denial, so the list of open requests does not have it."""
    ledger, shop = careful(cp), Shop()
    order: Any = {"key_fields": ["order"]}
    later: dict[str, JsonValue] = {"order": "7", "amount": 11}

    with pytest.raises(EffectTimeout):
        await ledger.run(
            thread, "charge", {**later, "amount": 10}, shop.charge, **order
        )

    (first,) = await ledger.pending(thread)
    await cp.record_result(thread, first.record.call.call_id, {}, success=False)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", later, shop.charge, **order)

    assert await ledger.deny(first.key, by="ann", args=later)

    with pytest.raises(EffectDenied):
        await ledger.run(thread, "charge", later, shop.charge, **order)

    decision = await quick(cp).decision(first.key, args=later)
    assert decision is not None
    assert (decision.verdict, decision.by) == ("denied", "ann")
    assert (await ledger.ask_again(first.key)).number == 3
    assert shop.effects == []


async def test_asking_again_twice_is_one_request(cp: Store, thread: str) -> None:
    """The second person reads the old decision before the first one has asked again."""
    key = await ask(cp, thread)
    await careful(cp).deny(key)
    first, second = careful(cp), careful(cp)
    listed = second._approvals._requests.all_of
    found, go = asyncio.Event(), asyncio.Event()
    calls = 0

    async def paused(*args: Any, **options: Any) -> list[ApprovalRequest]:
        nonlocal calls
        calls += 1

        if calls == 2:  # the first call found the denied request
            found.set()
            await go.wait()

        return await listed(*args, **options)

    second._approvals._requests.all_of = paused  # type: ignore[method-assign]

    async with asyncio.TaskGroup() as group:
        late = group.create_task(second.ask_again(key))
        await found.wait()
        early = await first.ask_again(key)
        go.set()

    assert late.result().number == early.number == 2


async def test_a_cancelled_notifier_is_called_again_by_another_run(
    cp: Store, thread: str
) -> None:
    """The run that waits beside it does not count its call as a notification."""
    calls: list[ApprovalRequest] = []
    entered, told = asyncio.Event(), asyncio.Event()

    async def notify(request: ApprovalRequest) -> None:
        calls.append(request)

        if len(calls) == 1:
            entered.set()
            await asyncio.Event().wait()

        told.set()

    ledger = quick(
        cp,
        requires_approval=lambda _: True,
        on_approval_required=notify,
        patience=0.05,
    )
    begun = [asyncio.Event(), asyncio.Event()]

    async def run(number: int) -> None:
        begun[number].set()
        await ledger.run(thread, "charge", ARGS, Shop().charge)

    first = asyncio.create_task(run(0))
    await entered.wait()
    second = asyncio.create_task(run(1))
    await begun[1].wait()

    for _ in range(50):  # so that it waits beside the first run, whose call goes on
        await asyncio.sleep(0.001)

    first.cancel()

    try:
        async with asyncio.timeout(10 * slowdown()):
            await told.wait()
    finally:
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)

    assert len(calls) == 2


async def test_a_damaged_entry_does_not_hide_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named in the log, and stops only what is about its own effect."""
    async with open_checkpointer(f"sqlite:///{tmp_path}/store.db") as cp:
        bad, good = await ask(cp, "bad"), await ask(cp, "good")

        with closing(sqlite3.connect(tmp_path / "store.db")) as raw, raw:
            damage = "UPDATE cpkit_calls SET args = '{' WHERE call_id LIKE ?"
            assert raw.execute(damage, (f"request:{bad}:%",)).rowcount == 1

        ledger = careful(cp)
        assert [one.key for one in await ledger.requests()] == [good]
        assert f"request:{bad}:1:" in caplog.text
        assert await ledger.approve(good)

        with pytest.raises(CorruptThread, match=f"request:{bad}:1:"):
            await ledger.approve(bad)


async def open_entries(cp: Any, key: str) -> int:
    """Return how many open entries the list has of an effect."""
    data = await cp.load("cpkit:requests")
    pending = () if data is None else data.pending
    return sum(one.call.args["key"] == key for one in pending)


@pytest.mark.parametrize("by_another", [False, True])
async def test_a_committed_effect_leaves_the_list(
    cp: Store, thread: str, by_another: bool
) -> None:
    """Its requests are ended with the outcome, after `begin` too."""
    ledger = careful(cp)
    key = await ask(cp, thread)
    await ledger.approve(key)
    begun = await ledger.begin(thread, "charge", ARGS)
    assert begun.fresh
    assert await open_entries(cp, key) == 1
    await (quick(cp) if by_another else ledger).commit(begun.record, 1)
    assert await open_entries(cp, key) == 0
    assert await waiting_tools(cp, {thread}) == {}


async def test_a_released_effect_stays_on_the_list(cp: Store, thread: str) -> None:
    """Its next attempt may use the approval."""
    ledger = careful(cp)
    key = await ask(cp, thread)
    await ledger.approve(key)
    await ledger.release((await ledger.begin(thread, "charge", ARGS)).record)
    assert await open_entries(cp, key) == 1
    assert list(await waiting_tools(cp, {thread})) == ["charge"]


async def test_no_tool_waits_for_a_completed_effect(cp: Store, thread: str) -> None:
    """A run may die after it recorded the outcome, and before it ended the entry."""
    ledger = careful(cp)
    key = await ask(cp, thread)
    await ledger.approve(key)
    begun = await ledger.begin(thread, "charge", ARGS)
    assert list(await waiting_tools(cp, {thread})) == ["charge"]
    await cp.record_result(thread, begun.record.call.call_id, 1)
    assert await open_entries(cp, key) == 1
    assert await waiting_tools(cp, {thread}) == {}
