"""Runs of an effect: one caller, many callers, and what each gets."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    CallRecord,
    CorruptThread,
    JsonValue,
    PayloadTooLarge,
    SerializationError,
    ToolCall,
    UnknownCall,
    open_checkpointer,
)
from cpkit.effects import (
    Effect,
    EffectErased,
    EffectFailed,
    EffectLedger,
    EffectTimeout,
    KeyReused,
    NoEffect,
    Superseded,
)
from cpkit.effects.waits import SharedWaits
from cpkit.lease import thread_lease
from cpkit.runs import waiting
from tests.effects.shop import (
    Counting,
    OnlySix,
    Plain,
    Shop,
    Store,
    quick,
    until,
)

ARGS: dict[str, JsonValue] = {"amount": 1000}


async def test_a_second_run_replays_the_first(cp: Store, thread: str) -> None:
    """The handler is called once, and every caller gets what it returned."""
    shop = Shop({"charge": "ch_1"})
    ledger = quick(cp)
    first = await ledger.run(thread, "charge", ARGS, shop.charge)
    second = await quick(cp).run(thread, "charge", ARGS, shop.charge)
    assert first == second == {"charge": "ch_1"}
    assert len(shop.effects) == 1


async def test_a_handler_gets_its_effect(cp: Store, thread: str) -> None:
    """The effect has the key to pass downstream, the attempt, and the args as JSON."""
    shop = Shop()
    ledger = quick(cp)
    await ledger.run(thread, "charge", ARGS, shop.charge_now, tool_call_id="call_0")
    effect = shop.effects[0]
    assert effect.key == ledger.key(thread, "charge", ARGS)
    assert (effect.thread_id, effect.tool, effect.args) == (thread, "charge", ARGS)
    assert (effect.attempt, effect.tool_call_id) == (1, "call_0")
    record = await ledger.find(effect.key)
    assert record is not None
    assert record.call.call_id == effect.call_id


@pytest.mark.parametrize(
    "result", [None, False, 0, "", [], {}, 0.0, {"value": 1}, {"error": {"type": "x"}}]
)
async def test_any_result_replays_unchanged(
    cp: Store, thread: str, result: JsonValue
) -> None:
    """This includes falsy results and results that look like an envelope."""
    shop = Shop(result)
    ledger = quick(cp)
    got = [await ledger.run(thread, "charge", ARGS, shop.charge) for _ in range(2)]
    assert got == [result, result]
    assert [type(one) for one in got] == [type(result), type(result)]
    assert len(shop.effects) == 1


async def test_the_first_caller_gets_the_recorded_result(
    cp: Store, thread: str
) -> None:
    """A tuple comes back as a list, as for every later caller."""
    shop = Shop(("a", "b"))
    got = await quick(cp).run(thread, "charge", ARGS, shop.charge)
    assert got == ["a", "b"]


async def test_concurrent_callers_share_one_run(cp: Store, thread: str) -> None:
    """Of many callers, one runs the handler, and all return the same result."""
    shop = Shop(gate=asyncio.Event())
    ledgers = [quick(cp), quick(cp), quick(Plain(cp))]

    async with asyncio.TaskGroup() as group:
        runs = [
            group.create_task(ledger.run(thread, "charge", ARGS, shop.charge))
            for ledger in ledgers
            for _ in range(5)
        ]
        await shop.began.wait()
        assert shop.gate is not None
        shop.gate.set()

    assert {str(run.result()) for run in runs} == {"{'charge': 1}"}
    assert len(shop.effects) == 1


async def test_a_failure_is_final(cp: Store, thread: str) -> None:
    """The handler's caller gets its exception, later callers ``EffectFailed``."""
    shop = Shop(ValueError("no funds"))

    with pytest.raises(ValueError, match="no funds"):
        await quick(cp).run(thread, "charge", ARGS, shop.charge)

    with pytest.raises(EffectFailed, match="no funds") as failed:
        await quick(cp).run(thread, "charge", ARGS, shop.charge)

    assert failed.value.error_type == "ValueError"
    assert len(shop.effects) == 1


async def test_a_released_attempt_can_be_retried(cp: Store, thread: str) -> None:
    """``NoEffect`` frees the key, and the next attempt is one higher."""
    shop = Shop(NoEffect("busy"))
    ledger = quick(cp)

    with pytest.raises(NoEffect, match="busy"):
        await ledger.run(thread, "charge", ARGS, shop.charge)

    shop.result = "done"
    assert await ledger.run(thread, "charge", ARGS, shop.charge) == "done"
    assert [effect.attempt for effect in shop.effects] == [1, 2]
    receipts = await cp.list_calls(thread)
    assert [r.status for r in receipts] == ["failed", "completed"]
    assert receipts[0].result == {"released": "busy"}


async def test_a_store_without_receipts_is_refused(cp: Store) -> None:
    """It does not show which attempt holds a key; the error says what is missing."""
    with pytest.raises(TypeError, match=r"list_calls and find_call \(KeepsReceipts\)"):
        EffectLedger(OnlySix(cp))


async def test_a_url_is_not_a_store() -> None:
    """The error shows how to open one, and no password."""
    with pytest.raises(TypeError, match="async with open_checkpointer") as raised:
        EffectLedger("redis://:secret@host")  # type: ignore[arg-type]  # the mistake

    assert "secret" not in str(raised.value)


async def test_a_waiter_runs_a_released_effect(cp: Store, thread: str) -> None:
    """It claims the key as soon as the holder releases it."""
    shop = Shop(NoEffect(), gate=asyncio.Event())
    another = Shop("done")
    first = asyncio.create_task(quick(cp).run(thread, "charge", ARGS, shop.charge))
    await shop.began.wait()
    second = asyncio.create_task(quick(cp).run(thread, "charge", ARGS, another.charge))
    await asyncio.sleep(0.02)
    assert shop.gate is not None
    shop.gate.set()

    with pytest.raises(NoEffect):
        await first

    assert await second == "done"
    assert another.effects[0].attempt == 2


async def test_a_result_that_json_cannot_hold_is_a_final_error(
    cp: Store, thread: str
) -> None:
    """The effect happened, so it is recorded as failed, with the reason."""
    shop = Shop({"rate": math.nan})

    with pytest.raises(SerializationError, match="rate"):
        await quick(cp).run(thread, "charge", ARGS, shop.charge)

    with pytest.raises(EffectFailed, match="rate"):
        await quick(cp).run(thread, "charge", ARGS, shop.charge)

    assert len(shop.effects) == 1


async def test_a_result_too_large_for_the_store_is_a_final_error(
    tmp_path: Any, thread: str
) -> None:
    """The recorded error says how large the result was."""
    async with open_checkpointer(f"sqlite:///{tmp_path}/x.db?max_payload=500") as cp:
        shop = Shop("x" * 1000)

        with pytest.raises(PayloadTooLarge):
            await quick(cp).run(thread, "charge", ARGS, shop.charge)

        with pytest.raises(EffectFailed, match="1012 bytes"):
            await quick(cp).run(thread, "charge", ARGS, shop.charge)


async def test_a_result_that_only_the_store_refuses_is_a_final_error(
    cp: Store, thread: str
) -> None:
    """Stores differ in how deep a value may nest. The effect happened all the same."""

    class Shallow(Plain):
        async def resolve(
            self, thread_id: str, call_id: str, result: Any, *, success: bool = True
        ) -> CallRecord:
            if "value" in result:
                raise SerializationError(("result",), "nested too deep for this store")

            return await cp.record_result(thread_id, call_id, result, success=success)

    store: Any = Shallow(cp)
    store.record_result = store.resolve
    shop = Shop([[[]]])

    with pytest.raises(SerializationError, match="too deep"):
        await quick(store).run(thread, "charge", ARGS, shop.charge)

    with pytest.raises(EffectFailed, match="too deep"):
        await quick(cp).run(thread, "charge", ARGS, shop.charge)

    assert len(shop.effects) == 1


async def test_an_exception_without_a_usable_message_is_recorded(
    cp: Store, thread: str
) -> None:
    """The message has a lone surrogate, or ``__str__`` itself raises."""

    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    for number, error in enumerate([Rude(), ValueError("\ud800")]):
        shop = Shop(error)

        with pytest.raises(type(error)):
            await quick(cp).run(thread, "charge", {"n": number}, shop.charge)

        with pytest.raises(EffectFailed):
            await quick(cp).run(thread, "charge", {"n": number}, shop.charge)

    statuses = [record.status for record in await cp.list_calls(thread)]
    assert statuses == ["completed"] * 2


async def test_a_release_without_a_usable_message_is_recorded(
    cp: Store, thread: str
) -> None:
    """As a failure is."""

    class Rude(NoEffect):
        def __str__(self) -> str:
            raise RuntimeError

    for number, error in enumerate([Rude(), NoEffect("\ud800")]):
        with pytest.raises(type(error)):
            await quick(cp).run(thread, "charge", {"n": number}, Shop(error).charge)

    statuses = [record.status for record in await cp.list_calls(thread)]
    assert statuses == ["failed"] * 2


async def test_bad_args_are_refused_first(cp: Store, thread: str) -> None:
    """Nothing is recorded, and the handler does not run."""
    shop = Shop()
    args: Any = {"x": {1, 2}}

    with pytest.raises(SerializationError):
        await quick(cp).run(thread, "charge", args, shop.charge)

    assert shop.effects == []
    assert await cp.list_calls(thread) == []


async def test_a_cancelled_handler_leaves_its_call_issued(
    cp: Store, thread: str
) -> None:
    """Its effect is unclear, so no run repeats it, and waiting runs time out."""
    shop = Shop(gate=asyncio.Event())
    task = asyncio.create_task(quick(cp).run(thread, "charge", ARGS, shop.charge))
    await shop.began.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task

    with pytest.raises(EffectTimeout, match="attempt 1") as late:
        await quick(cp, timeout=0.05).run(thread, "charge", ARGS, shop.charge)

    data = await cp.load(thread)
    assert data is not None
    assert data.pending == [late.value.holder]
    assert len(shop.effects) == 1


async def test_a_run_cancelled_before_its_handler_frees_the_key(
    cp: Store, thread: str
) -> None:
    """It is cancelled in the middle of its claim, and the next run does not wait."""
    claimed = asyncio.Event()

    class Slow(Plain):
        async def issue(self, thread_id: str, call: ToolCall) -> CallRecord | None:
            record = await cp.record_issued(thread_id, call)
            claimed.set()
            await asyncio.Event().wait()
            return record

    store: Any = Slow(cp)
    store.record_issued = store.issue
    cancelled = Shop()
    task = asyncio.create_task(
        quick(store).run(thread, "charge", ARGS, cancelled.charge)
    )
    await claimed.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task

    shop = Shop()
    await quick(cp).run(thread, "charge", ARGS, shop.charge)
    assert (len(cancelled.effects), shop.effects[0].attempt) == (0, 2)


async def test_a_given_key_with_other_args_is_refused(cp: Store, thread: str) -> None:
    """``KeyReused`` is raised while the first run is going on, and after it."""
    shop = Shop(gate=asyncio.Event())
    ledger = quick(cp)
    options: dict[str, Any] = {"idempotency_key": "order-7"}
    first = asyncio.create_task(
        ledger.run(thread, "charge", {"amount": 1}, shop.charge, **options)
    )
    await shop.began.wait()

    with pytest.raises(KeyReused):
        await ledger.run(thread, "charge", {"amount": 2}, shop.charge, **options)

    assert shop.gate is not None
    shop.gate.set()
    await first

    with pytest.raises(KeyReused):
        await ledger.run(thread, "charge", {"amount": 2}, shop.charge, **options)

    # 1 and 1.0 are the same argument.
    again = await ledger.run(thread, "charge", {"amount": 1.0}, shop.charge, **options)
    assert again == {"charge": 1}
    assert len(shop.effects) == 1


@pytest.mark.parametrize("status", ["issued", "completed"])
async def test_an_erased_effect_is_never_run_again(
    cp: Store, thread: str, status: str
) -> None:
    """``delete_thread`` keeps the key, so later runs raise ``EffectErased``."""
    shop = Shop(gate=None if status == "completed" else asyncio.Event())
    task = asyncio.create_task(quick(cp).run(thread, "charge", ARGS, shop.charge))
    await shop.began.wait()

    if status == "completed":
        await task

    await cp.delete_thread(thread)

    with pytest.raises(EffectErased, match=status):
        await quick(cp).run(thread, "charge", ARGS, shop.charge)

    if shop.gate is not None:
        shop.gate.set()

    assert await task == {"charge": 1}  # the run itself still knows the result
    assert len(shop.effects) == 1


async def test_begin_and_commit(cp: Store, thread: str) -> None:
    """The caller with the fresh record runs the effect; others get its record."""
    ledger = quick(cp)
    begun = await ledger.begin(thread, "charge", ARGS)
    assert begun.fresh
    assert begun.record.status == "issued"
    again = await ledger.begin(thread, "charge", ARGS)
    assert not again.fresh
    assert again.record == begun.record
    done = await ledger.commit(begun.record, {"charge": 1})
    assert done.status == "completed"
    assert await ledger.commit(begun.record, {"charge": 1}) == done
    assert await ledger.begin(thread, "charge", ARGS) == (done, False)
    shop = Shop()
    assert await ledger.run(thread, "charge", ARGS, shop.charge) == {"charge": 1}
    assert shop.effects == []


async def test_commit_raises_when_another_outcome_won(cp: Store, thread: str) -> None:
    """``Superseded`` has the winning record."""
    ledger = quick(cp)
    begun = await ledger.begin(thread, "charge", ARGS)
    await ledger.release(begun.record, "taken for dead")
    second = await ledger.begin(thread, "charge", ARGS)
    assert (second.fresh, second.record.attempt) == (True, 2)

    with pytest.raises(Superseded) as late:
        await ledger.commit(begun.record, "first")

    assert late.value.record == second.record
    await ledger.commit(second.record, "second")

    with pytest.raises(Superseded) as late:
        await ledger.commit(begun.record, "first")

    assert late.value.record.result == {"value": "second"}

    with pytest.raises(Superseded):
        await ledger.release(second.record)


async def test_commit_records_an_effect_whose_attempt_was_released(
    cp: Store, thread: str
) -> None:
    """It has happened, so the next run must not repeat it."""
    shop = Shop()
    ledger = quick(cp)
    begun = await ledger.begin(thread, "charge", ARGS)
    await quick(cp).release(begun.record, "taken for dead")
    record = await ledger.commit(begun.record, "paid")
    assert (record.status, record.attempt) == ("completed", 2)
    assert await quick(cp).run(thread, "charge", ARGS, shop.charge) == "paid"
    assert shop.effects == []
    assert await ledger.commit(begun.record, "paid") == record


async def test_an_effect_may_be_committed_through_another_ledger(
    cp: Store, thread: str
) -> None:
    """A web request begins it, and another one ends it: its heartbeats end, too."""
    begun = await quick(cp).begin(thread, "charge", ARGS)
    running = SharedWaits.of(cp).running
    assert begun.record.call.call_id in running
    await quick(cp).commit(begun.record, "paid")
    assert begun.record.call.call_id not in running


async def test_a_begun_effect_that_was_forgotten_writes_no_more_heartbeats(
    cp: Store, thread: str
) -> None:
    """Its thread was deleted with its keys, so no outcome can ever end them."""
    ledger = quick(cp)
    begun = await ledger.begin(thread, "charge", ARGS)
    await cp.delete_thread(thread, forget_keys=True)

    with pytest.raises(UnknownCall):
        await ledger.commit(begun.record, "paid")

    assert begun.record.call.call_id not in SharedWaits.of(cp).running


async def test_commit_is_repeated_after_an_error_between_its_steps(
    cp: Store, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the same attempt, the first try holds the key, and the result is lost."""
    store = Plain(cp)
    shop = Shop()
    begun = await quick(cp).begin(thread, "charge", ARGS)
    await quick(cp).release(begun.record, "taken for dead")

    async def record(thread_id: str, call_id: str, *args: Any, **options: Any) -> Any:
        if call_id != begun.record.call.call_id:
            raise BackendUnavailable("test", "away")

        return await cp.record_result(thread_id, call_id, *args, **options)

    store.record_result = record

    monkeypatch.setattr(waiting.retry_unclear, "__defaults__", (0.0,))

    with pytest.raises(BackendUnavailable):
        await quick(store).commit(begun.record, "paid")

    done = await quick(cp).commit(begun.record, "paid")
    assert (done.status, done.attempt) == ("completed", 2)
    assert await quick(cp).run(thread, "charge", ARGS, shop.charge) == "paid"
    assert shop.effects == []


async def test_commit_records_errors_and_bad_results_as_failures(
    cp: Store, thread: str
) -> None:
    """An error, and a result that JSON cannot hold, are final failures."""
    ledger = quick(cp)
    one = await ledger.begin(thread, "charge", {"n": 1})
    two = await ledger.begin(thread, "charge", {"n": 2})
    await ledger.commit(one.record, error=ValueError("no funds"))

    with pytest.raises(SerializationError):
        await ledger.commit(two.record, {1, 2})  # type: ignore[arg-type]  # the point

    for number in (1, 2):
        with pytest.raises(EffectFailed):
            await ledger.run(thread, "charge", {"n": number}, Shop().charge)


class Unclear(Plain):
    """Loses the first answer of each call method, and applies the write or not."""

    def __init__(self, cp: Any, applied: bool) -> None:
        super().__init__(cp)
        self._applied = applied
        self._cp = cp
        self._lost: set[str] = set()
        self.record_issued = self._issue
        self.record_result = self._resolve

    async def _issue(self, thread_id: str, call: ToolCall) -> CallRecord | None:
        held: CallRecord | None = await self._lose(
            "issue", lambda: self._cp.record_issued(thread_id, call)
        )
        return held

    async def _resolve(
        self, thread_id: str, call_id: str, result: JsonValue, *, success: bool = True
    ) -> CallRecord:
        record: CallRecord = await self._lose(
            "resolve",
            lambda: self._cp.record_result(thread_id, call_id, result, success=success),
        )
        return record

    async def _lose(self, name: str, operation: Any) -> Any:
        first = name not in self._lost
        self._lost.add(name)

        if first and not self._applied:
            raise BackendUnavailable("test", "lost", maybe_applied=True)

        answer = await operation()

        if first:
            raise BackendUnavailable("test", "answer lost", maybe_applied=True)

        return answer


@pytest.mark.parametrize("applied", [True, False])
async def test_a_lost_answer_is_retried(cp: Store, thread: str, applied: bool) -> None:
    """The retry has the same ids, so the effect runs once and is recorded once."""
    shop = Shop()
    ledger = quick(Unclear(cp, applied))
    assert await ledger.run(thread, "charge", ARGS, shop.charge) == {"charge": 1}
    assert [record.status for record in await cp.list_calls(thread)] == ["completed"]
    assert len(shop.effects) == 1


async def test_a_superseded_run_returns_the_recorded_result(
    cp: Store, thread: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The run logs a warning, and discards its own result."""
    shop = Shop("late", gate=asyncio.Event())
    slow = asyncio.create_task(quick(cp).run(thread, "charge", ARGS, shop.charge))
    await shop.began.wait()
    await cp.record_result(thread, shop.effects[0].call_id, {}, success=False)
    other = Shop("first")
    assert await quick(cp).run(thread, "charge", ARGS, other.charge) == "first"
    assert shop.gate is not None

    with caplog.at_level(logging.WARNING, "cpkit.effects"):
        shop.gate.set()
        assert await slow == "first"

    assert "superseded" in caplog.text


async def test_a_superseded_run_records_its_result_if_the_key_is_free(
    cp: Store, thread: str
) -> None:
    """It claims the key again as a new attempt, without a second run."""
    shop = Shop("kept", gate=asyncio.Event())
    slow = asyncio.create_task(quick(cp).run(thread, "charge", ARGS, shop.charge))
    await shop.began.wait()
    await cp.record_result(thread, shop.effects[0].call_id, {}, success=False)
    assert shop.gate is not None
    shop.gate.set()
    assert await slow == "kept"
    assert len(shop.effects) == 1
    assert [(r.status, r.attempt) for r in await cp.list_calls(thread)] == [
        ("failed", 1),
        ("completed", 2),
    ]


async def test_the_claim_for_a_result_is_repeated_while_the_store_is_away(
    cp: Store, thread: str
) -> None:
    """The attempt was released meanwhile. Without the claim, the result is lost."""
    shop = Shop("kept", gate=asyncio.Event())
    store = Plain(cp)
    refused: list[str] = []

    async def issue(thread_id: str, call: ToolCall) -> Any:
        if shop.effects and not refused:
            refused.append(call.call_id)
            raise BackendUnavailable("test", "away")

        return await cp.record_issued(thread_id, call)

    store.record_issued = issue
    run = asyncio.create_task(quick(store).run(thread, "charge", ARGS, shop.charge))
    await shop.began.wait()
    await cp.record_result(thread, shop.effects[0].call_id, {}, success=False)
    assert shop.gate is not None
    shop.gate.set()
    assert await run == "kept"
    assert len(refused) == len(shop.effects) == 1


async def test_a_callback_that_changes_the_arguments_changes_its_own_copy(
    cp: Store, thread: str
) -> None:
    """A policy may redact them: the handler and the record have them all."""
    args: dict[str, JsonValue] = {"card": {"number": "4111"}, "amount": 1000}
    seen: list[JsonValue] = []

    def redacts(effect: Effect) -> bool:
        card: Any = effect.args["card"]
        card.clear()
        return False

    def handler(effect: Effect) -> None:
        seen.append(dict(effect.args))

    ledger = quick(cp, requires_approval=redacts)
    await ledger.run(thread, "charge", args, handler)
    (record,) = await cp.list_calls(thread)
    assert [seen, record.call.args["args"]] == [[args], args]


async def test_find_returns_issued_holders_too(cp: Store, thread: str) -> None:
    """And the completed record once there is one."""
    begun = await quick(cp).begin(thread, "charge", ARGS)
    key = begun.record.call.idempotency_key
    assert await quick(cp).find(key) == begun.record
    done = await quick(cp).commit(begun.record, None)
    assert await quick(cp).find(key) == done


async def test_a_fresh_effect_is_two_writes_and_a_replay_one_read(
    cp: Store, thread: str
) -> None:
    """A fresh effect costs one more read for the attempt, and no other call."""
    counting = Counting(cp)
    ledger = quick(counting)
    await ledger.run(thread, "charge", ARGS, Shop().charge)
    assert counting.calls == [
        "find_call",
        "record_issued",
        "find_call",
        "record_result",
    ]
    counting.calls.clear()
    await ledger.run(thread, "charge", ARGS, Shop().charge)
    assert counting.calls == ["find_call"]
    data = await cp.load(thread)
    assert data is not None
    # The agent's own thread has the call, and nothing in extra.
    assert (data.extra, data.pending, data.messages) == ({}, [], [])


async def test_an_approval_costs_four_writes_under_a_lease(
    cp: Store, thread: str
) -> None:
    """The request, its place on the list of runs, the decision, and a hint."""
    counting = Counting(cp)
    ledger = quick(counting, requires_approval=lambda _: True, approval_timeout=0)

    async with thread_lease(counting, thread):
        counting.calls.clear()

        with pytest.raises(EffectTimeout):
            await ledger.run(thread, "charge", ARGS, Shop().charge)

    assert counting.calls[:5] == [
        "find_call",  # the effect
        "find_call",  # its request
        "record_issued",  # the request
        "find_call",
        "append",  # the list of runs
    ]
    counting.calls.clear()
    assert await ledger.approve(ledger.key(thread, "charge", ARGS))
    assert counting.calls == [
        *("find_call", "find_call"),  # the request, and that no other follows it
        "record_result",
        "append",  # a hint for workers
    ]

    async with thread_lease(counting, thread):
        counting.calls.clear()
        await ledger.run(thread, "charge", ARGS, Shop().charge)
        assert counting.calls == [
            "find_call",
            *("find_call", "find_call"),  # the request is decided, and the newest
            "record_issued",
            "find_call",
            "record_result",
        ]


async def test_timeout_none_waits_without_limit(cp: Store, thread: str) -> None:
    """The run returns once the result is recorded."""
    begun = await quick(cp).begin(thread, "charge", ARGS)
    waiter = asyncio.create_task(
        quick(cp, timeout=None).run(thread, "charge", ARGS, Shop().charge)
    )
    await asyncio.sleep(0.05)
    assert not waiter.done()
    await quick(cp).commit(begun.record, "done")

    async def done() -> bool:
        return waiter.done()

    await until(done)
    assert await waiter == "done"


async def test_an_error_between_the_claim_and_the_handler_frees_the_key(
    cp: Store, thread: str
) -> None:
    """The handler has not run, so the next run may run it."""
    damaged = Plain(cp)
    looks = 0

    async def find_call(key: str) -> CallRecord | None:
        nonlocal looks
        looks += 1

        if looks > 1:
            raise CorruptThread(thread, "a call", "not JSON")

        return await cp.find_call(key)

    damaged.find_call = find_call
    shop = Shop()

    with pytest.raises(CorruptThread):
        await quick(damaged).run(thread, "charge", ARGS, shop.charge)

    assert not shop.effects
    assert await quick(cp).run(thread, "charge", ARGS, shop.charge) == {"charge": 1}
    assert len(shop.effects) == 1
