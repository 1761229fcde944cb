"""Approvals: no effect runs unapproved, and a denied effect never runs."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta, tzinfo
from random import Random
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import (
    JsonValue,
    MemoryCheckpointer,
    ToolCall,
)
from cpkit.effects import (
    Approval,
    ApprovalWithdrawn,
    Effect,
    EffectDenied,
    EffectErased,
    EffectLedger,
    EffectTimeout,
    KeyReused,
    Landed,
    NotLanded,
    ToolRegistry,
    effect_of,
    people,
    requests,
    tool,
)
from cpkit.runs import threads
from tests.effects.shop import Plain, Shop, Store, claim, decision_on, quick, until
from tests.simulation.loop import simulated_loop

ARGS: dict[str, JsonValue] = {"order": "7", "amount": 5000}
OTHER: dict[str, JsonValue] = {"order": "7", "amount": 9000}

SOON = 0.3 * slowdown()
"""Seconds until a request expires: later than the steps before, at any load."""


def careful(cp: Any, **options: Any) -> EffectLedger:
    """Return a ledger that needs an approval for every effect."""
    return quick(cp, requires_approval=lambda _: True, **options)


async def requested(cp: Store, thread: str, count: int = 1) -> None:
    """Wait until the requests are recorded."""

    async def recorded() -> bool:
        return len(await quick(cp).pending(thread)) == count

    await until(recorded)


async def test_an_effect_waits_for_its_approval(cp: Store, thread: str) -> None:
    """Another ledger sees the request and approves it; only then the effect runs."""
    shop = Shop()
    run = asyncio.create_task(careful(cp).run(thread, "charge", ARGS, shop.charge))
    await requested(cp, thread)
    assert shop.effects == []
    (request,) = await quick(cp).pending(thread)
    assert (request.tool, request.args, request.thread_id) == ("charge", ARGS, thread)
    assert await quick(cp).approve(request.key, by="ann")
    assert await run == {"charge": 1}
    assert await quick(cp).pending(thread) == []
    # A replay does not call the policy, and the decision does not change.
    assert await quick(cp).run(thread, "charge", ARGS, shop.charge) == {"charge": 1}
    assert await quick(cp).approve(request.key)
    assert not await quick(cp).deny(request.key)


async def test_a_denial_is_final(cp: Store, thread: str) -> None:
    """Every later run gets it with its reason, and no approval undoes it."""
    shop = Shop()
    run = asyncio.create_task(careful(cp).run(thread, "charge", ARGS, shop.charge))
    await requested(cp, thread)
    key = quick(cp).key(thread, "charge", ARGS)
    assert await quick(cp).deny(key, reason="too much", by="bob")

    with pytest.raises(EffectDenied, match="denied by bob: too much"):
        await run

    assert not await quick(cp).approve(key)
    assert await quick(cp).deny(key)

    with pytest.raises(EffectDenied, match="too much"):
        await careful(cp).run(thread, "charge", ARGS, shop.charge)

    assert shop.effects == []


async def test_two_decisions_at_once_have_one_winner(cp: Store, thread: str) -> None:
    """Of an approval and a denial, exactly one returns ``True``."""
    for number in range(5):
        args: dict[str, JsonValue] = {"n": number}
        key = quick(cp).key(thread, "charge", args)

        with pytest.raises(EffectTimeout):
            await careful(cp, approval_timeout=0).run(
                thread, "charge", args, Shop().charge
            )

        both = await asyncio.gather(quick(cp).approve(key), quick(cp).deny(key))
        assert sorted(both) == [False, True]


async def test_a_decision_before_the_request_does_nothing(
    cp: Store, thread: str
) -> None:
    """It returns ``False``, and the later request is undecided."""
    key = quick(cp).key(thread, "charge", ARGS)
    assert not await quick(cp).approve(key)
    assert not await quick(cp).deny(key)
    assert not await quick(cp).approve(key, args=ARGS)
    shop = Shop()

    with pytest.raises(EffectTimeout, match="an approval"):
        await careful(cp, approval_timeout=0.05).run(
            thread, "charge", ARGS, shop.charge
        )

    assert shop.effects == []


async def test_an_approval_binds_all_arguments(cp: Store, thread: str) -> None:
    """With ``key_fields``, another amount is the same effect but a new request."""
    shop = Shop()
    ledger = careful(cp, approval_timeout=0)
    options: dict[str, Any] = {"key_fields": ["order"]}

    for args in (ARGS, OTHER):
        with pytest.raises(EffectTimeout):
            await ledger.run(thread, "charge", args, shop.charge, **options)

    key = ledger.key(thread, "charge", ARGS, key_fields=["order"])
    assert [r.key for r in await ledger.pending(thread)] == [key, key]

    with pytest.raises(ValueError, match="args="):
        await ledger.approve(key)

    assert await ledger.approve(key, args=OTHER)
    assert await ledger.approve(key, args=OTHER)
    assert not await ledger.deny(key, args=OTHER)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", ARGS, shop.charge, **options)

    assert shop.effects == []
    await ledger.run(thread, "charge", OTHER, shop.charge, **options)
    assert [effect.args for effect in shop.effects] == [OTHER]


async def test_a_decision_by_key_alone_is_for_the_first_request(
    cp: Store, thread: str
) -> None:
    """A person cannot approve by it a request that came after they looked."""
    ledger = careful(cp, approval_timeout=0)
    options: dict[str, Any] = {"key_fields": ["order"]}
    key = ledger.key(thread, "charge", ARGS, key_fields=["order"])

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", ARGS, Shop().charge, **options)

    # A person sees this request. Before they approve it, another person denies it, and
    # the model requests a larger amount.
    assert await ledger.deny(key)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", OTHER, Shop().charge, **options)

    with pytest.raises(ValueError, match="args="):
        await ledger.approve(key)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", OTHER, Shop().charge, **options)

    assert await ledger.deny(key, args=OTHER)
    assert not await ledger.approve(key)


async def test_a_given_key_is_requested_with_one_set_of_args(
    cp: Store, thread: str
) -> None:
    """Other arguments raise ``KeyReused`` before a second request is recorded."""
    ledger = careful(cp, approval_timeout=0)
    options: dict[str, Any] = {"idempotency_key": "order-7"}

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", ARGS, Shop().charge, **options)

    with pytest.raises(KeyReused):
        await ledger.run(thread, "charge", OTHER, Shop().charge, **options)


async def test_the_request_is_recorded_before_the_notifier_is_called(
    cp: Store, thread: str
) -> None:
    """The notifier finds the request, and can approve it at once."""

    async def notify(effect: Effect) -> None:
        assert [r.key for r in await quick(cp).pending(effect.thread_id)] == [
            effect.key
        ]
        assert await quick(cp).approve(effect.key)

    ledger = careful(cp, on_approval_required=notify)
    assert await ledger.run(thread, "charge", ARGS, Shop().charge) == {"charge": 1}


async def test_each_process_calls_the_notifier_once(
    cp: Store, thread: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is called for an undecided request, and its errors are only logged."""
    notified: list[str] = []

    def notify(effect: Effect) -> None:
        notified.append(effect.key)

        if len(notified) == 1:
            raise OSError("mail is down")

    for process in range(2):
        ledger = careful(cp, approval_timeout=0, on_approval_required=notify)

        for _ in range(3):
            with (
                caplog.at_level(logging.ERROR, "cpkit.effects"),
                pytest.raises(EffectTimeout),
            ):
                await ledger.run(thread, "charge", ARGS, Shop().charge)

        # The call that failed was retried.
        assert len(notified) == 2 + process

    assert "on_approval_required failed" in caplog.text


def test_a_notifier_that_fails_is_retried_later() -> None:
    """It is not called at every look at the request, but every 30 seconds."""
    called_at: list[float] = []

    def notify(_: Effect) -> None:
        called_at.append(asyncio.get_running_loop().time())
        raise OSError("mail is down")

    async def main() -> None:
        async with MemoryCheckpointer[dict[str, Any]]() as cp:
            ledger = careful(cp, approval_timeout=100, on_approval_required=notify)

            with pytest.raises(EffectTimeout):
                await ledger.run("t", "charge", ARGS, Shop().charge)

    simulated_loop(Random(0)).run(main())
    assert [round(when / 10) for when in called_at] == [0, 3, 6, 9]


async def test_a_policy_may_be_async_and_gets_the_arguments(
    cp: Store, thread: str
) -> None:
    """It is called before the claim, and its exception stops the run."""

    async def policy(effect: Effect) -> bool:
        assert (effect.call_id, effect.attempt) == ("", 0)
        amount = effect.args["amount"]
        assert isinstance(amount, int)
        return amount > 1000

    ledger = quick(cp, requires_approval=policy, approval_timeout=0)
    assert await ledger.run(thread, "charge", {"amount": 5}, Shop().charge)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", {"amount": 5000}, Shop().charge)

    with pytest.raises(KeyError):
        await ledger.run(thread, "charge", {}, Shop().charge)


async def test_begin_needs_an_approval_too(cp: Store, thread: str) -> None:
    """The claim comes after the decision."""
    ledger = careful(cp, approval_timeout=0)

    with pytest.raises(EffectTimeout):
        await ledger.begin(thread, "charge", ARGS)

    await ledger.approve(ledger.key(thread, "charge", ARGS))
    assert (await ledger.begin(thread, "charge", ARGS)).fresh


async def test_an_erased_approval_does_not_count(cp: Store, thread: str) -> None:
    """The run raises ``EffectErased``, whether the request was decided or not."""
    shop = Shop()
    ledger = careful(cp, approval_timeout=0)

    for number, decide in enumerate([True, False]):
        args: dict[str, JsonValue] = {"n": number}

        with pytest.raises(EffectTimeout):
            await ledger.run(thread, "charge", args, shop.charge)

        if decide:
            await ledger.approve(ledger.key(thread, "charge", args))

    await cp.delete_thread(thread)

    for number in range(2):
        args = {"n": number}

        with pytest.raises(EffectErased, match="approval"):
            await ledger.run(thread, "charge", args, shop.charge)

        assert not await ledger.approve(ledger.key(thread, "charge", args))

    assert shop.effects == []


async def test_an_approval_that_is_erased_before_the_answer_does_not_count(
    cp: Store, thread: str
) -> None:
    """The store answers the run's request late, and it was decided and erased since."""
    key = quick(cp).key(thread, "charge", ARGS)
    slow = Plain(cp)

    async def record_issued(thread_id: str, call: ToolCall) -> Any:
        held = await cp.record_issued(thread_id, call)
        assert await quick(cp).approve(key)
        await cp.delete_thread(thread)
        return held

    slow.record_issued = record_issued

    with pytest.raises(EffectErased, match="approval"):
        await careful(slow).run(thread, "charge", ARGS, Shop().charge)


async def test_a_malformed_decision_does_not_approve(cp: Store, thread: str) -> None:
    """Only a completed record with ``approved: true`` lets an effect run."""
    ledger = careful(cp, approval_timeout=0)
    results: list[JsonValue] = [{}, True, {"approved": 1}]

    for number, result in enumerate(results):
        args: dict[str, JsonValue] = {"n": number}

        with pytest.raises(EffectTimeout):
            await ledger.run(thread, "charge", args, Shop().charge)

        (request,) = await ledger.pending(thread)
        await cp.record_result(thread, request.record.call.call_id, result)

        with pytest.raises(EffectDenied):
            await ledger.run(thread, "charge", args, Shop().charge)


async def test_a_takeover_needs_the_approval(cp: Store, thread: str) -> None:
    """An unapproved claim, left by a crash, is not run by a takeover."""
    key = quick(cp).key(thread, "charge", ARGS)
    await claim(cp, thread, key, ARGS)
    shop = Shop()

    with pytest.raises(EffectTimeout, match="an approval"):
        await careful(cp, stale_after=0.05, approval_timeout=0.3).run(
            thread, "charge", ARGS, shop.charge
        )

    await quick(cp).deny(key)

    with pytest.raises(EffectDenied):
        await careful(cp, stale_after=0.05).run(thread, "charge", ARGS, shop.charge)

    assert shop.effects == []


async def test_a_takeover_after_the_handler_ran_needs_no_approval(
    cp: Store, thread: str
) -> None:
    """The approval may have expired meanwhile, and the effect has happened."""
    shop = Shop("kept", gate=asyncio.Event())
    assert shop.gate is not None
    task = asyncio.create_task(
        quick(
            cp,
            requires_approval=lambda _: bool(shop.effects),
            approval_timeout=0,
            stale_after=0.5,
        ).run(thread, "charge", ARGS, shop.charge)
    )
    await shop.began.wait()
    await cp.record_result(thread, shop.effects[0].call_id, {}, success=False)
    key = shop.effects[0].key
    await claim(cp, thread, key, ARGS, stale_after=0.5)  # a silent holder
    shop.gate.set()
    assert await task == "kept"
    record = await cp.find_completed(shop.effects[0].key)
    assert record is not None
    assert len(shop.effects) == 1
    assert record.attempt == shop.effects[0].attempt + 2


def shifted(monkeypatch: pytest.MonkeyPatch) -> list[timedelta]:
    """Let the wall clock of this process be off, by the one value of the list."""
    off = [timedelta()]

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return super().now(tz) + off[0]

    for module in (requests, people, threads):
        monkeypatch.setattr(module, "datetime", Clock)

    return off


@pytest.mark.parametrize("days", [-40, 40])
async def test_a_clock_that_is_wrong_by_days_ends_no_request(
    cp: Store, thread: str, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    """Neither a live request nor a decision that waits for its run."""
    off, shop = shifted(monkeypatch), Shop()
    ledger = careful(cp, expires_after=3600, approval_timeout=0)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", ARGS, shop.charge)

    off[0] = timedelta(days=days)
    key = ledger.key(thread, "charge", ARGS)
    assert [one.key for one in await quick(cp).requests() if one.key == key] == [key]

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", ARGS, shop.charge)

    assert await quick(cp).approve(key)
    assert await ledger.run(thread, "charge", ARGS, shop.charge) == {"charge": 1}
    decision = await decision_on(quick(cp), key)
    assert decision is not None
    assert decision.verdict == "approved"


async def test_a_used_approval_stays_one(cp: Store, thread: str) -> None:
    """Its time is over, and the record still says that it was approved."""
    ledger = careful(cp, approval_timeout=0, expires_after=SOON)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", ARGS, Shop().charge)

    key = ledger.key(thread, "charge", ARGS)
    assert await ledger.approve(key)
    await ledger.run(thread, "charge", ARGS, Shop().charge)
    await asyncio.sleep(1.2 * SOON)
    decision = await decision_on(ledger, key)
    assert decision is not None
    assert decision.verdict == "approved"

    with pytest.raises(ValueError, match="has run"):
        await ledger.ask_again(key)


@pytest.mark.parametrize("wants_effect", [True, False])
async def test_an_approval_that_is_used_too_late_does_not_count(
    cp: Store, thread: str, wants_effect: bool
) -> None:
    """By the times of the store; the key is free again, and nothing ran."""
    ran: list[int] = []

    @tool
    async def charge(order: str) -> None:
        ran.append(1)

    @tool(name="charge")
    async def charge_with_effect(order: str, effect: Effect) -> None:
        ran.append(2)

    one = charge_with_effect if wants_effect else charge
    ledger = careful(cp, expires_after=SOON, approval_timeout=0)
    registry = ToolRegistry(ledger, [one])

    with pytest.raises(EffectTimeout):
        await registry.dispatch(thread, "charge", {"order": "7"})

    (request,) = await ledger.pending(thread)
    assert await ledger.approve(request.key)
    await asyncio.sleep(1.2 * SOON)
    outcome = await registry.dispatch(thread, "charge", {"order": "7"})
    assert outcome.is_error
    assert "expired" in str(outcome.content)
    calls = await cp.list_calls(thread)
    statuses = [one.status for one in calls if one.call.tool_name == "charge"]
    assert (statuses, ran) == (["failed"], [])

    # A person is asked again; the first approval does not come back.
    again = await ledger.ask_again(request.key)
    assert again.number == 2
    assert await ledger.deny(request.key)
    outcome = await registry.dispatch(thread, "charge", {"order": "7"})
    assert "denied" in str(outcome.content)


@pytest.mark.parametrize("landed", [True, False])
async def test_an_approval_that_was_used_in_time_is_enough_for_a_takeover(
    cp: Store, thread: str, landed: bool
) -> None:
    """It may expire long before its holder counts as dead."""
    shop = Shop()
    ledger = careful(cp, expires_after=SOON, approval_timeout=0)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", ARGS, shop.charge)

    key = ledger.key(thread, "charge", ARGS)
    assert await ledger.approve(key)
    await claim(
        cp, thread, key, ARGS, stale_after=2 * SOON
    )  # in time, and then it dies

    def verify(_: Effect) -> Landed | NotLanded:
        return Landed("found") if landed else NotLanded()

    result = await careful(cp, stale_after=2 * SOON).run(
        thread, "charge", ARGS, shop.charge, verify=verify
    )
    assert result == ("found" if landed else {"charge": 1})
    assert len(shop.effects) == (not landed)


async def test_a_timeout_has_the_error_of_the_notifier_as_its_cause(
    cp: Store, thread: str
) -> None:
    """So the caller knows that no person was told of the request."""
    fails = [RuntimeError("no mail")]

    def notify(_: object) -> None:
        if fails:
            raise fails.pop()

    ledger = careful(cp, approval_timeout=0, on_approval_required=notify)

    for cause in (RuntimeError, type(None)):
        with pytest.raises(EffectTimeout) as caught:
            await ledger.run(thread, "charge", ARGS, Shop().charge)

        assert isinstance(caught.value.__cause__, cause)


async def test_other_calls_do_not_show_as_requests(cp: Store, thread: str) -> None:
    """``pending`` returns approval requests only."""
    await cp.record_issued(thread, ToolCall("c1", "charge", {}, f"k-{thread}"))
    await cp.record_issued(thread, ToolCall("c2", "cpkit:approval", {}, f"l-{thread}"))
    assert await quick(cp).pending(thread) == []


async def test_the_value_of_a_decision_reaches_the_handler(
    cp: Store, thread: str
) -> None:
    """It is recorded with the attempt, so that ``verify`` sees it after a crash."""
    shop = Shop()
    ledger = careful(cp, approval_timeout=0)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", ARGS, shop.charge)

    key = ledger.key(thread, "charge", ARGS)

    with pytest.raises(ValueError, match="does not let people change 'amount'"):
        await ledger.approve(key, value={"amount": 1})

    assert await ledger.approve(key, value={"limit": 200}, by="ann", reason="ok")
    await ledger.run(thread, "charge", ARGS, shop.charge)
    (effect,) = shop.effects
    made = effect.decision
    assert made is not None
    assert (made.value, made.by, made.reason) == ({"limit": 200}, "ann", "ok")
    assert effect.args == ARGS
    record = await ledger.find(key)
    assert record is not None
    recorded = effect_of(record)
    assert recorded is not None
    assert recorded.decision == made


@pytest.mark.parametrize("way", ["run", "tool"])
async def test_a_person_changes_the_arguments_that_the_policy_lets_them(
    cp: Store, thread: str, way: str
) -> None:
    """The effect keeps its key, and the record has both, asked for and run."""
    policy = lambda _: Approval(editable=["amount"])  # noqa: E731
    ledger = quick(cp, requires_approval=policy, approval_timeout=0)
    seen: list[Any] = []

    @tool
    async def charge(order: str, amount: int) -> None:
        seen.append(amount)

    async def run() -> None:
        if way == "tool":
            await ToolRegistry(ledger, [charge]).dispatch(thread, "charge", ARGS)
        else:
            await ledger.run(
                thread,
                "charge",
                ARGS,
                lambda effect: seen.append(effect.args["amount"]),
            )

    with pytest.raises(EffectTimeout):
        await run()

    (request,) = await ledger.pending(thread)
    assert request.editable == ["amount"]

    with pytest.raises(ValueError, match="'order'"):
        await ledger.approve(request.key, value={"order": "8"})

    assert await ledger.approve(request.key, value={"amount": 7, "note": "half"})
    await run()
    await run()  # replayed
    assert seen == [7]
    record = await ledger.find(ledger.key(thread, "charge", ARGS))
    assert record is not None
    assert record.call.args["args"] == {**ARGS, "amount": 7}
    assert record.call.args["asked"] == ARGS


async def test_an_argument_that_does_not_exist_cannot_be_editable(
    cp: Store, thread: str
) -> None:
    """The policy has a mistake, which is found before anything is recorded."""
    ledger = quick(cp, requires_approval=lambda _: Approval(["amounts"]))

    with pytest.raises(ValueError, match="'amounts'"):
        await ledger.run(thread, "charge", ARGS, Shop().charge)


async def test_a_withdrawn_request_is_gone(cp: Store, thread: str) -> None:
    """Its waiting run ends, a decision finds nothing, and a new run asks again."""
    ledger = careful(cp)
    run = asyncio.create_task(ledger.run(thread, "charge", ARGS, Shop().charge))
    await requested(cp, thread)
    key = ledger.key(thread, "charge", ARGS)
    assert await quick(cp).withdraw(key, by="ann", reason="the user cancelled")

    with pytest.raises(ApprovalWithdrawn):
        await run

    assert await quick(cp).pending(thread) == []
    assert [one for one in await quick(cp).requests() if one.key == key] == []
    assert not await quick(cp).approve(key)
    assert await quick(cp).withdraw(key)

    shop = Shop()
    run = asyncio.create_task(ledger.run(thread, "charge", ARGS, shop.charge))
    await requested(cp, thread)
    (request,) = await quick(cp).pending(thread)
    assert request.number == 2
    assert await quick(cp).approve(key)
    assert await run == {"charge": 1}
    assert not await quick(cp).withdraw(key)


async def test_a_decision_is_not_withdrawn(cp: Store, thread: str) -> None:
    """Of a denial and a withdrawal, the first counts."""
    ledger = careful(cp, approval_timeout=0)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", ARGS, Shop().charge)

    key = ledger.key(thread, "charge", ARGS)
    assert await ledger.deny(key)
    assert not await ledger.withdraw(key)

    with pytest.raises(EffectDenied):
        await ledger.run(thread, "charge", ARGS, Shop().charge)
