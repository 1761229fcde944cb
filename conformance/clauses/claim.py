"""Claims: at most one issued or completed call holds a key."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from conformance.case import Case, raises
from conformance.clause import clause
from cpkit import CallMismatch, CallRecord, JsonValue, SerializationError, ToolCall


def is_utc(time: datetime | None) -> bool:
    """Tell whether a time is there, timezone-aware and UTC."""
    return time is not None and time.utcoffset() == timedelta(0)


async def _pending(case: Case, thread: str) -> list[CallRecord]:
    loaded = await case.cp.load(thread)
    return [] if loaded is None else loaded.pending


@clause("claim.fresh-is-none")
async def fresh_is_none(case: Case) -> None:
    """A claim of a free key returns None: the call is on record and holds the key."""
    seen = await case.cp.record_issued(case.id(), case.call())
    assert seen is None


@clause("claim.is-pending")
async def is_pending(case: Case) -> None:
    """A claimed call is pending, exactly as it was given, as attempt 1."""
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
    """The times of a call are timezone-aware UTC, its issue before its resolution."""
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
    """A claim of a key that is held returns its holder and writes nothing."""
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
    """A key is held in the whole store; a claim in another thread writes nothing."""
    one, other, key = case.id(), case.id(), case.id("key")
    first = case.call(key)
    await case.cp.record_issued(one, first)
    holder = await case.cp.record_issued(other, case.call(key))
    assert holder is not None
    assert (holder.thread_id, holder.call) == (one, first)
    assert await case.cp.load(other) is None


@clause("claim.key-is-held-by-key-alone")
async def key_is_held_by_key_alone(case: Case) -> None:
    """Another call id with the key gets the holder, whatever its tool and args are."""
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
    """A completed call holds its key for ever, in every thread."""
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
    """Each new claim of a key has an attempt one higher, in whatever thread."""
    threads, key = [case.id(), case.id()], case.id("key")

    for attempt in range(1, 6):
        thread, call = threads[attempt % 2], case.call(key)
        assert await case.cp.record_issued(thread, call) is None
        pending = await _pending(case, thread)
        assert [record.attempt for record in pending] == [attempt]
        failed = await case.cp.record_result(thread, call.call_id, None, success=False)
        assert failed.attempt == attempt


@clause("claim.attempts-count-per-key")
async def attempts_count_per_key(case: Case) -> None:
    """Attempts of one key do not count for another."""
    thread, call = case.id(), case.call()
    await case.cp.record_issued(thread, call)
    await case.cp.record_result(thread, call.call_id, None, success=False)
    await case.cp.record_issued(thread, case.call())
    pending = await _pending(case, thread)
    assert [record.attempt for record in pending] == [1]


@clause("claim.own-call-again")
async def own_call_again(case: Case) -> None:
    """The same call again returns its record, issued or completed; nothing changes."""
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
    """The same call again after it failed returns the failed record, never a claim."""
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


async def _differs(case: Case, call: ToolCall, other: ToolCall, field: str) -> None:
    thread = case.id()
    await case.cp.record_issued(thread, call)

    for status in ("issued", "failed"):
        before = await case.cp.load(thread)

        with raises(CallMismatch, f"another {field} on a call that is {status}"):
            await case.cp.record_issued(thread, other)

        after = await case.cp.load(thread)
        assert after == before
        await case.cp.record_result(thread, call.call_id, 0, success=False)


@clause("claim.mismatch-of-key")
async def mismatch_of_key(case: Case) -> None:
    """A call id on record with another key raises CallMismatch and claims nothing."""
    call = case.call()
    other = case.call(call_id=call.call_id)
    await _differs(case, call, other, "key")
    seen = await case.cp.record_issued(case.id(), case.call(other.idempotency_key))
    assert seen is None, "the key of the refused call is free"


@clause("claim.mismatch-of-tool")
async def mismatch_of_tool(case: Case) -> None:
    """A call id on record with another tool raises CallMismatch."""
    call = case.call(tool="pay")
    other = case.call(call.idempotency_key, call_id=call.call_id, tool="Pay")
    await _differs(case, call, other, "tool")


@clause("claim.mismatch-of-args")
async def mismatch_of_args(case: Case) -> None:
    """A call id on record with other args raises CallMismatch."""
    pairs: list[tuple[dict[str, JsonValue], dict[str, JsonValue]]] = [
        ({"n": 1}, {"n": 2}),
        ({"n": 1}, {"n": True}),
        ({"n": 0}, {"n": False}),
        ({"n": 1}, {"n": "1"}),
        ({"n": None}, {}),
        ({"n": [1, 2]}, {"n": [2, 1]}),
        ({"n": []}, {"n": {}}),
        ({"n": 2**53}, {"n": 2**53 + 1}),
        ({"n": "é"}, {"n": "e\u0301"}),
        ({"n": {"a": {"b": 1}}}, {"n": {"a": {"b": 2}}}),
    ]

    for args, others in pairs:
        call = case.call(args=args)
        other = ToolCall(call.call_id, call.tool_name, others, call.idempotency_key)
        await _differs(case, call, other, f"args ({others} for {args})")


@clause("claim.mismatch-tells-the-facts")
async def mismatch_tells_the_facts(case: Case) -> None:
    """A mismatch names the thread and the call."""
    thread, call = case.id(), case.call()
    await case.cp.record_issued(thread, call)

    with raises(CallMismatch) as caught:
        await case.cp.record_issued(thread, case.call(call_id=call.call_id))

    assert (caught.error.thread_id, caught.error.call_id) == (thread, call.call_id)


@clause("claim.same-args-by-canonical-json")
async def same_args_by_canonical_json(case: Case) -> None:
    """Args are the same when their canonical JSON is: 1 and 1.0, keys in any order."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"n": 1}, {"n": 1.0}),
        ({"n": 0}, {"n": -0.0}),
        ({"n": 10**20}, {"n": 1e20}),
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3.0, "c": 2}, "a": 1}),
        ({"n": [1, 2]}, {"n": (1, 2)}),
    ]

    for args, same in pairs:
        thread, call = case.id(), case.call(args=args)
        await case.cp.record_issued(thread, call)
        again = ToolCall(call.call_id, call.tool_name, same, call.idempotency_key)
        seen = await case.cp.record_issued(thread, again)
        assert seen is not None, f"{same} is the same as {args}"


@clause("claim.pending-in-order")
async def pending_in_order(case: Case) -> None:
    """Pending calls stand in the order of claims, without those that are resolved."""
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
    """Changing the args after the claim changes nothing stored."""
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
    """Changing a record that a claim returned changes nothing stored."""
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
    """What is no ToolCall is a TypeError; args that are no object are refused."""
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
