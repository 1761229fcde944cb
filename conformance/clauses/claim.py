"""Claims: at most one issued or completed call holds a key."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from conformance.case import Case, raises
from conformance.clause import clause
from cpkit import CallRecord, SerializationError, ToolCall

SKEW = timedelta(minutes=10)
"""How far the clock of a server may be from this machine's."""


def is_utc(time: datetime | None) -> bool:
    """Return whether a time is set, timezone-aware, in UTC, and of this run."""
    if time is None or time.utcoffset() != timedelta(0):
        return False

    return abs(datetime.now(UTC) - time) < SKEW


async def _pending(case: Case, thread: str) -> list[CallRecord]:
    loaded = await case.cp.load(thread)
    return [] if loaded is None else loaded.pending


@clause("claim.fresh-is-none")
async def fresh_returns_none(case: Case) -> None:
    """A claim of a free key returns None: the call is stored and holds the key."""
    seen = await case.cp.record_issued(case.id(), case.call())
    assert seen is None


@clause("claim.is-pending")
async def is_pending(case: Case) -> None:
    """A claimed call is pending as attempt 1, with the call exactly as given."""
    thread = case.id()
    call = case.call(args={"to": "x", "lines": [1, 2.5, None], "deep": {"é": True}})
    await case.cp.record_issued(thread, call)
    pending = await _pending(case, thread)
    assert len(pending) == 1
    record = pending[0]
    assert record.thread_id == thread
    assert record.call == call
    assert (record.status, record.attempt) == ("issued", 1)
    assert (record.result, record.resolved_at, record.erased) == (None, None, False)


@clause("claim.time-is-utc")
async def time_is_utc(case: Case) -> None:
    """The times of a call are in UTC, and of now; issued_at is before resolved_at."""
    thread, call = case.id(), case.call()
    await case.cp.record_issued(thread, call)
    pending = await _pending(case, thread)
    done = await case.cp.record_result(thread, call.call_id, 1)
    assert is_utc(pending[0].issued_at)
    assert is_utc(done.issued_at)
    assert is_utc(done.resolved_at)
    assert done.issued_at == pending[0].issued_at
    assert done.resolved_at is not None
    assert done.resolved_at >= done.issued_at


@clause("claim.taken-returns-holder")
async def taken_returns_holder(case: Case) -> None:
    """A claim of a held key returns the record of its holder and writes nothing."""
    thread, key = case.id(), case.id("key")
    first = case.call(key)
    await case.cp.record_issued(thread, first)
    before = await case.cp.load(thread)
    holder = await case.cp.record_issued(thread, case.call(key))
    after = await case.cp.load(thread)
    assert holder is not None
    assert holder.call == first
    assert (holder.status, holder.attempt) == ("issued", 1)
    assert after == before


@clause("claim.key-is-held-across-threads")
async def key_is_held_across_threads(case: Case) -> None:
    """A key is held across all threads; a claim in another thread writes nothing."""
    one, other, key = case.id(), case.id(), case.id("key")
    first = case.call(key)
    await case.cp.record_issued(one, first)
    holder = await case.cp.record_issued(other, case.call(key))
    assert holder is not None
    assert (holder.thread_id, holder.call) == (one, first)
    assert await case.cp.load(other) is None


@clause("claim.key-is-held-by-key-alone")
async def key_is_held_by_key_alone(case: Case) -> None:
    """A claim with another call id, tool or args still gets the key's holder."""
    thread, key = case.id(), case.id("key")
    first = case.call(key, tool="pay", args={"amount": 1})
    await case.cp.record_issued(thread, first)
    holder = await case.cp.record_issued(
        thread, case.call(key, tool="refund", args={"amount": 2})
    )
    assert holder is not None
    assert holder.call == first


@clause("claim.completed-holds")
async def completed_holds(case: Case) -> None:
    """A completed call holds its key forever, in every thread."""
    thread, key = case.id(), case.id("key")
    first = case.call(key)
    await case.cp.record_issued(thread, first)
    done = await case.cp.record_result(thread, first.call_id, {"paid": True})

    for where in (thread, case.id()):
        holder = await case.cp.record_issued(where, case.call(key))
        assert holder == done

    assert await _pending(case, thread) == []


@clause("claim.failed-frees-key")
async def failed_frees_key(case: Case) -> None:
    """A failed call frees its key: the next claim succeeds, in any thread."""
    thread, other, key = case.id(), case.id(), case.id("key")
    first, second = case.call(key), case.call(key)
    await case.cp.record_issued(thread, first)
    await case.cp.record_result(thread, first.call_id, "no", success=False)
    seen = await case.cp.record_issued(other, second)
    assert seen is None
    holder = await case.cp.record_issued(thread, case.call(key))
    assert holder is not None
    assert (holder.thread_id, holder.call) == (other, second)


@clause("claim.attempts-count-up")
async def attempts_count_up(case: Case) -> None:
    """Each new claim of a key has an attempt one higher, in any thread."""
    threads, key = [case.id(), case.id()], case.id("key")

    for attempt in range(1, 13):  # compared as texts, 10 would be before 2
        thread, call = threads[attempt % 2], case.call(key)
        assert await case.cp.record_issued(thread, call) is None
        pending = await _pending(case, thread)
        assert [record.attempt for record in pending] == [attempt]
        failed = await case.cp.record_result(thread, call.call_id, None, success=False)
        assert failed.attempt == attempt


@clause("claim.attempts-count-per-key")
async def attempts_count_per_key(case: Case) -> None:
    """The attempts of one key do not count for another key."""
    thread, call = case.id(), case.call()
    await case.cp.record_issued(thread, call)
    await case.cp.record_result(thread, call.call_id, None, success=False)
    await case.cp.record_issued(thread, case.call())
    pending = await _pending(case, thread)
    assert [record.attempt for record in pending] == [1]


@clause("claim.own-call-again")
async def own_call_again(case: Case) -> None:
    """Claiming the same call again returns its record and changes nothing."""
    thread, call = case.id(), case.call()
    await case.cp.record_issued(thread, call)
    before = await case.cp.load(thread)
    issued = await case.cp.record_issued(thread, call)
    assert issued is not None
    assert (issued.call, issued.status) == (call, "issued")
    assert await case.cp.load(thread) == before

    done = await case.cp.record_result(thread, call.call_id, 7)
    completed = await case.cp.record_issued(thread, call)
    assert completed == done


@clause("claim.call-id-is-used-once")
async def call_id_is_used_once(case: Case) -> None:
    """Claiming a failed call again returns its failed record and claims nothing."""
    thread, call = case.id(), case.call()
    await case.cp.record_issued(thread, call)
    failed = await case.cp.record_result(thread, call.call_id, "no", success=False)
    again = await case.cp.record_issued(thread, call)
    assert again == failed
    assert await _pending(case, thread) == []

    second = case.call(call.idempotency_key)
    await case.cp.record_issued(thread, second)
    superseded = await case.cp.record_issued(thread, call)
    assert superseded == failed


@clause("claim.call-id-is-per-thread")
async def call_id_is_per_thread(case: Case) -> None:
    """The same call id in another thread is another call."""
    one, other = case.id(), case.id()
    first = case.call()
    second = case.call(call_id=first.call_id, args={"amount": 99})
    assert await case.cp.record_issued(one, first) is None
    assert await case.cp.record_issued(other, second) is None
    done = await case.cp.record_result(other, first.call_id, "second")
    assert done.call == second
    pending = await _pending(case, one)
    assert [record.call for record in pending] == [first]


@clause("claim.pending-in-order")
async def pending_in_order(case: Case) -> None:
    """Pending calls are in the order of claims, without resolved calls."""
    thread = case.id()
    calls = [case.call() for _ in range(30)]

    for call in calls:
        await case.cp.record_issued(thread, call)

    for call in calls[1::3]:
        await case.cp.record_result(thread, call.call_id, 1)

    for call in calls[2::3]:
        await case.cp.record_result(thread, call.call_id, 1, success=False)

    pending = await _pending(case, thread)
    assert [record.call for record in pending] == calls[::3]


@clause("claim.copies-its-input")
async def copies_its_input(case: Case) -> None:
    """Changing the args after the claim does not change the stored args."""
    thread = case.id()
    args: dict[str, Any] = {"to": {"names": ["x"]}}
    call = case.call(args=args)
    await case.cp.record_issued(thread, call)
    args["to"]["names"].append("y")
    args["new"] = 1
    pending = await _pending(case, thread)
    assert pending[0].call.args == {"to": {"names": ["x"]}}


@clause("claim.record-is-the-callers")
async def record_is_the_callers(case: Case) -> None:
    """Changing a record that a claim returned does not change the stored one."""
    thread, call = case.id(), case.call(args={"to": {"name": "x"}})
    await case.cp.record_issued(thread, call)
    mine: Any = await case.cp.record_issued(thread, call)
    mine.call.args["to"]["name"] = "y"
    pending = await _pending(case, thread)
    assert pending[0].call.args == {"to": {"name": "x"}}


@clause("claim.leaves-the-rest")
async def leaves_the_rest(case: Case) -> None:
    """A claim and its result change neither messages nor extra."""
    thread, call = case.id(), case.call()
    await case.cp.append(thread, [{"n": 1}])
    await case.cp.save_extra(thread, {"a": 1})
    before = await case.cp.load(thread)
    await case.cp.record_issued(thread, call)
    await case.cp.record_result(thread, call.call_id, "done")
    after = await case.cp.load(thread)
    assert after == before


@clause("claim.takes-a-call-only")
async def takes_a_call_only(case: Case) -> None:
    """A call that is not a ToolCall is a TypeError; non-object args are refused."""
    thread = case.id()
    wrong: Any = {"call_id": "a", "tool_name": "b", "args": {}, "idempotency_key": "c"}

    with raises(TypeError, "a dict"):
        await case.cp.record_issued(thread, wrong)

    args: Any

    for args in ([1], "x", None, 1):
        call = ToolCall(case.id("call"), "pay", args, case.id("key"))

        with raises(SerializationError, f"args {args!r}"):
            await case.cp.record_issued(thread, call)

    assert await case.cp.load(thread) is None
