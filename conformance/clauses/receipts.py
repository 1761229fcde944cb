"""Optional: listing every stored call, and finding the holder of a key."""

from __future__ import annotations

from typing import Any

from conformance.case import Case
from conformance.clause import clause
from conformance.sample_ids import matching_patterns
from cpkit import KeepsReceipts


@clause("receipts.every-attempt-in-order", KeepsReceipts)
async def every_attempt_in_order(case: Case) -> None:
    """list_calls returns every attempt of the thread, in the order of claims."""
    thread, key = case.id(), case.id("key")
    calls = [case.call(key), case.call(), case.call(key), case.call(), case.call(key)]
    expected: list[tuple[str, Any]] = []

    for n, call in enumerate(calls):
        await case.cp.record_issued(thread, call)

        if n == 0 or n == 2:
            await case.cp.record_result(thread, call.call_id, {"n": n}, success=False)
            expected.append(("failed", {"n": n}))
        elif n == 1:
            await case.cp.record_result(thread, call.call_id, {"n": n})
            expected.append(("completed", {"n": n}))
        else:
            expected.append(("issued", None))

    listed = await case.cp.list_calls(thread)
    assert [record.call for record in listed] == calls
    assert [(record.status, record.result) for record in listed] == expected
    assert [record.attempt for record in listed] == [1, 1, 2, 1, 3]
    assert {record.thread_id for record in listed} == {thread}


@clause("receipts.order-is-of-claims", KeepsReceipts)
async def order_is_of_claims(case: Case) -> None:
    """Resolving calls in another order does not change the order of list_calls."""
    thread = case.id()
    calls = [case.call() for _ in range(15)]

    for call in calls:
        await case.cp.record_issued(thread, call)

    for call in reversed(calls[::2]):
        await case.cp.record_result(thread, call.call_id, 1)

    listed = await case.cp.list_calls(thread)
    assert [record.call for record in listed] == calls


@clause("receipts.own-thread-only", KeepsReceipts)
async def own_thread_only(case: Case) -> None:
    """list_calls returns the calls of its own thread only."""
    one, other, key = case.id(), case.id(), case.id("key")
    call = case.call(key)
    await case.cp.record_issued(one, call)
    await case.cp.record_issued(other, case.call(key))
    await case.cp.append(other, [{"n": 1}])
    assert [record.call for record in await case.cp.list_calls(one)] == [call]
    assert await case.cp.list_calls(other) == []
    assert await case.cp.list_calls(case.id()) == []


@clause("receipts.same-record-everywhere", KeepsReceipts)
async def same_record_everywhere(case: Case) -> None:
    """load, list_calls, find_call and a repeated claim return the same record."""
    thread, call = case.id(), case.call()
    await case.cp.record_issued(thread, call)
    loaded = await case.cp.load(thread)
    listed = await case.cp.list_calls(thread)
    held = await case.cp.find_call(call.idempotency_key)
    again = await case.cp.record_issued(thread, call)
    assert loaded is not None
    assert loaded.pending == listed == [held] == [again]

    done = await case.cp.record_result(thread, call.call_id, 1)
    assert await case.cp.list_calls(thread) == [done]
    assert await case.cp.find_call(call.idempotency_key) == done


@clause("receipts.find-call-is-the-holder", KeepsReceipts)
async def find_call_is_the_holder(case: Case) -> None:
    """find_call returns the issued or completed call that holds a key, or None."""
    key = case.id("key")
    assert await case.cp.find_call(key) is None

    for attempt in (1, 2):
        thread, call = case.id(), case.call(key)
        await case.cp.record_issued(thread, call)
        held = await case.cp.find_call(key)
        assert held is not None
        assert (held.thread_id, held.call, held.attempt) == (thread, call, attempt)
        assert held.status == "issued"
        await case.cp.record_result(thread, call.call_id, "no", success=False)
        assert await case.cp.find_call(key) is None

    thread, call = case.id(), case.call(key)
    await case.cp.record_issued(thread, call)
    done = await case.cp.record_result(thread, call.call_id, "yes")
    assert await case.cp.find_call(key) == done


@clause("receipts.are-the-callers", KeepsReceipts)
async def are_the_callers(case: Case) -> None:
    """Changing a listed record does not change the stored one."""
    thread, call = case.id(), case.call(args={"to": ["x"]})
    await case.cp.record_issued(thread, call)
    await case.cp.record_result(thread, call.call_id, {"lines": [1]})
    mine: Any = await case.cp.list_calls(thread)
    mine[0].call.args["to"].append("y")
    mine[0].result["lines"].append(2)
    held: Any = await case.cp.find_call(call.idempotency_key)
    held.result["lines"].append(3)
    seen = (await case.cp.list_calls(thread))[0]
    assert (seen.call.args, seen.result) == ({"to": ["x"]}, {"lines": [1]})


@clause("receipts.looking-records-nothing", KeepsReceipts)
async def looking_records_nothing(case: Case) -> None:
    """list_calls and find_call create no thread and hold no key."""
    thread, key = case.id(), case.id("key")
    await case.cp.list_calls(thread)
    await case.cp.find_call(key)
    assert await case.cp.load(thread) is None
    assert await case.cp.record_issued(thread, case.call(key)) is None


@clause("receipts.ids-are-not-patterns", KeepsReceipts)
async def ids_are_not_patterns(case: Case) -> None:
    """list_calls and find_call with wildcards return no call of another id or key."""
    texts, patterns = matching_patterns(case.id("t"))

    for text in texts:
        await case.cp.record_issued(text, case.call(text))

    for pattern in patterns:
        calls = await case.cp.list_calls(pattern)
        holder = await case.cp.find_call(pattern)
        assert calls == [], f"list_calls of {pattern!r}"
        assert holder is None, f"find_call of {pattern!r}"
