"""Results: the first one is stored and stays."""

from __future__ import annotations

from typing import Any

from conformance.case import Case, raises
from conformance.clause import clause
from cpkit import SerializationError, ToolCall, UnknownCall


async def _issued(case: Case, key: str | None = None) -> tuple[str, ToolCall]:
    thread, call = case.id(), case.call(key)
    assert await case.cp.record_issued(thread, call) is None
    return thread, call


@clause("result.completes")
async def completes(case: Case) -> None:
    """record_result returns the completed record; the call is no longer pending."""
    thread, call = await _issued(case)
    record = await case.cp.record_result(thread, call.call_id, {"id": [1, "x"]})
    loaded = await case.cp.load(thread)
    assert (record.thread_id, record.call) == (thread, call)
    assert (record.status, record.attempt) == ("completed", 1)
    assert record.result == {"id": [1, "x"]}
    assert loaded is not None
    assert loaded.pending == []


@clause("result.failure-keeps-receipt")
async def failure_keeps_receipt(case: Case) -> None:
    """A failed call is no longer pending and keeps its result as a receipt."""
    thread, call = await _issued(case)
    record = await case.cp.record_result(
        thread, call.call_id, {"why": "no"}, success=False
    )
    loaded = await case.cp.load(thread)
    assert (record.status, record.result) == ("failed", {"why": "no"})
    assert loaded is not None
    assert loaded.pending == []


@clause("result.first-stays")
async def first_stays(case: Case) -> None:
    """A second result changes nothing and returns the record of the first."""
    thread, call = await _issued(case)
    first = await case.cp.record_result(thread, call.call_id, "first")
    second = await case.cp.record_result(thread, call.call_id, "second")
    found = await case.cp.find_completed(call.idempotency_key)
    assert second == first
    assert found == first


@clause("result.late-failure-undoes-nothing")
async def late_failure_undoes_nothing(case: Case) -> None:
    """A late failure does not change a completed call; its key stays held."""
    thread, call = await _issued(case)
    first = await case.cp.record_result(thread, call.call_id, "paid")
    late = await case.cp.record_result(thread, call.call_id, "no", success=False)
    holder = await case.cp.record_issued(thread, case.call(call.idempotency_key))
    assert late == first
    assert holder == first


@clause("result.late-success-revives-nothing")
async def late_success_revives_nothing(case: Case) -> None:
    """A late success does not change a failed call; its key stays free."""
    thread, call = await _issued(case)
    first = await case.cp.record_result(thread, call.call_id, "no", success=False)
    late = await case.cp.record_result(thread, call.call_id, "paid")
    found = await case.cp.find_completed(call.idempotency_key)
    claimed = await case.cp.record_issued(thread, case.call(call.idempotency_key))
    assert late == first
    assert found is None
    assert claimed is None


@clause("result.superseded-learns-it")
async def superseded_learns_it(case: Case) -> None:
    """A late result of a superseded attempt gets its failed record, changes nothing."""
    thread, call = await _issued(case)
    failed = await case.cp.record_result(thread, call.call_id, "taken", success=False)
    other, second = case.id(), case.call(call.idempotency_key)
    await case.cp.record_issued(other, second)
    late = await case.cp.record_result(thread, call.call_id, "paid")
    loaded = await case.cp.load(other)
    assert late == failed
    assert loaded is not None
    assert [(r.call, r.attempt) for r in loaded.pending] == [(second, 2)]
    done = await case.cp.record_result(other, second.call_id, "paid once")
    assert await case.cp.find_completed(call.idempotency_key) == done


@clause("result.falsy-is-a-result")
async def falsy_is_a_result(case: Case) -> None:
    """A result of None, False, 0, "", [] or {} is a result like any other."""
    falsy: list[Any] = [None, False, 0, 0.0, "", [], {}]

    for value in falsy:
        thread, call = await _issued(case)
        done = await case.cp.record_result(thread, call.call_id, value)
        late = await case.cp.record_result(thread, call.call_id, "late")
        found = await case.cp.find_completed(call.idempotency_key)
        holder = await case.cp.record_issued(thread, case.call(call.idempotency_key))
        assert done.status == "completed"
        assert (done.result, type(done.result)) == (value, type(value))
        assert late == found == holder == done


@clause("result.unknown-call")
async def unknown_call(case: Case) -> None:
    """A result for an unknown call raises UnknownCall and writes nothing."""
    thread, call_id = case.id(), case.id("call")

    with raises(UnknownCall) as caught:
        await case.cp.record_result(thread, call_id, 1)

    assert (caught.error.thread_id, caught.error.call_id) == (thread, call_id)
    assert await case.cp.load(thread) is None


@clause("result.unknown-in-another-thread")
async def unknown_in_another_thread(case: Case) -> None:
    """A call is known only in its own thread."""
    _, call = await _issued(case)
    other, mine = await _issued(case)

    with raises(UnknownCall):
        await case.cp.record_result(other, call.call_id, 1)

    with raises(UnknownCall):
        await case.cp.record_result(case.id(), mine.call_id, 1)


@clause("result.refused-leaves-issued")
async def refused_leaves_issued(case: Case) -> None:
    """A result that cannot be stored is refused, and the call stays issued."""
    thread, call = await _issued(case)
    before = await case.cp.load(thread)
    wrong: Any = {"at": [1, float("inf")]}

    with raises(SerializationError) as caught:
        await case.cp.record_result(thread, call.call_id, wrong)

    assert caught.error.path[-2:] == ("at", 1)
    assert await case.cp.load(thread) == before


@clause("result.success-is-a-bool")
async def success_is_a_bool(case: Case) -> None:
    """A success that is not a bool is a TypeError, and the call stays issued."""
    thread, call = await _issued(case)
    wrong: list[Any] = [None, 1, "yes"]

    for value in wrong:
        with raises(TypeError, repr(value)):
            await case.cp.record_result(thread, call.call_id, 1, success=value)

    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert len(loaded.pending) == 1


@clause("result.copies-its-input")
async def copies_its_input(case: Case) -> None:
    """Changing a result after it was recorded does not change the stored one."""
    thread, call = await _issued(case)
    given: dict[str, Any] = {"lines": [1]}
    await case.cp.record_result(thread, call.call_id, given)
    given["lines"].append(2)
    found = await case.cp.find_completed(call.idempotency_key)
    assert found is not None
    assert found.result == {"lines": [1]}


@clause("result.record-is-the-callers")
async def record_is_the_callers(case: Case) -> None:
    """Changing a returned record does not change the stored one."""
    thread, call = await _issued(case)
    mine: Any = await case.cp.record_result(thread, call.call_id, {"lines": [1]})
    mine.result["lines"].append(2)
    mine.call.args["new"] = 1
    again: Any = await case.cp.find_completed(call.idempotency_key)
    again.result["lines"].append(3)
    found = await case.cp.find_completed(call.idempotency_key)
    assert found is not None
    assert (found.result, found.call.args) == ({"lines": [1]}, call.args)
