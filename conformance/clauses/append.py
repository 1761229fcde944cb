"""Appending: order, versions, atomicity, and the check of ``expected_version``."""

from __future__ import annotations

from typing import Any

from conformance.case import Case, raises
from conformance.clause import clause
from cpkit import SerializationError, VersionConflict


@clause("append.returns-version")
async def returns_version(case: Case) -> None:
    """An append returns the new version, which is the number of messages."""
    thread = case.id()
    versions = [
        await case.cp.append(thread, [{"n": 1}]),
        await case.cp.append(thread, [{"n": 2}, {"n": 3}, {"n": 4}]),
        await case.cp.append(thread, [{"n": 5}]),
    ]
    assert versions == [1, 4, 5]


@clause("append.keeps-order")
async def keeps_order(case: Case) -> None:
    """Messages come back in the order in which they were appended."""
    thread = case.id()
    sent: list[dict[str, Any]] = []

    for size in (1, 3, 11, 1, 25, 2):
        batch = [{"n": len(sent) + i} for i in range(size)]
        await case.cp.append(thread, batch)
        sent += batch

    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert loaded.messages == sent


@clause("append.keeps-duplicates")
async def keeps_duplicates(case: Case) -> None:
    """Equal messages are separate messages: duplicates are kept."""
    thread, message = case.id(), {"role": "user", "content": "yes"}
    await case.cp.append(thread, [message, message])
    version = await case.cp.append(thread, [message])
    loaded = await case.cp.load(thread)
    assert version == 3
    assert loaded is not None
    assert loaded.messages == [message] * 3


@clause("append.takes-tuples")
async def takes_tuples(case: Case) -> None:
    """The messages may be a tuple."""
    thread = case.id()
    version = await case.cp.append(thread, ({"n": 1}, {"n": 2}))
    assert version == 2


@clause("append.nothing-changes-nothing")
async def nothing_changes_nothing(case: Case) -> None:
    """An append of no messages changes nothing and returns the current version."""
    thread = case.id()
    version = await case.cp.append(thread, [])
    assert version == 0
    assert await case.cp.load(thread) is None

    await case.cp.append(thread, [{"n": 1}, {"n": 2}])
    version = await case.cp.append(thread, [])
    loaded = await case.cp.load(thread)
    assert version == 2
    assert loaded is not None
    assert loaded.version == 2


@clause("append.nothing-checks-version")
async def nothing_checks_version(case: Case) -> None:
    """An append of no messages still checks the expected version."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1}])
    version = await case.cp.append(thread, [], expected_version=1)
    assert version == 1

    for wrong in (0, 2):
        with raises(VersionConflict, f"version 1 expected to be {wrong}"):
            await case.cp.append(thread, [], expected_version=wrong)

    with raises(VersionConflict, "a missing thread"):
        await case.cp.append(case.id(), [], expected_version=1)


@clause("append.expected-version-writes")
async def expected_version_writes(case: Case) -> None:
    """An append with the current version expected writes; a new thread is at 0."""
    thread = case.id()
    assert await case.cp.append(thread, [], expected_version=0) == 0
    first = await case.cp.append(thread, [{"n": 1}], expected_version=0)
    second = await case.cp.append(thread, [{"n": 2}, {"n": 3}], expected_version=1)
    third = await case.cp.append(thread, [{"n": 4}], expected_version=3)
    loaded = await case.cp.load(thread)
    assert (first, second, third) == (1, 3, 4)
    assert loaded is not None
    assert loaded.messages == [{"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}]


@clause("append.expected-version-counts-messages")
async def expected_version_counts_messages(case: Case) -> None:
    """The version counts messages only, not extra or calls."""
    thread = case.id()
    await case.cp.save_extra(thread, {"k": 1})
    await case.cp.record_issued(thread, case.call())
    version = await case.cp.append(thread, [{"n": 1}], expected_version=0)
    await case.cp.save_extra(thread, {"k": 2})
    then = await case.cp.append(thread, [{"n": 2}], expected_version=1)
    assert (version, then) == (1, 2)


@clause("append.conflict-writes-nothing")
async def conflict_writes_nothing(case: Case) -> None:
    """An append that expects an older version raises and writes nothing."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1}, {"n": 2}])
    before = await case.cp.load(thread)

    for stale in (0, 1):
        with raises(VersionConflict, f"version 2 expected to be {stale}"):
            await case.cp.append(thread, [{"n": 3}], expected_version=stale)

    after = await case.cp.load(thread)
    assert after == before


@clause("append.conflict-ahead")
async def conflict_ahead(case: Case) -> None:
    """An append that expects a later version raises and writes nothing."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1}])
    before = await case.cp.load(thread)

    for ahead in (2, 1_000_000, 2**32 + 1, 2**64 + 1, 2**70):
        with raises(VersionConflict, f"version 1 expected to be {ahead}"):
            await case.cp.append(thread, [{"n": 2}], expected_version=ahead)

    after = await case.cp.load(thread)
    assert after == before


@clause("append.conflict-makes-no-thread")
async def conflict_makes_no_thread(case: Case) -> None:
    """A conflict on a missing thread does not create the thread."""
    thread = case.id()

    with raises(VersionConflict, "a missing thread"):
        await case.cp.append(thread, [{"n": 1}], expected_version=1)

    assert await case.cp.load(thread) is None


@clause("append.conflict-tells-the-facts")
async def conflict_has_the_facts(case: Case) -> None:
    """A conflict has the thread id, the expected and the actual version as fields."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1}, {"n": 2}])

    with raises(VersionConflict) as caught:
        await case.cp.append(thread, [{"n": 3}], expected_version=7)

    error = caught.error
    assert (error.thread_id, error.expected, error.actual) == (thread, 7, 2)


@clause("append.retry-cannot-duplicate")
async def retry_cannot_duplicate(case: Case) -> None:
    """Repeating an append with the same expected version never writes it twice."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1}], expected_version=0)

    with raises(VersionConflict, "the same append again"):
        await case.cp.append(thread, [{"n": 1}], expected_version=0)

    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert loaded.messages == [{"n": 1}]


@clause("append.all-or-none")
async def all_or_none(case: Case) -> None:
    """A batch with one message that cannot be stored writes none of them."""
    thread = case.id()

    with raises(SerializationError):
        await case.cp.append(thread, [{"n": 1}, {"n": float("nan")}, {"n": 3}])

    assert await case.cp.load(thread) is None
    await case.cp.append(thread, [{"n": 0}])

    with raises(SerializationError):
        await case.cp.append(thread, [{"n": i} for i in range(50)] + [{"n": {1}}])

    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert loaded.messages == [{"n": 0}]


@clause("append.copies-its-input")
async def copies_its_input(case: Case) -> None:
    """Changing a message object after the append does not change the stored one."""
    thread = case.id()
    inner: dict[str, Any] = {"list": [1]}
    batch: list[dict[str, Any]] = [{"inner": inner}, {"n": 2}]
    await case.cp.append(thread, batch)
    inner["list"].append(2)
    batch[1]["n"] = 3
    batch.append({"n": 4})
    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert loaded.messages == [{"inner": {"list": [1]}}, {"n": 2}]


@clause("append.leaves-the-rest")
async def leaves_the_rest(case: Case) -> None:
    """An append changes neither extra nor calls."""
    thread = case.id()
    await case.cp.save_extra(thread, {"plan": ["a"]})
    await case.cp.record_issued(thread, case.call())
    before = await case.cp.load(thread)
    await case.cp.append(thread, [{"n": 1}])
    after = await case.cp.load(thread)
    assert before is not None
    assert after is not None
    assert (after.extra, after.pending) == (before.extra, before.pending)


@clause("append.takes-a-sequence-only")
async def takes_a_sequence_only(case: Case) -> None:
    """Messages that are not a list or tuple are a TypeError; nothing is written."""
    thread = case.id()
    wrong: dict[str, Any] = {
        "a generator": ({"n": n} for n in range(2)),
        "a str": "ab",
        "bytes": b"ab",
        "one message": {"n": 1},
        "None": None,
        "a set": set(),
    }

    for name, messages in wrong.items():
        with raises(TypeError, name):
            await case.cp.append(thread, messages)

    assert await case.cp.load(thread) is None


@clause("append.expected-version-is-a-count")
async def expected_version_is_a_count(case: Case) -> None:
    """A negative expected version is a ValueError; a non-int is a TypeError."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1}])

    with raises(ValueError, "-1"):
        await case.cp.append(thread, [{"n": 2}], expected_version=-1)

    wrong: list[Any] = ["1", 1.0, True]

    for value in wrong:
        with raises(TypeError, repr(value)):
            await case.cp.append(thread, [{"n": 2}], expected_version=value)

    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert loaded.version == 1
