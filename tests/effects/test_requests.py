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
    CorruptThread,
    JsonValue,
    MemoryCheckpointer,
    open_checkpointer,
)
from cpkit.effects import (
    ApprovalExpired,
    ApprovalRequest,
    Effect,
    EffectDenied,
    EffectLedger,
    EffectTimeout,
    NoEffect,
    NotLanded,
    Superseded,
    approvals,
    tool,
)
from cpkit.effects.effect import request_key
from cpkit.effects.requests import request_of, waiting_tools
from cpkit.lease import Lease, thread_lease
from cpkit.runs.threads import Ask, RunThread
from cpkit.worker import Worker
from tests.effects.shop import (
    Counting,
    Method,
    P,
    Plain,
    Shop,
    Store,
    T,
    claim,
    decision_on,
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


async def move_back(cp: Any, thread: str, by: timedelta) -> None:
    """Let the calls of a thread have been made earlier."""
    dump = await cp.dump_thread(thread)
    calls = [replace(one, issued_at=one.issued_at - by) for one in dump.calls]
    await cp.delete_thread(thread, forget_keys=True)
    await cp.restore_thread(replace(dump, calls=calls, created_at=dump.created_at - by))


async def own(cp: Any, *keys: str) -> list[ApprovalRequest]:
    """Return those undecided requests of the store that are for these keys."""
    return [one for one in await quick(cp).requests() if one.key in keys]


async def first_request(cp: Store, key: str) -> ApprovalRequest:
    """Return the first request of an effect, whatever was asked later."""
    record = await cp.find_call(request_key(key, 1))
    request = None if record is None else request_of(record)
    assert request is not None
    return request


class Finished(Counting):
    """A store that logs a call when it has ended."""

    def _logged(self, method: Method[P, T]) -> Method[P, T]:
        async def logged(*args: P.args, **options: P.kwargs) -> T:
            found = await method(*args, **options)
            self.calls.append(method.__name__)
            return found

        return logged


async def test_an_event_that_is_not_whole_hides_no_request(
    cp: Store, thread: str
) -> None:
    """Another version of cpkit may have written it; workers go on."""
    key = await ask(cp, thread)
    await cp.append(RunThread(cp, thread).name, [{"asks": {"request": "r"}}])
    assert key in [one.key for one in await careful(cp).requests()]
    assert len(await asks_of(cp, thread)) == 1


async def test_requests_lists_undecided_ones_of_all_threads(
    cp: Store, thread: str
) -> None:
    """The oldest comes first, a decided one leaves, and no thread is loaded."""
    keys = [await ask(cp, f"{thread}-{n}", {"n": n}) for n in range(5)]
    counting = Counting(cp)
    ledger = quick(counting)
    listed = await ledger.requests()
    assert [one.key for one in listed if one.key in keys] == keys
    assert set(counting.calls) <= {"load", "find_call", "list_threads"}
    counting.calls.clear()
    again = await ledger.requests()
    assert [one.key for one in again] == [one.key for one in listed]
    # What has not changed is not read again.
    assert counting.calls.count("load") <= len(listed) - len(keys)

    assert (listed[-1].tool, listed[-1].args) == ("charge", {"n": 4})

    await ledger.approve(keys[0])
    await ledger.deny(keys[3])
    left = await own(cp, *keys)
    assert [one.key for one in left] == [keys[1], keys[2], keys[4]]


async def test_requests_of_one_moment_are_listed_in_one_order(
    cp: Any, thread: str
) -> None:
    """The pages of ``cpkit ui`` are cut from the list: none may fall in between."""
    keys = [await ask(cp, thread, {"n": n}) for n in range(6)]
    dump = await cp.dump_thread(thread)
    calls = [replace(one, issued_at=dump.created_at) for one in dump.calls]
    await cp.delete_thread(thread, forget_keys=True)
    await cp.restore_thread(replace(dump, calls=calls))
    listed = [one.record.call.call_id for one in await own(cp, *keys)]
    assert listed == sorted(one.call.call_id for one in calls)


async def test_a_decision_says_by_whom_when_why_and_from_where(
    cp: Store, thread: str
) -> None:
    """Who decides second sees who was first."""
    key = await ask(cp, thread)
    ledger = quick(cp)
    assert await decision_on(ledger, key) is None
    assert await ledger.deny(key, by="ann", reason="too much", origin="the page")
    assert not await ledger.approve(key, by="bob")
    decision = await decision_on(ledger, key)
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
    approved = await decision_on(ledger, other)
    assert approved is not None
    assert approved.verdict == "approved"
    assert approved.origin  # host and process by default


async def test_pending_and_approve_do_not_read_messages(cp: Store, thread: str) -> None:
    """A long thread costs as much as a short one."""
    key = await ask(cp, thread)
    counting = Counting(cp)
    assert [one.key for one in await quick(counting).pending(thread)] == [key]
    assert counting.calls == ["list_calls"]
    assert await quick(counting).approve(key)
    assert "load" not in counting.calls


async def test_a_decision_costs_four_operations_and_the_woken_run_three(
    cp: Store, thread: str
) -> None:
    """A person waits for each of them, from ``approve`` to the start of the handler."""
    people, runner = Finished(cp), Finished(cp)
    runner.watch = cp.watch  # type: ignore[attr-defined]  # the five stores have it
    before_handler: list[str] = []

    def handler(effect: Effect) -> None:
        before_handler.extend(runner.calls)

    ledger = careful(runner, approval_timeout=None)
    run = asyncio.create_task(ledger.run(thread, "charge", ARGS, handler))
    # Looks for the effect and its request, records and reads it, puts it on the list
    # of runs, and looks at it again when it watches.
    asked = ["find_call"] * 2 + ["record_issued", "find_call", "append", "find_call"]

    async def has_asked() -> bool:
        return runner.calls == asked

    await until(has_asked)
    runner.calls.clear()

    assert await quick(people).approve(ledger.key(thread, "charge", ARGS))
    await run
    assert people.calls == [*["find_call"] * 2, "record_result", "append"]
    # It sees the decision, claims, and reads the attempt.
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

    assert [ask.key for ask in await asks_of(cp, thread)] == [key]
    assert not await ledger.approve(key, args=other)
    decision = await decision_on(ledger, key, args=other)
    assert decision is not None
    assert decision.by == "ann"
    assert await ledger.approve(key, by="bob")
    assert await ledger.run(thread, "charge", ARGS, Shop().charge, **order)


async def test_an_erased_request_does_not_hide_an_undecided_one(
    cp: Any, thread: str
) -> None:
    """Of two requests of one effect, the decided one was erased by a policy."""
    order: Any = {"key_fields": ["order"]}
    other: dict[str, JsonValue] = {"order": "7", "amount": 1}
    key = await ask(cp, thread, **order)
    assert await ask(cp, thread, other, **order) == key
    assert await quick(cp).deny(key, args=other)
    assert await cp.erase_calls(thread, datetime.now(UTC) + timedelta(days=1)) == 1
    assert await ask(cp, thread, **order) == key
    assert await quick(cp).approve(key)
    shop = Shop()
    await careful(cp, **order).run(thread, "charge", ARGS, shop.charge)
    assert len(shop.effects) == 1


async def test_a_request_that_was_erased_meanwhile_is_not_denied(
    cp: Any, thread: str
) -> None:
    """Another person approved it after this one read it, and a policy erased it."""
    key = await ask(cp, thread)
    slow = Plain(cp)

    async def record_result(*args: Any, **options: Any) -> Any:
        assert await quick(cp).approve(key)
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        assert await cp.erase_calls(thread, tomorrow) == 1
        return await cp.record_result(*args, **options)

    slow.record_result = record_result
    assert not await quick(slow).deny(key)
    assert (await first_request(cp, key)).verdict == "erased"


async def test_a_restored_request_is_decided_and_listed_again(
    cp: Store, thread: str
) -> None:
    """The list of runs is not in the dump of its thread. A worker needs it, too."""
    key = await ask(cp, thread)
    dump = await cp.dump_thread(thread)  # type: ignore[attr-defined]  # all stores do

    for is_asked_again in (True, False):
        async with MemoryCheckpointer[Any]() as other:
            await other.restore_thread(dump)
            assert await quick(other).requests() == []

            if is_asked_again:
                await ask(other, thread)
                assert [one.key for one in await quick(other).requests()] == [key]

            assert await quick(other).approve(key)
            assert await careful(other).run(thread, "charge", ARGS, Shop("paid").charge)


async def test_a_request_after_a_forgotten_one_is_listed(
    cp: Store, thread: str
) -> None:
    """Its number was used before, and nothing of that request is left."""
    ledger = careful(cp)

    for _ in range(3):
        key = await ask(cp, thread)
        assert [one.key for one in await own(cp, key)] == [key]
        dump = await cp.dump_thread(thread)  # type: ignore[attr-defined]  # all do
        assert await ledger.approve(key)
        assert await ledger.run(thread, "charge", ARGS, Shop("paid").charge) == "paid"
        assert await asks_of(cp, thread) == []
        await cp.delete_thread(thread, forget_keys=True)

    # A restored request is the old one, undecided again.
    await cp.restore_thread(dump)  # type: ignore[attr-defined]  # all stores do
    assert await ask(cp, thread) == key
    assert [one.key for one in await own(cp, key)] == [key]


async def asks_of(cp: Any, thread: str) -> list[Ask]:
    """Return the requests that runs of the thread wait for."""
    return list((await RunThread(cp, thread).look()).asks.values())


class TestExpiry:
    """``expires_after`` ends an undecided request, or an unused approval."""

    async def test_a_late_approval_licenses_nothing(
        self, cp: Store, thread: str
    ) -> None:
        """By the times of the store, at which it was asked for and decided."""
        shop = Shop()
        key = await ask(cp, thread, expires_after=SOON)
        await asyncio.sleep(2 * SOON)
        assert not await quick(cp).approve(key, by="ann")
        assert await own(cp, key) == []

        with pytest.raises(ApprovalExpired):
            await careful(cp).run(thread, "charge", ARGS, shop.charge)

        decision = await decision_on(quick(cp), key)
        assert decision is not None
        assert decision.verdict == "expired"
        assert shop.effects == []

    async def test_an_unused_approval_ends_too(self, cp: Store, thread: str) -> None:
        """An approval in time counts until the request expires."""
        shop = Shop()
        key = await ask(cp, thread, expires_after=SOON)
        assert await quick(cp).approve(key)
        await asyncio.sleep(2 * SOON)

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

    async def test_a_request_expires_after_a_week_if_nothing_is_said(
        self, cp: Store, thread: str
    ) -> None:
        """With ``None`` it never does."""
        await ask(cp, thread)
        await ask(cp, thread, {"order": "8"}, expires_after=None)
        week, never = await quick(cp).pending(thread)
        assert week.expires_at == week.requested_at + timedelta(days=7)
        assert never.expires_at is None

    async def test_a_run_that_begins_later_ends_a_dead_request(
        self, cp: Any, thread: str
    ) -> None:
        """It need not watch the request for a week: the store's clock says so."""
        key = await ask(cp, thread)
        await move_back(cp, thread, timedelta(days=8))
        ledger = careful(cp, approval_timeout=None)

        with pytest.raises(ApprovalExpired):
            await ledger.run(thread, "charge", ARGS, Shop().charge)

        assert await own(cp, key) == []

    async def test_a_worker_that_starts_later_ends_a_dead_request(
        self, cp: Any, thread: str
    ) -> None:
        """Its run ends, and nothing of it is left on the list of runs."""
        key = await ask(cp, thread)
        ended: list[str] = []

        async def agent(cp: Any, lease: Lease) -> None:
            try:
                await careful(cp).run(thread, "charge", ARGS, Shop().charge)
            except ApprovalExpired as exc:
                ended.append(exc.key)
                raise

        assert await Worker(cp, agent, prefix=thread).run_due() == 0
        await move_back(cp, thread, timedelta(days=8))
        assert await Worker(cp, agent, prefix=thread).run_due() == 1
        assert (ended, await own(cp, key)) == ([key], [])
        assert await cp.load(RunThread(cp, thread).name) is None

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


async def test_a_recovery_without_a_policy_heeds_the_decision(
    cp: Store, thread: str
) -> None:
    """The policy is the agent's; the command recovers without it."""
    sent = Shop()

    @tool(name="charge", verify=lambda _: NotLanded())
    async def charge(effect: Effect, order: str, amount: int) -> JsonValue:
        return await sent.charge(effect)

    key = await ask(cp, thread)
    assert await quick(cp).deny(key, by="ann")
    await claim(cp, thread, key, ARGS)
    report = await quick(cp).recover(thread, [charge])
    ((_, outcome),) = report.outcomes
    assert outcome.content == "'charge' was denied by ann"
    assert sent.effects == []


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

        assert await ledger.approve(key, by="bob")
        assert await ledger.run(thread, "charge", ARGS, shop.charge) == {"charge": 1}
        first = (await first_request(cp, key)).decision
        assert first is not None
        assert (first.verdict, first.by) == ("denied", "ann")

        with pytest.raises(ValueError, match="has run"):
            await ledger.ask_again(key)

    async def test_an_expired_request_can_be_asked_again(
        self, cp: Store, thread: str
    ) -> None:
        """The new request expires after as long as the old one, from now on."""
        ledger = careful(cp)
        key = await ask(cp, thread, expires_after=SOON)
        await asyncio.sleep(2 * SOON)
        assert not await ledger.approve(key)
        again = await ledger.ask_again(key)
        assert (again.number, again.expires_after) == (2, SOON)

        with pytest.raises(ValueError, match="no approval request"):
            await ledger.ask_again("unknown")


async def test_two_processes_that_request_at_once_share_a_request(
    cp: Store, thread: str
) -> None:
    """With other arguments of one effect, each request gets a number of its own."""
    options: dict[str, Any] = {"key_fields": ["order"]}

    async def run(amount: int) -> None:
        args: dict[str, JsonValue] = {"order": "7", "amount": amount}

        with pytest.raises(EffectTimeout):
            await careful(cp).run(thread, "charge", args, Shop().charge, **options)

    await asyncio.gather(*(run(n % 3) for n in range(9)))
    key = quick(cp).key(thread, "charge", {"order": "7"}, **options)
    requests = await own(cp, key)
    assert sorted(one.number for one in requests) == [1, 2, 3]
    amounts = [one.args["amount"] for one in requests]
    assert sorted(str(one) for one in amounts) == ["0", "1", "2"]


async def test_the_notifier_gets_the_request_with_a_link(
    cp: Store, thread: str
) -> None:
    """The link leads to the page on which a person decides."""
    seen: list[ApprovalRequest] = []
    await ask(cp, thread, on_approval_required=seen.append)
    own_key = seen[0].record.call.idempotency_key
    place = f"https://ops.example/waiting/decide?id={thread}&request={own_key}"

    for address in ("https://ops.example", "https://ops.example/"):
        assert seen[0].link(address) == place


async def test_a_request_that_is_not_listed_is_listed_by_the_next_run(
    cp: Store, thread: str
) -> None:
    """A process may die between the record of a request and the list of runs."""
    key = quick(cp).key(thread, "charge", ARGS)
    dying = Plain(cp)

    async def refuse(*_: Any, **options: Any) -> int:
        raise RuntimeError("died")

    dying.append = refuse

    with pytest.raises(RuntimeError):
        await careful(dying).run(thread, "charge", ARGS, Shop().charge)

    assert len(await quick(cp).pending(thread)) == 1
    assert await own(cp, key) == []
    await ask(cp, thread)
    assert [one.key for one in await own(cp, key)] == [key]


async def test_a_withdrawn_request_hides_no_later_one(cp: Store, thread: str) -> None:
    """What was decided before it stands, until a later request is decided."""
    ledger, shop = careful(cp), Shop()
    key = await ask(cp, thread)
    await ledger.deny(key)
    second = await ledger.ask_again(key)
    assert await ledger.withdraw(key)
    third = await ledger.ask_again(key)
    assert (second.number, third.number) == (2, 3)
    assert await ledger.approve(key)
    await ledger.run(thread, "charge", ARGS, shop.charge)
    assert len(shop.effects) == 1


async def test_asking_again_twice_is_one_request(cp: Store, thread: str) -> None:
    """The second person reads the old decision before the first one has asked again."""
    key = await ask(cp, thread)
    await careful(cp).deny(key)
    first, second = careful(cp), careful(cp)
    listed = second._requests.all_of
    found, go = asyncio.Event(), asyncio.Event()

    async def paused(*args: Any, **options: Any) -> list[ApprovalRequest]:
        requests = await listed(*args, **options)
        found.set()
        await go.wait()
        return requests

    second._requests.all_of = paused  # type: ignore[method-assign]

    async with asyncio.TaskGroup() as group:
        late = group.create_task(second.ask_again(key))
        await found.wait()
        early = await first.ask_again(key)
        go.set()

    assert late.result().number == early.number == 2


async def test_a_run_is_not_approved_by_a_request_for_other_arguments(
    cp: Store, thread: str
) -> None:
    """Its own was forgotten, and another run's request has the same key since."""
    shop, open_gate = Shop(), asyncio.Event()
    open_gate.set()
    slow = Plain(cp)

    async def find_call(key: str) -> Any:
        await open_gate.wait()
        return await cp.find_call(key)

    slow.find_call = find_call
    ledger = careful(slow, approval_timeout=None, key_fields=["order"])
    run = asyncio.create_task(ledger.run(thread, "charge", ARGS, shop.charge))

    async def asks() -> bool:
        return any(one.args == ARGS for one in await quick(cp).pending(thread))

    await until(asks)
    open_gate.clear()
    await cp.delete_thread(thread, forget_keys=True)
    key = await ask(cp, thread, {"order": "7", "amount": 1}, key_fields=["order"])
    assert await quick(cp).approve(key)
    open_gate.set()
    await until(asks)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert shop.effects == []


async def test_a_cancelled_notifier_is_called_again_by_another_run(
    cp: Store, thread: str, monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.setattr(approvals, "RETRY_FOR", 0.05)
    ledger = quick(cp, requires_approval=lambda _: True, on_approval_required=notify)
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


async def test_a_damaged_request_does_not_hide_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named in the log, and stops only what is about its own effect."""
    async with open_checkpointer(f"sqlite:///{tmp_path}/store.db") as cp:
        bad, good = await ask(cp, "bad"), await ask(cp, "good")

        with closing(sqlite3.connect(tmp_path / "store.db")) as raw, raw:
            damage = "UPDATE cpkit_calls SET args = '{' WHERE args LIKE ?"
            assert raw.execute(damage, (f"%{bad}%",)).rowcount == 1

        ledger = careful(cp)
        assert [one.key for one in await ledger.requests()] == [good]
        assert "cannot read a request of thread 'bad'" in caplog.text
        assert await ledger.approve(good)

        with pytest.raises(CorruptThread):
            await ledger.approve(bad)


async def test_a_used_approval_leaves_the_list_of_runs(cp: Store, thread: str) -> None:
    """Without a lease too; a released attempt stays, as the next may use it."""
    ledger = careful(cp)
    key = await ask(cp, thread)
    await ledger.approve(key)

    def refuses(_: Effect) -> None:
        raise NoEffect("closed")

    with pytest.raises(NoEffect):
        await ledger.run(thread, "charge", ARGS, refuses)

    assert len(await asks_of(cp, thread)) == 1
    assert list(await waiting_tools(cp, {thread})) == ["charge"]
    await ledger.run(thread, "charge", ARGS, Shop().charge)
    assert await waiting_tools(cp, {thread}) == {}
    # Nothing is open, so the thread of its run is gone.
    assert await cp.load(RunThread(cp, thread).name) is None


async def test_no_tool_waits_for_a_completed_effect(cp: Store, thread: str) -> None:
    """A run may die after it recorded the outcome, and before it settled the rest."""
    ledger = careful(cp)
    key = await ask(cp, thread)
    await ledger.approve(key)
    begun = await ledger.begin(thread, "charge", ARGS)
    assert list(await waiting_tools(cp, {thread})) == ["charge"]
    await cp.record_result(thread, begun.record.call.call_id, 1)
    assert await waiting_tools(cp, {thread}) == {}

    with pytest.raises(Superseded):
        await ledger.commit(begun.record, 1)


async def test_a_request_names_the_thread_to_run(cp: Store, thread: str) -> None:
    """That of the main agent's lease, or the given one, and not the sub-agent's."""
    main = f"{thread}-main"

    async with thread_lease(cp, main), thread_lease(cp, thread):
        await ask(cp, thread)

    (request,) = await quick(cp).pending(thread)
    assert (request.thread_id, request.run_thread) == (thread, main)
    assert len(await asks_of(cp, main)) == 1
    assert await asks_of(cp, thread) == []
    await ask(cp, thread, {"n": 2}, run_thread="another")
    assert [one.run_thread for one in await quick(cp).pending(thread)] == [
        main,
        "another",
    ]


async def test_a_begun_effect_is_settled_when_it_is_committed(
    cp: Store, thread: str
) -> None:
    """Its request is off the list of runs, also if another ledger commits it."""
    for by_another in (False, True):
        args: dict[str, JsonValue] = {"by_another": by_another}
        ledger = careful(cp)
        key = await ask(cp, thread, args)
        await ledger.approve(key)
        begun = await ledger.begin(thread, "charge", args)
        assert len(await asks_of(cp, thread)) == 1
        await (quick(cp) if by_another else ledger).commit(begun.record, 1)
        assert await asks_of(cp, thread) == []
