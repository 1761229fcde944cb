"""Optional: dumping a thread, and restoring it exactly."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from conformance.answers import answers
from conformance.case import Case, raises
from conformance.clause import clause
from conformance.clauses.claim import is_utc
from conformance.sample_dumps import CREATED, UPDATED, made_call, made_dump
from conformance.sample_ids import invalid_ids, matching_patterns
from conformance.sample_values import JSON_VALUES, exactly
from cpkit import (
    CallRecord,
    ErasesThreads,
    InvalidId,
    KeepsReceipts,
    KeyTaken,
    ListsThreads,
    MovesThreads,
    SerializationError,
    ThreadDump,
    VersionConflict,
)


def _parts(dump: ThreadDump | None) -> list[Any]:
    """Return a dump as lists, to be compared by `exactly`; extra has no order."""
    if dump is None:
        return []

    return [
        dump.thread_id,
        list(dump.messages),
        sorted([key, value] for key, value in dump.extra.items()),
        [_call_parts(record) for record in dump.calls],
        [dump.created_at, dump.updated_at],
    ]


def _call_parts(record: CallRecord) -> list[Any]:
    call = record.call
    return [
        [record.thread_id, call.call_id, call.tool_name, call.idempotency_key],
        [dict(call.args), record.result],
        [record.status, record.attempt, record.erased],
        [record.issued_at, record.resolved_at],
    ]


async def _moved(case: Case, dump: ThreadDump) -> tuple[list[Any], list[Any]]:
    """Restore a dump, and return it and a new dump of the thread, for comparison."""
    await case.cp.restore_thread(dump)
    return _parts(dump), _parts(await case.cp.dump_thread(dump.thread_id))


@clause("move.missing-is-none", MovesThreads)
async def missing_returns_none(case: Case) -> None:
    """A dump of a missing thread is None, records nothing, and takes no pattern."""
    thread = case.id()
    assert await case.cp.dump_thread(thread) is None
    assert await case.cp.load(thread) is None
    threads, patterns = matching_patterns(case.id("t"))

    for thread in threads:
        await case.cp.append(thread, [{"id": thread}])

    for pattern in patterns:
        seen = await case.cp.dump_thread(pattern)
        assert seen is None, f"dump_thread of {pattern!r}"


@clause("move.dumps-everything", MovesThreads)
async def dumps_everything(case: Case) -> None:
    """A dump has the messages, the extra, and every call in the order of claims."""
    thread, key = case.id(), case.id("key")
    failed, done, issued = case.call(key), case.call(), case.call(key, args={"a": [1]})
    await case.cp.append(thread, [{"n": 1}, {"n": 2}], extra={"a": 1})
    await case.cp.record_issued(thread, failed)
    await case.cp.record_issued(thread, done)
    first = await case.cp.record_result(thread, failed.call_id, "no", success=False)
    await case.cp.record_issued(thread, issued)
    second = await case.cp.record_result(thread, done.call_id, {"receipt": 1})
    loaded = await case.cp.load(thread)
    dump = await case.cp.dump_thread(thread)
    assert loaded is not None
    assert dump is not None
    assert dump.thread_id == thread
    assert list(dump.messages) == [{"n": 1}, {"n": 2}]
    assert dump.extra == {"a": 1}
    assert list(dump.calls) == [first, second, *loaded.pending]
    assert is_utc(dump.created_at)
    assert is_utc(dump.updated_at)


@clause("move.round-trip", MovesThreads, ErasesThreads)
async def round_trip(case: Case) -> None:
    """A thread that is dumped, forgotten and restored gives every answer as before."""
    thread, key = case.id(), case.id("key")
    failed, done, issued = case.call(key), case.call(), case.call(key)
    await case.cp.append(thread, [{"n": 1}, {"n": 2}], extra={"a": 1})
    await case.cp.record_issued(thread, failed)
    await case.cp.record_result(thread, failed.call_id, "no", success=False)
    await case.cp.record_issued(thread, issued)
    await case.cp.record_issued(thread, done)
    await case.cp.record_result(thread, done.call_id, {"receipt": 1})
    keys = [key, done.idempotency_key]
    before = await answers(case.cp, thread, keys)
    dump = await case.cp.dump_thread(thread)
    assert dump is not None
    await case.cp.delete_thread(thread, forget_keys=True)
    expected, seen = await _moved(case, dump)
    after = await answers(case.cp, thread, keys)
    assert exactly(seen, expected)

    for name, answer in before.items():
        assert after[name] == answer, name

    version = await case.cp.append(thread, [{"n": 3}], expected_version=2)
    assert version == 3


@clause("move.keeps-values", MovesThreads)
async def keeps_values(case: Case) -> None:
    """A restored thread has every value unchanged, key order and float bits too."""
    thread = case.id()
    values = JSON_VALUES
    calls = [
        made_call(thread, "completed", args={"value": value}, result=value)
        for value in values.values()
    ]
    messages = [{"z": name, "a": value} for name, value in values.items()]
    dump = made_dump(thread, *calls, messages=messages, extra=values)
    expected, seen = await _moved(case, dump)

    for name, one, other in zip(
        ("thread id", "messages", "extra", "calls", "times"),
        seen,
        expected,
        strict=True,
    ):
        assert exactly(one, other), name


@clause("move.keeps-times", MovesThreads)
async def keeps_times(case: Case) -> None:
    """A restored thread and its calls have the times of the dump to the microsecond."""
    thread = case.id()
    calls = [made_call(thread, "completed"), made_call(thread, "failed", minute=7)]
    dump = made_dump(thread, *calls)
    await case.cp.restore_thread(dump)
    seen = await case.cp.dump_thread(thread)
    assert seen is not None
    assert (seen.created_at, seen.updated_at) == (CREATED, UPDATED)
    assert [(c.issued_at, c.resolved_at) for c in seen.calls] == [
        (c.issued_at, c.resolved_at) for c in calls
    ]
    cp: object = case.cp

    if isinstance(cp, ListsThreads):
        (info,) = await cp.list_threads(prefix=thread)
        assert (info.created_at, info.updated_at) == (CREATED, UPDATED)

    first = datetime(1970, 1, 1, microsecond=1, tzinfo=UTC)
    last = datetime(2254, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)

    for time in (last, last.replace(microsecond=123_457), first):
        thread = case.id()
        call = replace(made_call(thread, "completed"), issued_at=time, resolved_at=time)
        expected, answer = await _moved(
            case, made_dump(thread, call, created_at=time, updated_at=time)
        )
        assert answer == expected, f"{time}"


@clause("move.keeps-attempts", MovesThreads)
async def keeps_attempts(case: Case) -> None:
    """Restored calls have the status and the attempt number of the dump."""
    thread, key = case.id(), case.id("key")
    dump = made_dump(
        thread,
        made_call(thread, "failed", key=key, attempt=3, result="no"),
        made_call(thread, "completed", attempt=7, result="yes"),
        made_call(thread, "failed", key=key, attempt=12),
        made_call(thread, "issued", attempt=2),
        made_call(thread, "failed", attempt=1_000_000_000),
    )
    await case.cp.restore_thread(dump)
    seen = await case.cp.dump_thread(thread)
    assert seen is not None
    assert list(seen.calls) == list(dump.calls)


@clause("move.keeps-order", MovesThreads)
async def keeps_order(case: Case) -> None:
    """Restored calls keep the order of the dump, whatever their times."""
    thread = case.id()
    calls = [made_call(thread, minute=minute) for minute in (5, 1, 9, 1, 0, 3)]
    await case.cp.restore_thread(made_dump(thread, *calls))
    later = case.call()
    await case.cp.record_issued(thread, later)
    loaded = await case.cp.load(thread)
    assert loaded is not None
    expected = [*(record.call for record in calls), later]
    assert [record.call for record in loaded.pending] == expected
    dump = await case.cp.dump_thread(thread)
    assert dump is not None
    assert [record.call for record in dump.calls] == expected
    cp: object = case.cp

    if isinstance(cp, KeepsReceipts):
        listed = await cp.list_calls(thread)
        assert [record.call for record in listed] == expected


@clause("move.keeps-erasure", MovesThreads, ErasesThreads)
async def keeps_erasure(case: Case) -> None:
    """Erased calls come back erased, with and without a thread beside them."""
    for again in (False, True):
        thread = case.id()
        calls = [case.call(), case.call()]

        for call in calls:
            await case.cp.record_issued(thread, call)

        await case.cp.record_result(thread, calls[0].call_id, {"secret": 1})
        await case.cp.delete_thread(thread)

        if again:
            await case.cp.append(thread, [{"n": 1}])
            await case.cp.record_issued(thread, case.call())

        keys = [call.idempotency_key for call in calls]
        before = await answers(case.cp, thread, keys)
        dump = await case.cp.dump_thread(thread)
        assert dump is not None
        assert [record.erased for record in dump.calls][:2] == [True, True]
        assert (dump.created_at is None) == (dump.updated_at is None) == (not again)
        await case.cp.delete_thread(thread, forget_keys=True)
        expected, seen = await _moved(case, dump)
        after = await answers(case.cp, thread, keys)
        assert exactly(seen, expected)
        assert after == before


@clause("move.holds-its-keys", MovesThreads)
async def holds_its_keys(case: Case) -> None:
    """Restored issued and completed calls hold their keys."""
    thread = case.id()
    issued = made_call(thread, "issued")
    done = made_call(thread, "completed", result={"receipt": 1})
    await case.cp.restore_thread(made_dump(thread, issued, done))

    for record in (issued, done):
        holder = await case.cp.record_issued(
            case.id(), case.call(record.call.idempotency_key)
        )
        assert holder == record

    assert await case.cp.find_completed(done.call.idempotency_key) == done
    assert await case.cp.find_completed(issued.call.idempotency_key) is None
    assert await case.cp.record_issued(thread, issued.call) == issued


@clause("move.failed-frees-its-key", MovesThreads)
async def failed_frees_its_key(case: Case) -> None:
    """A restored failed attempt does not hold its key, and attempts count on."""
    thread, other, key = case.id(), case.id(), case.id("key")
    failed = made_call(thread, "failed", key=key, attempt=4)
    await case.cp.restore_thread(made_dump(thread, failed))
    assert await case.cp.record_issued(other, case.call(key)) is None
    loaded = await case.cp.load(other)
    assert loaded is not None
    assert [record.attempt for record in loaded.pending] == [5]


@clause("move.issued-is-resolved", MovesThreads)
async def issued_is_resolved(case: Case) -> None:
    """A restored issued call is pending, and takes a result once."""
    thread = case.id()
    issued = made_call(thread, "issued", attempt=2)
    await case.cp.restore_thread(made_dump(thread, issued))
    loaded = await case.cp.load(thread)
    done = await case.cp.record_result(thread, issued.call.call_id, "paid")
    again = await case.cp.record_result(
        thread, issued.call.call_id, "no", success=False
    )
    found = await case.cp.find_completed(issued.call.idempotency_key)
    assert loaded is not None
    assert loaded.pending == [issued]
    assert (done.status, done.result, done.attempt) == ("completed", "paid", 2)
    assert done == again == found


@clause("move.attempts-in-any-order", MovesThreads)
async def attempts_in_any_order(case: Case) -> None:
    """A key's attempts are restored in any order; the highest number counts."""
    cp = case.cp

    for order in ((1, 2, 3), (3, 2, 1), (2, 3, 1)):
        key = case.id("key")
        holder: CallRecord | None = None

        for attempt in order:
            thread = case.id()
            record = made_call(
                thread, "issued" if attempt == 3 else "failed", key=key, attempt=attempt
            )
            holder = record if attempt == 3 else holder
            await cp.restore_thread(made_dump(thread, record))

        assert holder is not None
        seen = await cp.record_issued(case.id(), case.call(key))
        assert seen == holder, f"restored in the order {order}"

        await cp.record_result(
            holder.thread_id, holder.call.call_id, None, success=False
        )
        fresh = case.id()
        await cp.record_issued(fresh, case.call(key))
        loaded = await cp.load(fresh)
        assert loaded is not None
        assert [one.attempt for one in loaded.pending] == [4]


@clause("move.judges-each-key", MovesThreads)
async def judges_each_key(case: Case) -> None:
    """The attempts of one key elsewhere do not refuse the other keys of a dump."""
    thread, other, key = case.id(), case.id(), case.id("key")
    failed = made_call(other, "failed", key=key, attempt=5)
    await case.cp.restore_thread(made_dump(other, failed))
    calls = [
        made_call(thread, "issued"),
        made_call(thread, "completed", key=key, attempt=6),
        made_call(thread, "failed", attempt=5),
    ]
    await case.cp.restore_thread(made_dump(thread, *calls))
    seen = await case.cp.dump_thread(thread)
    assert seen is not None
    assert list(seen.calls) == calls


@clause("move.comes-back-below", MovesThreads, ErasesThreads)
async def comes_back_below(case: Case) -> None:
    """A forgotten attempt of a key is restored while a newer one holds the key."""
    thread, other, key = case.id(), case.id(), case.id("key")
    first, second = case.call(key), case.call(key)
    await case.cp.append(thread, [{"n": 1}])
    await case.cp.record_issued(thread, first)
    await case.cp.record_result(thread, first.call_id, "no", success=False)
    await case.cp.record_issued(other, second)
    dump = await case.cp.dump_thread(thread)
    assert dump is not None
    await case.cp.delete_thread(thread, forget_keys=True)
    expected, seen = await _moved(case, dump)
    assert exactly(seen, expected)
    holder = await case.cp.record_issued(case.id(), case.call(key))
    assert holder is not None
    assert (holder.call, holder.attempt) == (second, 2)


@clause("move.refuses-an-existing-thread", MovesThreads)
async def refuses_an_existing_thread(case: Case) -> None:
    """A restore over an existing thread raises VersionConflict and changes nothing."""
    with_messages, with_extra, with_call = case.id(), case.id(), case.id()
    await case.cp.append(with_messages, [{"old": 1}])
    await case.cp.save_extra(with_extra, {"old": 1})
    await case.cp.record_issued(with_call, case.call())

    for thread in (with_messages, with_extra, with_call):
        before = await case.cp.dump_thread(thread)
        new = made_call(thread, "completed")

        with raises(VersionConflict) as caught:
            await case.cp.restore_thread(made_dump(thread, new))

        assert caught.error.thread_id == thread
        assert await case.cp.dump_thread(thread) == before
        assert await case.cp.find_completed(new.call.idempotency_key) is None


@clause("move.refuses-erased-calls", MovesThreads, ErasesThreads)
async def refuses_erased_calls(case: Case) -> None:
    """A restore over an id with erased calls raises VersionConflict."""
    thread, call = case.id(), case.call()
    await case.cp.record_issued(thread, call)
    await case.cp.delete_thread(thread)
    before = await case.cp.dump_thread(thread)

    with raises(VersionConflict):
        await case.cp.restore_thread(made_dump(thread))

    assert await case.cp.dump_thread(thread) == before
    assert await case.cp.load(thread) is None


@clause("move.refuses-a-taken-key", MovesThreads)
async def refuses_a_taken_key(case: Case) -> None:
    """A restore of a key that another thread has raises KeyTaken."""
    cases: list[tuple[Any, int, Any, int]] = [
        ("issued", 1, "completed", 1),
        ("completed", 1, "issued", 1),
        ("failed", 1, "failed", 1),
        ("issued", 2, "completed", 1),
        ("issued", 1, "failed", 2),
        ("completed", 1, "issued", 2),
    ]

    for held, number, status, attempt in cases:
        key, other, thread = case.id("key"), case.id(), case.id()
        holder = made_call(other, held, key=key, attempt=number)
        await case.cp.restore_thread(made_dump(other, holder))
        taken = made_call(thread, status, key=key, attempt=attempt)
        what = f"a {status} attempt {attempt} beside a {held} attempt {number}"

        with raises(KeyTaken, what) as caught:
            await case.cp.restore_thread(made_dump(thread, taken))

        error = caught.error
        assert (error.idempotency_key, error.thread_id) == (key, other)


@clause("move.refusal-changes-nothing", MovesThreads)
async def refusal_changes_nothing(case: Case) -> None:
    """After KeyTaken nothing of the dump is restored, and its other keys are free."""
    thread, other = case.id(), case.id()
    call = case.call()
    await case.cp.record_issued(other, call)
    before = await case.cp.dump_thread(other)
    first, last = made_call(thread, "completed"), made_call(thread, "issued")
    taken = made_call(thread, "completed", key=call.idempotency_key)

    with raises(KeyTaken):
        await case.cp.restore_thread(made_dump(thread, first, taken, last))

    assert await case.cp.load(thread) is None
    assert await case.cp.dump_thread(thread) is None
    assert await case.cp.dump_thread(other) == before

    for record in (first, last):
        fresh = case.call(record.call.idempotency_key)
        assert await case.cp.record_issued(case.id(), fresh) is None


@clause("move.refuses-invalid-dumps", MovesThreads)
async def refuses_invalid_dumps(case: Case) -> None:
    """A dump that no store could have made is an error, and so is an invalid id."""
    thread = case.id()
    call = made_call(thread)
    key = call.call.idempotency_key
    # ``Any``, because their fields get values of wrong types.
    failed: Any = made_call(thread, "failed")
    erased: Any = replace(made_call(thread, "completed", args={}), erased=True)
    good: Any = made_dump(thread, call)
    wrong: dict[str, Any] = {
        "a dict": {"thread_id": thread},
        "None": None,
        "messages that are a str": replace(good, messages="ab"),
        "messages that are None": replace(good, messages=None),
        "extra that is a list": replace(good, extra=[("a", 1)]),
        "a call that is a dict": replace(good, calls=[{}]),
        "a call id that stands twice": made_dump(
            thread, call, replace(call, call=replace(call.call, idempotency_key="k"))
        ),
        "an attempt that stands twice": made_dump(
            thread, call, made_call(thread, "failed", key=key)
        ),
        "two holders of a key": made_dump(
            thread, call, made_call(thread, "completed", key=key, attempt=2)
        ),
        "a newer attempt beside a holder": made_dump(
            thread, call, made_call(thread, "failed", key=key, attempt=2)
        ),
        "a call of another thread": made_dump(thread, made_call(case.id())),
        "attempt 0": made_dump(thread, replace(call, attempt=0)),
        "attempt 2**31": made_dump(thread, replace(call, attempt=2**31)),
        "attempt True": made_dump(thread, replace(call, attempt=True)),
        "an unknown status": made_dump(thread, replace(failed, status="done")),
        "a failed call without a time": made_dump(
            thread, replace(failed, resolved_at=None)
        ),
        "an issued call with a time": made_dump(
            thread, replace(call, resolved_at=CREATED)
        ),
        "an issued call with a result": made_dump(thread, replace(call, result="ok")),
        "an erased call with a result": made_dump(
            thread, replace(erased, result={"paid": 1})
        ),
        "an erased call with args": made_dump(
            thread, replace(erased, call=failed.call)
        ),
        "an erased call with args, without times": made_dump(
            thread,
            replace(erased, call=failed.call),
            messages=[],
            extra={},
            created_at=None,
            updated_at=None,
        ),
        "a time without a zone": replace(good, created_at=datetime(2020, 1, 1)),
        "a call's time without a zone": made_dump(
            thread, replace(call, issued_at=datetime(2020, 1, 1))
        ),
        "a time before 1970": replace(
            good, created_at=datetime(1969, 12, 31, tzinfo=UTC)
        ),
        "a time after 2255": replace(good, updated_at=datetime.max.replace(tzinfo=UTC)),
        "a call's time at the epoch": made_dump(
            thread, replace(call, issued_at=datetime(1970, 1, 1, tzinfo=UTC))
        ),
        "one time only": replace(good, updated_at=None),
        "calls that can be read once": replace(good, calls=iter(())),
        "messages in a mapping": replace(good, messages={}),
        "messages without times": replace(good, created_at=None, updated_at=None),
        "times and nothing else": made_dump(thread, messages=[], extra={}),
        "created after its last change": replace(
            good, created_at=UPDATED, updated_at=CREATED
        ),
    }

    for name, dump in wrong.items():
        with raises((ValueError, TypeError), name):
            await case.cp.restore_thread(dump)

    with raises(SerializationError, "a message that is not JSON"):
        await case.cp.restore_thread(replace(good, messages=[{"n": {1}}]))

    for name, value in invalid_ids().items():
        with raises(InvalidId, f"a dump of {name}"):
            await case.cp.dump_thread(value)

        with raises(InvalidId, f"a restore of {name}"):
            await case.cp.restore_thread(made_dump(value))

    assert await case.cp.load(thread) is None
    assert await case.cp.record_issued(thread, call.call) is None, "the key is free"


@clause("move.copies", MovesThreads)
async def copies(case: Case) -> None:
    """A dump and its thread are separate: changing one does not change the other."""
    thread = case.id()
    given: Any = made_dump(thread, made_call(thread, args={"to": ["x"]}))
    expected = _parts(given)
    await case.cp.restore_thread(given)
    mine = await case.cp.dump_thread(thread)
    await case.cp.append(thread, [{"n": 3}], extra={"b": 1})
    assert _parts(given) == _parts(mine) == expected

    other = case.id()
    given = made_dump(other, made_call(other, args={"to": ["x"]}))
    expected = _parts(made_dump(other, *given.calls))
    await case.cp.restore_thread(given)
    given.messages.append({"n": 3})
    given.messages[0]["n"] = 0
    given.extra["b"] = 1
    assert _parts(await case.cp.dump_thread(other)) == expected
