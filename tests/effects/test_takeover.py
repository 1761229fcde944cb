"""A stale holder is taken over, and a live one is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf, nan
from pathlib import Path
from random import Random
from typing import Any

import pytest

from conformance.slowdown import slowdown
from cpkit import (
    CallRecord,
    JsonValue,
    MemoryCheckpointer,
    ToolCall,
    UnknownCall,
    open_checkpointer,
)
from cpkit.effects import (
    Effect,
    EffectDenied,
    EffectTimeout,
    Landed,
    NotLanded,
    Tool,
)
from cpkit.effects.records import heartbeat_thread
from cpkit.runs.waiting import StaleDetector
from tests.broken.reference import Reference
from tests.effects.shop import Plain, Shop, Store, claim, quick, until
from tests.simulation.loop import simulated_loop

ARGS: dict[str, JsonValue] = {"amount": 1000}


class AnswersLate(Plain):
    """A store that can delete; the answers to the first claims are delayed."""

    def __init__(self, cp: Store, *delays: float) -> None:
        super().__init__(cp)
        self.delete_thread = cp.delete_thread
        issue, seconds = cp.record_issued, iter(delays)

        async def record_issued(thread_id: str, call: ToolCall) -> CallRecord | None:
            answer = await issue(thread_id, call)
            await asyncio.sleep(next(seconds, 0.0))
            return answer

        self.record_issued = record_issued


async def test_a_stale_holder_is_taken_over(cp: Store, thread: str) -> None:
    """Its attempt is released, and the next claim has a higher attempt."""
    key = quick(cp).key(thread, "charge", ARGS)
    await claim(cp, thread, key, ARGS)
    shop = Shop()
    ledger = quick(Plain(cp), stale_after=0.1 * slowdown())
    assert await ledger.run(thread, "charge", ARGS, shop.charge) == {"charge": 1}
    assert shop.effects[0].attempt == 2
    statuses = [record.status for record in await cp.list_calls(thread)]
    assert statuses == ["failed", "completed"]


async def test_a_takeover_without_an_approval_leaves_the_call_in_doubt(
    cp: Store, thread: str
) -> None:
    """The payment may have happened: a person still finds it."""
    key = quick(cp).key(thread, "charge", ARGS)
    held = await claim(cp, thread, key, ARGS)
    options: Any = {"stale_after": 0.1 * slowdown(), "approval_timeout": 0.0}
    ledger = quick(Plain(cp), requires_approval=lambda _: True, **options)

    with pytest.raises(EffectTimeout, match="an approval"):
        await ledger.run(thread, "charge", ARGS, Shop().charge)

    assert await ledger.deny(key)

    with pytest.raises(EffectDenied):
        await ledger.run(thread, "charge", ARGS, Shop().charge)

    found = await cp.find_call(key)
    assert found is not None
    assert (found.call.call_id, found.status) == (held.call.call_id, "issued")


async def test_without_stale_after_no_holder_is_taken_over(
    cp: Store, thread: str
) -> None:
    """By default a run waits, and raises ``EffectTimeout``."""
    key = quick(cp).key(thread, "charge", ARGS)
    await claim(cp, thread, key, ARGS)

    with pytest.raises(EffectTimeout):
        await quick(cp, timeout=0.3).run(thread, "charge", ARGS, Shop().charge)


def test_a_holder_whose_outcome_is_recorded_slowly_is_not_taken_over() -> None:
    """Heartbeats continue until the store has the outcome."""

    async def main() -> None:
        async with Reference() as cp:
            slow = Plain(cp)

            async def record_result(
                thread_id: str, call_id: str, result: JsonValue, *, success: bool = True
            ) -> CallRecord:
                await asyncio.sleep(100)
                return await cp.record_result(
                    thread_id, call_id, result, success=success
                )

            slow.record_result = record_result
            shop = Shop()
            first, second = (
                quick(one, stale_after=15, timeout=1000) for one in (slow, cp)
            )
            running = asyncio.create_task(first.run("t", "charge", ARGS, shop.charge))
            await shop.began.wait()
            result = await second.run("t", "charge", ARGS, shop.charge)
            assert result == await running == {"charge": 1}
            assert len(shop.effects) == 1

    simulated_loop(Random(1)).run(main())


def test_a_claim_that_was_answered_late_is_given_back() -> None:
    """Another run may take over at any moment, and the handler has not begun."""

    async def main() -> None:
        async with Reference() as cp:
            shop = Shop()
            ledger = quick(AnswersLate(cp, 14.0), stale_after=15, timeout=1000)
            assert await ledger.run("t", "charge", ARGS, shop.charge) == {"charge": 1}
            assert [effect.attempt for effect in shop.effects] == [2]
            assert await cp.load(heartbeat_thread(shop.effects[0].call_id)) is None
            late = quick(AnswersLate(cp, 14.0), stale_after=15)
            record, fresh = await late.begin("t", "charge", {"amount": 2})
            assert (record.attempt, fresh) == (2, True)

    simulated_loop(Random(1)).run(main())


def test_a_late_answer_starts_no_effect_that_was_taken_over() -> None:
    """The claim is lost; here another process recorded the result meanwhile."""

    async def main() -> None:
        async with Reference() as cp:
            late = AnswersLate(cp, 100.0)
            paused, shop = Shop("paused"), Shop()
            first, second = (
                quick(one, stale_after=15, timeout=1000) for one in (late, cp)
            )
            running = asyncio.create_task(first.run("t", "charge", ARGS, paused.charge))
            await asyncio.sleep(1)
            result = await second.run("t", "charge", ARGS, shop.charge)
            assert result == await running == {"charge": 1}
            assert (len(paused.effects), len(shop.effects)) == (0, 1)

    simulated_loop(Random(1)).run(main())


async def test_a_silent_attempt_does_not_end_the_next_one(
    cp: Store, thread: str
) -> None:
    """Callers share a reader: one that waits for the new attempt may get the proof."""
    ledger, stale = quick(cp), StaleDetector(0.01)
    attempts = ledger._attempts
    dead = await claim(cp, thread, ledger.key(thread, "charge", ARGS), ARGS)
    await until(lambda: stale.is_stale(partial(attempts.heartbeat, dead)))
    await ledger.release(dead)
    begun = await ledger.begin(thread, "charge", ARGS)
    assert begun.fresh
    found = await attempts.close_silent(begun.record, None, stale, "silent")
    assert found.action == "alive"
    await ledger.commit(begun.record)


async def test_a_holder_with_heartbeats_is_not_taken_over(
    cp: Store, thread: str
) -> None:
    """Heartbeats continue while the handler runs, however long that takes."""
    shop = Shop(gate=asyncio.Event())
    ledger = quick(cp, stale_after=0.4 * slowdown())
    slow = asyncio.create_task(ledger.run(thread, "charge", ARGS, shop.charge))
    await shop.began.wait()
    place = heartbeat_thread(shop.effects[0].call_id)
    other = Shop("taken over")
    waiter = asyncio.create_task(
        quick(cp, stale_after=0.4 * slowdown()).run(
            thread, "charge", ARGS, other.charge
        )
    )

    async def six_heartbeats() -> bool:
        data = await cp.load(place)
        count = data.extra.get(shop.effects[0].call_id, 0) if data else 0
        return isinstance(count, int) and count >= 6

    await until(six_heartbeats)  # twice as long as stale_after
    assert shop.gate is not None
    shop.gate.set()
    assert await slow == await waiter == {"charge": 1}
    assert other.effects == []
    # The heartbeats are deleted, and were never in the agent's own thread.
    assert await cp.load(place) is None
    data = await cp.load(thread)
    assert data is not None
    assert data.extra == {}


async def test_heartbeats_take_constant_room(cp: Store, thread: str) -> None:
    """A long attempt has one extra key, and a short attempt writes nothing."""
    shop = Shop(gate=asyncio.Event())
    task = asyncio.create_task(
        quick(Plain(cp), stale_after=0.3 * slowdown()).run(
            thread, "charge", ARGS, shop.charge
        )
    )
    await shop.began.wait()
    place = heartbeat_thread(shop.effects[0].call_id)

    async def five_heartbeats() -> bool:
        data = await cp.load(place)
        return data is not None and data.extra != {shop.effects[0].call_id: 1}

    await until(five_heartbeats)
    assert shop.gate is not None
    shop.gate.set()
    await task
    data = await cp.load(place)
    assert data is not None  # six methods cannot delete a thread
    assert list(data.extra) == [shop.effects[0].call_id]
    short = Shop()
    await quick(cp).run(thread, "charge", {"amount": 2}, short.charge)
    assert await cp.load(heartbeat_thread(short.effects[0].call_id)) is None


@pytest.mark.parametrize("sync", [True, False])
async def test_verify_decides_whether_a_takeover_runs_the_effect(
    cp: Store, thread: str, sync: bool
) -> None:
    """A landed effect is recorded and returned; an effect that did not land runs."""
    seen: list[Effect] = []

    def landed(effect: Effect) -> Landed:
        seen.append(effect)
        return Landed({"charge": "found"})

    async def not_landed(_: Effect) -> NotLanded:
        return NotLanded()

    shop = Shop()
    ledger = quick(cp, stale_after=0.1 * slowdown())
    args: dict[str, JsonValue] = {"n": 1}
    record = await claim(cp, thread, ledger.key(thread, "charge", args), args)
    found = await ledger.run(thread, "charge", args, shop.charge, verify=landed)
    assert found == {"charge": "found"}
    assert shop.effects == []
    assert seen[0].call_id == record.call.call_id
    assert (seen[0].args, seen[0].attempt) == (args, 1)

    args = {"n": 2}
    await claim(cp, thread, ledger.key(thread, "charge", args), args)
    handler = shop.charge_now if sync else shop.charge
    await ledger.run(thread, "charge", args, handler, verify=not_landed)
    assert shop.effects[0].attempt == 2


def raises(_: Effect) -> None:
    raise OSError("the bank cannot be reached")


@pytest.mark.parametrize(
    ("verify", "said"),
    [
        (lambda _: None, "verify cannot know"),
        (raises, "verify raised OSError: the bank cannot be reached"),
        (lambda _: Landed({1, 2}), "verify raised cpkit.errors.SerializationError: "),  # type: ignore[arg-type]  # not JSON, on purpose
        (lambda _: "yes", "verify gave an unknown answer"),
        (lambda _: Landed("x" * (16 << 20)), "its result cannot be stored: "),
    ],
    ids=["none", "raises", "not JSON", "no verdict", "too large"],
)
async def test_an_unclear_answer_of_verify_repeats_nothing(
    cp: Store,
    thread: str,
    verify: Callable[[Effect], None],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The call stays issued, and the log has what ``verify`` said."""
    shop = Shop()
    ledger = quick(cp, stale_after=0.05 * slowdown(), timeout=0.4 * slowdown())
    record = await claim(cp, thread, ledger.key(thread, "charge", ARGS), ARGS)

    with pytest.raises(EffectTimeout) as late:
        await ledger.run(thread, "charge", ARGS, shop.charge, verify=verify)

    assert late.value.holder == record
    assert shop.effects == []
    assert f"not taken over: {said}" in caplog.text


@pytest.mark.parametrize("success", [True, False])
def test_an_attempt_that_ends_during_a_long_verify_counts(success: bool) -> None:
    """Also after the timeout of the run: it does not say that the call is issued."""

    async def unclear(_: Effect) -> None:
        await asyncio.sleep(60)

    async def case() -> JsonValue:
        async with Reference() as cp:
            ledger = quick(cp, stale_after=10, timeout=30, verify=unclear)
            key = ledger.key("t", "charge", ARGS)
            record = await claim(cp, "t", key, ARGS, stale_after=10)
            run = asyncio.create_task(ledger.run("t", "charge", ARGS, Shop().charge))
            await asyncio.sleep(20)
            late: JsonValue = {"value": "late"}
            await cp.record_result("t", record.call.call_id, late, success=success)
            result: JsonValue = await run
            return result

    expected = "late" if success else {"charge": 1}
    results = [simulated_loop(Random(seed)).run(case()) for seed in range(8)]
    assert results == [expected] * 8


async def test_a_heartbeat_during_verify_stops_the_takeover(
    cp: Store, thread: str
) -> None:
    """The holder is alive, so the answer of ``verify`` is out of date."""
    key = quick(cp).key(thread, "charge", ARGS)
    record = await claim(cp, thread, key, ARGS)
    asked = 0

    async def slow(_: Effect) -> NotLanded:
        nonlocal asked
        asked += 1
        call_id = record.call.call_id
        await cp.save_extra(heartbeat_thread(call_id), {call_id: asked})
        return NotLanded()

    shop = Shop()

    with pytest.raises(EffectTimeout):
        await quick(cp, stale_after=0.05 * slowdown(), timeout=0.4 * slowdown()).run(
            thread, "charge", ARGS, shop.charge, verify=slow
        )

    assert asked > 0
    assert shop.effects == []


@pytest.mark.parametrize("by", ["takeover", "resume", "commit", "release"])
async def test_closing_a_dead_attempt_deletes_its_heartbeats(
    cp: Store, thread: str, by: str
) -> None:
    """Heartbeats of dead processes do not fill up the store."""
    key = quick(cp).key(thread, "charge", ARGS)
    record = await claim(cp, thread, key, ARGS)
    place = heartbeat_thread(record.call.call_id)
    await cp.save_extra(place, {record.call.call_id: 7})

    def landed(_: Effect) -> Landed:
        return Landed("found")

    ledger = quick(cp, stale_after=0.1 * slowdown())

    match by:
        case "takeover":
            await ledger.run(thread, "charge", ARGS, Shop().charge)
        case "resume":
            tool = Tool(Shop().charge, name="charge", verify=landed)
            await ledger.resume(thread, [tool])
        case "commit":
            await ledger.commit(record, "found")
        case "release":
            await ledger.release(record)

    assert await cp.load(place) is None


async def test_a_forgotten_thread_frees_its_keys(cp: Store, thread: str) -> None:
    """A takeover and a resume that meet it during ``verify`` raise, and a run runs."""
    forgotten = 0

    async def forget(_: Effect) -> NotLanded:
        nonlocal forgotten
        forgotten += 1
        await cp.delete_thread(thread, forget_keys=True)
        return NotLanded()

    ledger = quick(cp, stale_after=0.05 * slowdown())
    key = ledger.key(thread, "charge", ARGS)
    await claim(cp, thread, key, ARGS)
    shop = Shop()

    with pytest.raises(UnknownCall):
        await ledger.run(thread, "charge", ARGS, shop.charge, verify=forget)

    assert await ledger.run(thread, "charge", ARGS, shop.charge, verify=forget)
    assert (forgotten, len(shop.effects)) == (1, 1)
    args: dict[str, JsonValue] = {"n": 2}
    await claim(cp, thread, ledger.key(thread, "charge", args), args)
    tool = Tool(shop.charge, name="charge", verify=forget)

    with pytest.raises(UnknownCall):
        await ledger.resume(thread, [tool])

    assert (await ledger.resume(thread, [tool])).calls == ()


async def test_a_found_result_that_the_store_refuses_is_in_doubt(
    tmp_path: Path, thread: str
) -> None:
    """A takeover waits, and a resume continues with the other calls."""

    def landed(effect: Effect) -> Landed:
        return Landed("x" * 1000 if effect.args["n"] == 1 else "y")

    async with open_checkpointer(f"sqlite:///{tmp_path}/x.db?max_payload=500") as cp:
        ledger = quick(cp, stale_after=0.05 * slowdown(), timeout=0.4 * slowdown())

        for number in (1, 2):
            args: dict[str, JsonValue] = {"n": number}
            await claim(cp, thread, ledger.key(thread, "charge", args), args)

        with pytest.raises(EffectTimeout):
            await ledger.run(thread, "charge", {"n": 1}, Shop().charge, verify=landed)

        tool = Tool(Shop().charge, name="charge", verify=landed)
        report = await ledger.resume(thread, [tool])

    assert [call.action for call in report.calls] == ["surfaced", "landed"]


async def test_a_takeover_has_one_winner(cp: Store, thread: str) -> None:
    """Of many runs that wait for a dead holder, one runs the effect."""
    key = quick(cp).key(thread, "charge", ARGS)
    await claim(cp, thread, key, ARGS)
    shop = Shop()
    results = await asyncio.gather(
        *(
            quick(cp, stale_after=0.2 * slowdown()).run(
                thread, "charge", ARGS, shop.charge
            )
            for _ in range(6)
        )
    )
    assert results == [{"charge": 1}] * 6
    assert len(shop.effects) == 1


@pytest.mark.parametrize(
    ("timeout", "warns"), [(30.0, True), (60.0, True), (90.0, False), (None, False)]
)
def test_a_timeout_that_prevents_every_takeover_is_logged(
    timeout: float | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each wait measures from its own first look, so none would ever take over."""
    quick(MemoryCheckpointer(), timeout=timeout, stale_after=60)
    assert ("no waiting run takes over" in caplog.text) is warns


@pytest.mark.parametrize(
    "options",
    [
        {"stale_after": 0},
        {"stale_after": nan},
        {"stale_after": inf},
        {"stale_after": -1.0},
        {"timeout": nan},
        {"timeout": inf},
        {"timeout": -1.0},
        {"approval_timeout": nan},
        {"approval_timeout": inf},
        {"approval_timeout": -1.0},
    ],
)
async def test_impossible_intervals_are_refused(options: dict[str, float]) -> None:
    """With nan, a wait would not end."""
    with pytest.raises(ValueError, match="|".join(options)):
        quick(MemoryCheckpointer(), **options)


@pytest.mark.parametrize("option", ["timeout", "approval_timeout", "stale_after"])
@pytest.mark.parametrize("seconds", [nan, inf, -1.0])
async def test_an_impossible_interval_of_one_effect_is_refused(
    option: str, seconds: float
) -> None:
    """It is refused before anything is recorded."""
    given: dict[str, Any] = {option: seconds}

    async with MemoryCheckpointer[Any]() as cp:
        with pytest.raises(ValueError, match=option):
            await quick(cp).run("t", "charge", ARGS, Shop().charge, **given)

        assert await cp.load("t") is None
