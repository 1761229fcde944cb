"""Approvals: no effect runs unapproved, and a denied effect never runs."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta, tzinfo
from random import Random
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    CallRecord,
    JsonValue,
    MemoryCheckpointer,
    ToolCall,
)
from cpkit.effects import (
    ApprovalExpired,
    Effect,
    EffectDenied,
    EffectErased,
    EffectLedger,
    EffectTimeout,
    KeyReused,
    Landed,
    NotLanded,
    ToolRegistry,
    requests,
    tool,
)
from tests.effects.shop import OnlySix, Shop, Store, claim, quick, until
from tests.simulation.loop import simulated_loop

ARGS: dict[str, JsonValue] = {"order": "7", "amount": 5000}
OTHER: dict[str, JsonValue] = {"order": "7", "amount": 9000}


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
    assert await quick(cp).approve(thread, request.key, by="ann")
    assert await run == {"charge": 1}
    assert await quick(cp).pending(thread) == []
    # A replay does not call the policy, and the decision does not change.
    assert await quick(cp).run(thread, "charge", ARGS, shop.charge) == {"charge": 1}
    assert await quick(cp).approve(thread, request.key)
    assert not await quick(cp).deny(thread, request.key)


async def test_a_denial_is_final(cp: Store, thread: str) -> None:
    """Every later run gets it with its reason, and no approval undoes it."""
    shop = Shop()
    run = asyncio.create_task(careful(cp).run(thread, "charge", ARGS, shop.charge))
    await requested(cp, thread)
    key = quick(cp).key(thread, "charge", ARGS)
    assert await quick(cp).deny(thread, key, reason="too much", by="bob")

    with pytest.raises(EffectDenied, match="denied by bob: too much"):
        await run

    assert not await quick(cp).approve(thread, key)
    assert await quick(cp).deny(thread, key)

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

        both = await asyncio.gather(
            quick(cp).approve(thread, key), quick(cp).deny(thread, key)
        )
        assert sorted(both) == [False, True]


async def test_a_decision_before_the_request_does_nothing(
    cp: Store, thread: str
) -> None:
    """It returns ``False``, and the later request is undecided."""
    key = quick(cp).key(thread, "charge", ARGS)
    assert not await quick(cp).approve(thread, key)
    assert not await quick(cp).deny(thread, key)
    assert not await quick(cp).approve(thread, key, args=ARGS)
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
        await ledger.approve(thread, key)

    assert await ledger.approve(thread, key, args=OTHER)
    assert await ledger.approve(thread, key, args=OTHER)
    assert not await ledger.deny(thread, key, args=OTHER)

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
    assert await ledger.deny(thread, key)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", OTHER, Shop().charge, **options)

    with pytest.raises(ValueError, match="args="):
        await ledger.approve(thread, key)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", OTHER, Shop().charge, **options)

    assert await ledger.deny(thread, key, args=OTHER)
    assert not await ledger.approve(thread, key)


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


async def test_approvals_work_with_the_six_methods_alone(
    cp: Store, thread: str
) -> None:
    """Earlier decisions are found without receipts too."""
    ledger = careful(OnlySix(cp), approval_timeout=0)
    shop = Shop()

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "charge", ARGS, shop.charge)

    key = ledger.key(thread, "charge", ARGS)
    assert await ledger.approve(thread, key)
    assert await ledger.approve(thread, key)
    assert not await ledger.deny(thread, key)
    assert await ledger.run(thread, "charge", ARGS, shop.charge) == {"charge": 1}


async def test_the_request_is_recorded_before_the_notifier_is_called(
    cp: Store, thread: str
) -> None:
    """The notifier finds the request, and can approve it at once."""

    async def notify(effect: Effect) -> None:
        assert [r.key for r in await quick(cp).pending(effect.thread_id)] == [
            effect.key
        ]
        assert await quick(cp).approve(effect.thread_id, effect.key)

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


def test_a_notifier_that_fails_is_retried_after_patience() -> None:
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

    await ledger.approve(thread, ledger.key(thread, "charge", ARGS))
    assert (await ledger.begin(thread, "charge", ARGS)).fresh


async def test_a_global_request_is_decided_in_the_global_thread(
    cp: Store, thread: str
) -> None:
    """``cpkit:global`` replaces the thread, also in the notifier's effect."""
    args: dict[str, JsonValue] = {"who": thread}
    seen: list[Effect] = []
    ledger = careful(cp, approval_timeout=0, on_approval_required=seen.append)

    with pytest.raises(EffectTimeout):
        await ledger.run(thread, "mail", args, Shop().charge, scope="global")

    assert seen[0].thread_id == "cpkit:global"
    assert seen[0].key in [r.key for r in await ledger.pending("cpkit:global")]
    assert await ledger.approve("cpkit:global", seen[0].key)
    assert await ledger.run(thread, "mail", args, Shop().charge, scope="global")


async def test_an_erased_approval_does_not_count(cp: Store, thread: str) -> None:
    """The run raises ``EffectErased``, whether the request was decided or not."""
    shop = Shop()
    ledger = careful(cp, approval_timeout=0)

    for number, decide in enumerate([True, False]):
        args: dict[str, JsonValue] = {"n": number}

        with pytest.raises(EffectTimeout):
            await ledger.run(thread, "charge", args, shop.charge)

        if decide:
            await ledger.approve(thread, ledger.key(thread, "charge", args))

    await cp.delete_thread(thread)

    for number in range(2):
        args = {"n": number}

        with pytest.raises(EffectErased, match="approval"):
            await ledger.run(thread, "charge", args, shop.charge)

        assert not await ledger.approve(thread, ledger.key(thread, "charge", args))

    assert shop.effects == []


async def test_a_withdrawn_or_malformed_decision_does_not_approve(
    cp: Store, thread: str
) -> None:
    """Only a completed record with ``approved: true`` lets an effect run."""
    ledger = careful(cp, approval_timeout=0)
    results: list[tuple[JsonValue, bool]] = [
        ({}, True),
        (True, True),
        ({"approved": 1}, True),
        ({"approved": True}, False),
    ]

    for number, (result, success) in enumerate(results):
        args: dict[str, JsonValue] = {"n": number}

        with pytest.raises(EffectTimeout):
            await ledger.run(thread, "charge", args, Shop().charge)

        (request,) = await ledger.pending(thread)
        await cp.record_result(
            thread, request.record.call.call_id, result, success=success
        )

        with pytest.raises(EffectDenied):
            await ledger.run(thread, "charge", args, Shop().charge)


async def test_a_takeover_needs_the_approval(cp: Store, thread: str) -> None:
    """An unapproved claim, left by a crash, is not taken over."""
    key = quick(cp).key(thread, "charge", ARGS)
    await claim(cp, thread, key, ARGS)
    shop = Shop()

    with pytest.raises(EffectTimeout, match="an approval"):
        await careful(cp, stale_after=0.05, approval_timeout=0.3).run(
            thread, "charge", ARGS, shop.charge
        )

    await quick(cp).deny(thread, key)

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
            stale_after=0.05,
        ).run(thread, "charge", ARGS, shop.charge)
    )
    await shop.began.wait()
    await cp.record_result(thread, shop.effects[0].call_id, {}, success=False)
    assert (await quick(cp).begin(thread, "charge", ARGS)).fresh  # a silent holder
    shop.gate.set()
    assert await task == "kept"
    record = await cp.find_completed(shop.effects[0].key)
    assert record is not None
    assert (record.attempt, len(shop.effects)) == (3, 1)


@pytest.mark.parametrize("looks", range(1, 9))
async def test_a_clock_that_is_set_back_between_two_looks_ends_no_run(
    looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request has expired or is open, and the run says which."""
    count = 0
    ahead = False

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            nonlocal count
            count += ahead
            late = timedelta(hours=2 if ahead and count <= looks else 0)
            return super().now(tz) + late

    monkeypatch.setattr(requests, "datetime", Clock)

    async with MemoryCheckpointer[dict[str, Any]]() as cp:
        ledger = careful(cp, expires_after=3600, approval_timeout=0)

        with pytest.raises(EffectTimeout):
            await ledger.run("t", "charge", {}, print)

        ahead = True

        with pytest.raises((EffectTimeout, ApprovalExpired)):
            await ledger.run("t", "charge", {}, print)


@pytest.mark.parametrize("wants_effect", [True, False])
def test_an_approval_that_expires_while_its_claim_is_retried_does_not_count(
    monkeypatch: pytest.MonkeyPatch, wants_effect: bool
) -> None:
    """The key is free again, and the handler did not run."""
    late = timedelta()

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return super().now(tz) + late

    monkeypatch.setattr(requests, "datetime", Clock)

    class Slow(MemoryCheckpointer[dict[str, Any]]):
        async def record_issued(
            self, thread_id: str, call: ToolCall
        ) -> CallRecord | None:
            nonlocal late

            if call.tool_name == "charge" and not late:
                await asyncio.sleep(10)
                late = timedelta(hours=2)
                raise BackendUnavailable("test", "lost", maybe_applied=True)

            return await super().record_issued(thread_id, call)

    ran: list[int] = []

    @tool
    async def charge(order: str) -> None:
        ran.append(1)

    @tool(name="charge")
    async def charge_with_effect(order: str, effect: Effect) -> None:
        ran.append(2)

    async def main() -> None:
        async with Slow() as cp:
            ledger = careful(cp, expires_after=3600)
            one = charge_with_effect if wants_effect else charge
            run = ToolRegistry(ledger, [one]).dispatch("t", "charge", {"order": "7"})
            task = asyncio.create_task(run)
            await requested(cp, "t")
            (request,) = await ledger.pending("t")
            assert await ledger.approve(request.key)
            outcome = await task
            assert outcome.is_error
            assert "expired" in str(outcome.content)
            calls = await cp.list_calls("t")
            statuses = [one.status for one in calls if one.call.tool_name == "charge"]
            assert statuses == ["failed"]

    simulated_loop(Random(0)).run(main())
    assert ran == []


async def test_a_denial_holds_where_a_clock_is_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For that clock the older approval has not expired yet."""
    late = timedelta()

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return super().now(tz) + late

    monkeypatch.setattr(requests, "datetime", Clock)
    shop = Shop()

    async with MemoryCheckpointer[Any]() as cp:
        ledger = careful(cp, expires_after=60, approval_timeout=0)

        with pytest.raises(EffectTimeout):
            await ledger.run("t", "charge", ARGS, shop.charge)

        (request,) = await ledger.pending("t")
        assert await ledger.approve(request.key)
        late = timedelta(hours=1)
        again = await ledger.ask_again(request.key)
        late = timedelta()
        assert await ledger.deny(request.key, number=again.number)

        with pytest.raises(EffectDenied):
            await careful(cp, expires_after=60).run("t", "charge", ARGS, shop.charge)

    assert shop.effects == []


@pytest.mark.parametrize("landed", [True, False])
async def test_an_expired_approval_does_not_hide_an_unknown_outcome(
    monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    """Of an attempt that began while it counted; ``verify`` says what happened."""
    late = timedelta()

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return super().now(tz) + late

    monkeypatch.setattr(requests, "datetime", Clock)
    shop = Shop(gate=asyncio.Event())
    options: dict[str, Any] = {"expires_after": 60, "stale_after": 0.05}

    def verify(_: Effect) -> Landed | NotLanded:
        return Landed("found") if landed else NotLanded()

    async with MemoryCheckpointer[Any]() as cp:
        ledger = careful(cp, **options)
        run = ledger.run("t", "charge", ARGS, shop.charge)
        task = asyncio.create_task(run)
        await requested(cp, "t")
        (request,) = await ledger.pending("t")
        assert await ledger.approve(request.key)
        await shop.began.wait()
        late = timedelta(hours=1)

        with pytest.raises(EffectTimeout, match="still issued"):
            await careful(cp, expires_after=60, timeout=0.1).run(
                "t", "charge", ARGS, shop.charge
            )

        task.cancel()
        await asyncio.wait([task])
        again = careful(cp, **options).run(
            "t", "charge", ARGS, shop.charge, verify=verify
        )

        if landed:
            assert await again == "found"
        else:
            with pytest.raises(ApprovalExpired):
                await again

    assert len(shop.effects) == 1


async def test_asking_again_passes_over_the_number_of_a_withdrawn_request(
    cp: Store, thread: str
) -> None:
    """The number finds nothing, also while no later request leads over it."""
    ledger = careful(cp, approval_timeout=0)

    for args in (ARGS, OTHER):
        with pytest.raises(EffectTimeout):
            await ledger.run(
                thread, "charge", args, Shop().charge, key_fields=["order"]
            )

        if args is ARGS:
            (first,) = await ledger.pending(thread)
            assert await ledger.deny(first.key)

    (second,) = await ledger.pending(thread)
    assert (second.key, second.number) == (first.key, 2)
    await cp.record_result(thread, second.record.call.call_id, {}, success=False)

    async with asyncio.timeout(5):
        again = await ledger.ask_again(first.key, args=ARGS)

    assert (again.number, again.args) == (3, ARGS)


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
