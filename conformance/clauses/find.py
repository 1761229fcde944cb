"""Finding the completed call of a key, from any thread."""

from __future__ import annotations

from conformance.case import Case
from conformance.clause import clause


@clause("find.unknown-is-none")
async def unknown_returns_none(case: Case) -> None:
    """A key that was never claimed has no completed record."""
    found = await case.cp.find_completed(case.id("key"))
    assert found is None


@clause("find.issued-is-none")
async def issued_returns_none(case: Case) -> None:
    """A key whose call is issued but not resolved has no completed record."""
    call = case.call()
    await case.cp.record_issued(case.id(), call)
    found = await case.cp.find_completed(call.idempotency_key)
    assert found is None


@clause("find.failed-is-none")
async def failed_returns_none(case: Case) -> None:
    """A key whose call failed has no completed record."""
    thread, call = case.id(), case.call()
    await case.cp.record_issued(thread, call)
    await case.cp.record_result(thread, call.call_id, "no", success=False)
    found = await case.cp.find_completed(call.idempotency_key)
    assert found is None


@clause("find.completed-from-any-thread")
async def completed_from_any_thread(case: Case) -> None:
    """The completed record of a key is found by the key only, among other keys."""
    done = []

    for n in range(5):
        thread, call = case.id(), case.call(args={"n": n})
        await case.cp.record_issued(thread, call)
        done.append(await case.cp.record_result(thread, call.call_id, {"n": n}))

    for record in done:
        found = await case.cp.find_completed(record.call.idempotency_key)
        assert found == record


@clause("find.completed-after-failures")
async def completed_after_failures(case: Case) -> None:
    """After failed attempts the completed attempt is found."""
    key = case.id("key")

    for _ in range(2):
        thread, call = case.id(), case.call(key)
        await case.cp.record_issued(thread, call)
        await case.cp.record_result(thread, call.call_id, "no", success=False)

    thread, call = case.id(), case.call(key)
    await case.cp.record_issued(thread, call)
    assert await case.cp.find_completed(key) is None
    done = await case.cp.record_result(thread, call.call_id, "yes")
    found = await case.cp.find_completed(key)
    assert found == done
    assert done.attempt == 3
