"""Loading: a consistent snapshot that the caller may change."""

from __future__ import annotations

from copy import deepcopy

from conformance.case import Case
from conformance.clause import clause


@clause("load.nothing-is-none")
async def missing_returns_none(case: Case) -> None:
    """A thread without any write loads as None."""
    loaded = await case.cp.load(case.id())
    assert loaded is None


@clause("load.reading-records-nothing")
async def reading_records_nothing(case: Case) -> None:
    """Reading a thread does not create it."""
    thread = case.id()
    await case.cp.load(thread)
    await case.cp.find_completed(case.id("key"))
    again = await case.cp.load(thread)
    assert again is None


@clause("load.all-three-fields")
async def all_three_fields(case: Case) -> None:
    """A load returns messages, extra and pending calls together."""
    thread, call = case.id(), case.call()
    await case.cp.append(thread, [{"n": 1}])
    await case.cp.save_extra(thread, {"plan": "a"})
    await case.cp.record_issued(thread, call)
    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert loaded.messages == [{"n": 1}]
    assert loaded.extra == {"plan": "a"}
    assert [record.call for record in loaded.pending] == [call]


@clause("load.version-counts-messages")
async def version_counts_messages(case: Case) -> None:
    """The version of a loaded thread is the number of its messages; first is 0."""
    thread = case.id()

    for n in range(1, 4):
        written = await case.cp.append(thread, [{"n": n}])
        loaded = await case.cp.load(thread)
        assert loaded is not None
        assert loaded.version == len(loaded.messages) == written == n
        assert loaded.first == 0


@clause("load.only-extra")
async def only_extra(case: Case) -> None:
    """A thread with only extra is loaded at version 0."""
    thread = case.id()
    await case.cp.save_extra(thread, {"plan": "a"})
    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert (loaded.messages, loaded.extra, loaded.pending) == ([], {"plan": "a"}, [])


@clause("load.only-calls")
async def only_calls(case: Case) -> None:
    """A thread with only calls is loaded, even if no call is pending."""
    thread, call = case.id(), case.call()
    await case.cp.record_issued(thread, call)
    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert (loaded.messages, loaded.extra) == ([], {})
    assert len(loaded.pending) == 1

    await case.cp.record_result(thread, call.call_id, "done")
    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert (loaded.messages, loaded.extra, loaded.pending) == ([], {}, [])


@clause("load.twice-is-equal")
async def twice_is_equal(case: Case) -> None:
    """Two loads without a write between them are equal, times included."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1.5}, {"n": [None, True, "é"]}])
    await case.cp.save_extra(thread, {"b": 1, "a": {"x": [1]}})
    await case.cp.record_issued(thread, case.call())
    await case.cp.record_issued(thread, case.call())
    first = await case.cp.load(thread)
    second = await case.cp.load(thread)
    assert first == second


@clause("load.is-the-callers")
async def is_the_callers(case: Case) -> None:
    """Changing a loaded object does not change the stored thread."""
    thread = case.id()
    await case.cp.append(thread, [{"deep": {"list": [1, 2]}}, {"n": 2}])
    await case.cp.save_extra(thread, {"plan": {"steps": ["a"]}})
    await case.cp.record_issued(thread, case.call(args={"to": {"name": "x"}}))
    mine = await case.cp.load(thread)
    before = deepcopy(mine)
    assert mine is not None

    mine.messages[0]["deep"]["list"].append(3)
    del mine.messages[1]
    mine.extra["plan"]["steps"].append("b")
    mine.extra["new"] = 1
    mine.pending[0].call.args["to"]["name"] = "y"
    mine.pending.clear()

    after = await case.cp.load(thread)
    assert after == before


@clause("load.extends-earlier")
async def extends_earlier(case: Case) -> None:
    """The messages of an earlier load are a prefix of every later load."""
    thread = case.id()
    earlier: list[object] = []

    for n in range(12):
        await case.cp.append(thread, [{"n": n, "i": i} for i in range(n % 4)])
        await case.cp.save_extra(thread, {"n": n})
        loaded = await case.cp.load(thread)
        assert loaded is not None
        assert loaded.messages[: len(earlier)] == earlier
        earlier = loaded.messages


@clause("load.threads-are-separate")
async def threads_are_separate(case: Case) -> None:
    """A write to one thread is not visible in another."""
    one, other = case.id(), case.id()
    await case.cp.append(other, [{"n": "other"}])
    await case.cp.save_extra(other, {"k": "other"})
    await case.cp.record_issued(other, case.call())
    before = await case.cp.load(other)

    assert await case.cp.load(one) is None
    await case.cp.append(one, [{"n": 1}, {"n": 2}])
    await case.cp.save_extra(one, {"k": 1, "l": 2})
    await case.cp.record_issued(one, case.call())
    after = await case.cp.load(other)
    assert after == before
