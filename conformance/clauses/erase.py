"""Optional: deleting a thread; its calls keep their keys."""

from __future__ import annotations

from dataclasses import replace

from conformance.case import Case, raises
from conformance.clause import clause
from conformance.clauses.claim import is_utc
from conformance.sample_ids import matching_patterns, similar_ids
from cpkit import (
    CallMismatch,
    CallRecord,
    ErasesThreads,
    KeepsReceipts,
    ListsThreads,
    ReadsRanges,
    ToolCall,
    UnknownCall,
)


async def _filled(case: Case, call: ToolCall | None = None) -> tuple[str, ToolCall]:
    """Return a thread with a message, extra and an issued call."""
    thread, call = case.id(), call or case.call(args={"card": "4242"})
    await case.cp.append(thread, [{"n": 1}, {"n": 2}])
    await case.cp.save_extra(thread, {"k": 1})
    assert await case.cp.record_issued(thread, call) is None
    return thread, call


def _erased(record: CallRecord) -> CallRecord:
    """Return the record as it must be after a deletion."""
    bare = replace(record.call, args={})
    return replace(record, call=bare, result=None, erased=True)


@clause("erase.thread-is-gone", ErasesThreads)
async def thread_is_gone(case: Case) -> None:
    """After a deletion load returns None."""
    thread, _ = await _filled(case)
    await case.cp.delete_thread(thread)
    assert await case.cp.load(thread) is None


@clause("erase.starts-again-at-0", ErasesThreads)
async def starts_again_at_0(case: Case) -> None:
    """After a deletion the id starts at version 0, without old extra and pending."""
    thread, _ = await _filled(case)
    await case.cp.delete_thread(thread)
    version = await case.cp.append(thread, [{"n": 9}], expected_version=0)
    loaded = await case.cp.load(thread)
    assert version == 1
    assert loaded is not None
    assert (loaded.messages, loaded.extra, loaded.pending) == ([{"n": 9}], {}, [])


@clause("erase.missing-is-no-error", ErasesThreads)
async def missing_does_nothing(case: Case) -> None:
    """Deleting a missing thread, or deleting a thread twice, does nothing."""
    thread, _ = await _filled(case)
    never = case.id()
    await case.cp.delete_thread(never)
    await case.cp.delete_thread(never, forget_keys=True)
    await case.cp.delete_thread(thread)
    await case.cp.delete_thread(thread)
    assert await case.cp.load(never) is None
    assert await case.cp.load(thread) is None


@clause("erase.leaves-the-neighbours", ErasesThreads)
async def leaves_the_neighbours(case: Case) -> None:
    """A deletion changes no other thread, however similar its id is."""
    token = case.id("t")
    threads = similar_ids(token)

    for n, thread in enumerate(threads):
        await case.cp.append(thread, [{"n": n}])
        await case.cp.save_extra(thread, {"n": n})
        await case.cp.record_issued(thread, case.call(call_id="c"))

    gone = threads[::5]
    before = {t: await case.cp.load(t) for t in threads if t not in gone}

    for n, thread in enumerate(gone):
        await case.cp.delete_thread(thread, forget_keys=n % 2 == 1)

    for thread, loaded in before.items():
        assert await case.cp.load(thread) == loaded, f"thread {thread!r:.120}"


@clause("erase.id-is-not-a-pattern", ErasesThreads)
async def id_is_not_a_pattern(case: Case) -> None:
    """Deleting an id with wildcards deletes no other thread and frees no other key."""
    threads, patterns = matching_patterns(case.id("t"))
    calls = [case.call() for _ in threads]

    for thread, call in zip(threads, calls, strict=True):
        await case.cp.append(thread, [{"id": thread}])
        await case.cp.record_issued(thread, call)

    before = [await case.cp.load(thread) for thread in threads]

    for forget_keys in (False, True):
        for pattern in patterns:
            await case.cp.delete_thread(pattern, forget_keys=forget_keys)

        after = [await case.cp.load(thread) for thread in threads]
        assert after == before, f"forget_keys={forget_keys}"

    for call in calls:
        holder = await case.cp.record_issued(case.id(), case.call(call.idempotency_key))
        assert holder is not None
        assert holder.call == call


@clause("erase.completed-stays-paid", ErasesThreads)
async def completed_stays_paid(case: Case) -> None:
    """A completed call keeps its key, as an erased record without args and result."""
    thread, call = await _filled(case)
    done = await case.cp.record_result(thread, call.call_id, {"receipt": 1})
    await case.cp.delete_thread(thread)
    found = await case.cp.find_completed(call.idempotency_key)
    holder = await case.cp.record_issued(case.id(), case.call(call.idempotency_key))
    assert found == holder == _erased(done)


@clause("erase.issued-stays-issued", ErasesThreads)
async def issued_stays_issued(case: Case) -> None:
    """After a deletion an issued call keeps its key and is not pending."""
    thread, call = await _filled(case)
    await case.cp.delete_thread(thread)
    holder = await case.cp.record_issued(thread, case.call(call.idempotency_key))
    assert holder is not None
    assert (holder.status, holder.erased) == ("issued", True)
    assert (holder.call.call_id, holder.call.args) == (call.call_id, {})
    assert await case.cp.find_completed(call.idempotency_key) is None
    assert await case.cp.load(thread) is None


@clause("erase.failed-stays-free", ErasesThreads)
async def failed_stays_free(case: Case) -> None:
    """After a deletion a failed call still holds no key, and attempts count on."""
    thread, call = await _filled(case)
    await case.cp.record_result(thread, call.call_id, "no", success=False)
    await case.cp.delete_thread(thread)
    other, second = case.id(), case.call(call.idempotency_key)
    assert await case.cp.record_issued(other, second) is None
    loaded = await case.cp.load(other)
    assert loaded is not None
    assert [record.attempt for record in loaded.pending] == [2]


@clause("erase.own-call-again", ErasesThreads)
async def own_call_again(case: Case) -> None:
    """A call id on an erased record is compared by key and tool only."""
    thread, call = await _filled(case)
    await case.cp.delete_thread(thread)
    again = await case.cp.record_issued(thread, replace(call, args={"other": 1}))
    assert again is not None
    assert again.erased
    assert await case.cp.load(thread) is None

    with raises(CallMismatch, "another tool"):
        await case.cp.record_issued(thread, replace(call, tool_name="refund"))

    with raises(CallMismatch, "another key"):
        await case.cp.record_issued(
            thread, replace(call, idempotency_key=case.id("key"))
        )


@clause("erase.late-result", ErasesThreads)
async def late_result(case: Case) -> None:
    """A late result of an erased call sets its status once and drops the content."""
    thread, call = await _filled(case)
    loaded = await case.cp.load(thread)
    assert loaded is not None
    (issued,) = loaded.pending
    await case.cp.delete_thread(thread)
    done = await case.cp.record_result(thread, call.call_id, {"secret": 1})
    again = await case.cp.record_result(thread, call.call_id, 2, success=False)
    found = await case.cp.find_completed(call.idempotency_key)
    assert (done.status, done.result, done.erased) == ("completed", None, True)
    assert is_utc(done.resolved_at)
    resolved = replace(issued, status="completed", resolved_at=done.resolved_at)
    assert again == found == done == _erased(resolved)
    assert await case.cp.load(thread) is None, "a late result creates no thread"


@clause("erase.late-failure-frees", ErasesThreads)
async def late_failure_frees(case: Case) -> None:
    """A late failure of an erased record frees its key."""
    thread, call = await _filled(case)
    await case.cp.delete_thread(thread)
    await case.cp.record_result(thread, call.call_id, "no", success=False)
    claimed = await case.cp.record_issued(thread, case.call(call.idempotency_key))
    loaded = await case.cp.load(thread)
    assert claimed is None
    assert loaded is not None
    assert [record.attempt for record in loaded.pending] == [2]


@clause("erase.forget-frees-keys", ErasesThreads)
async def forget_frees_keys(case: Case) -> None:
    """With forget_keys the records are deleted: keys are free, attempts start at 1."""
    thread, call = await _filled(case)
    await case.cp.record_result(thread, call.call_id, 1)
    await case.cp.delete_thread(thread, forget_keys=True)
    assert await case.cp.find_completed(call.idempotency_key) is None

    with raises(UnknownCall):
        await case.cp.record_result(thread, call.call_id, 1)

    assert await case.cp.record_issued(thread, call) is None, "the call id is free"
    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert [record.attempt for record in loaded.pending] == [1]


@clause("erase.forget-after-delete", ErasesThreads)
async def forget_after_delete(case: Case) -> None:
    """forget_keys also deletes the records that an earlier deletion kept."""
    thread, call = await _filled(case)
    await case.cp.delete_thread(thread)
    await case.cp.delete_thread(thread, forget_keys=True)
    assert await case.cp.record_issued(thread, call) is None


@clause("erase.forget-is-of-one-thread", ErasesThreads)
async def forget_is_of_one_thread(case: Case) -> None:
    """forget_keys keeps the records that other threads have of the same keys."""
    thread, call = await _filled(case)
    await case.cp.record_result(thread, call.call_id, "no", success=False)
    other, second = case.id(), case.call(call.idempotency_key)
    await case.cp.record_issued(other, second)
    await case.cp.delete_thread(thread, forget_keys=True)
    holder = await case.cp.record_issued(thread, case.call(call.idempotency_key))
    assert holder is not None
    assert (holder.thread_id, holder.call, holder.attempt) == (other, second, 2)
    await case.cp.record_result(other, second.call_id, "no", success=False)
    third = case.call(call.idempotency_key)
    assert await case.cp.record_issued(thread, third) is None
    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert [record.attempt for record in loaded.pending] == [3]


@clause("erase.not-listed", ErasesThreads, ListsThreads)
async def not_listed(case: Case) -> None:
    """A deleted thread is not listed, even with erased calls or a late result."""
    thread, call = await _filled(case)
    await case.cp.delete_thread(thread)
    assert await case.cp.list_threads(prefix=thread) == []
    await case.cp.record_result(thread, call.call_id, 1)
    assert await case.cp.list_threads(prefix=thread) == []
    await case.cp.append(thread, [{"n": 1}])
    listed = await case.cp.list_threads(prefix=thread)
    assert [(info.thread_id, info.version) for info in listed] == [(thread, 1)]


@clause("erase.reads-nothing", ErasesThreads, ReadsRanges)
async def reads_nothing(case: Case) -> None:
    """read and load_range return nothing of a deleted thread."""
    thread, _ = await _filled(case)
    assert await case.cp.load_range(thread) is not None
    await case.cp.delete_thread(thread)
    assert await case.cp.read(thread) == []
    assert await case.cp.load_range(thread) is None
    await case.cp.append(thread, [{"n": 3}])
    assert await case.cp.read(thread) == [{"n": 3}]
    assert await case.cp.load_range(thread) == await case.cp.load(thread)


@clause("erase.receipts-stay", ErasesThreads, KeepsReceipts)
async def receipts_stay(case: Case) -> None:
    """list_calls and find_call return erased records, before later calls."""
    thread, first = await _filled(case)
    second, third = case.call(args={"secret": 1}), case.call(args={"secret": 2})
    await case.cp.record_issued(thread, second)
    await case.cp.record_result(thread, second.call_id, {"secret": 3})
    await case.cp.record_issued(thread, third)
    await case.cp.record_result(thread, third.call_id, {"secret": 4}, success=False)
    before = await case.cp.list_calls(thread)
    await case.cp.delete_thread(thread)
    after = await case.cp.list_calls(thread)
    assert after == [_erased(record) for record in before]
    assert await case.cp.find_call(first.idempotency_key) == after[0]
    assert await case.cp.find_call(second.idempotency_key) == after[1]
    assert await case.cp.find_call(third.idempotency_key) is None

    fourth = case.call()
    await case.cp.record_issued(thread, fourth)
    listed = await case.cp.list_calls(thread)
    assert listed[:3] == after
    assert listed[3].call == fourth


@clause("erase.forget-leaves-no-receipt", ErasesThreads, KeepsReceipts)
async def forget_leaves_no_receipt(case: Case) -> None:
    """With forget_keys no call record of the thread is left."""
    thread, call = await _filled(case)
    await case.cp.delete_thread(thread, forget_keys=True)
    assert await case.cp.list_calls(thread) == []
    assert await case.cp.find_call(call.idempotency_key) is None
