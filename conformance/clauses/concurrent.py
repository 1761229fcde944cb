"""Concurrency: tasks and handles that share threads and keys."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from conformance.case import Case, Store
from conformance.clause import Level, clause
from conformance.sample_dumps import made_call, made_dump
from conformance.workers import workers
from cpkit import KeyTaken, MovesThreads, VersionConflict

CONCURRENT = Level.CONCURRENT


@asynccontextmanager
async def handles(case: Case) -> AsyncIterator[list[Store]]:
    """Return three handles of the store; if handles do not share it, one thrice."""
    if not case.has_handles():
        yield [case.cp] * 3
        return

    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(case.open()) for _ in range(2)]
        yield [case.cp, *others]


@clause("concurrent.appends-are-all-there", level=CONCURRENT)
async def appends_are_all_there(case: Case) -> None:
    """Every concurrent append is stored whole, contiguous, at its returned version."""
    thread = case.id()
    batches = [[{"n": n, "i": i} for i in range(n % 4 + 1)] for n in range(60)]

    async with handles(case) as cps:
        versions = await asyncio.gather(
            *(cps[n % 3].append(thread, batch) for n, batch in enumerate(batches))
        )
        loaded = await case.cp.load(thread)

    assert loaded is not None
    assert loaded.version == sum(map(len, batches))

    for version, batch in zip(versions, batches, strict=True):
        stored = loaded.messages[version - len(batch) : version]
        assert stored == batch, f"the append that returned {version}"


@clause("concurrent.one-wins-a-version", level=CONCURRENT)
async def one_wins_a_version(case: Case) -> None:
    """Of concurrent appends that expect the same version exactly one writes."""
    thread = case.id()

    async with handles(case) as cps:
        for version in range(8):
            answers = await asyncio.gather(
                *(
                    cps[n % 3].append(thread, [{"n": n}], expected_version=version)
                    for n in range(12)
                ),
                return_exceptions=True,
            )
            won = [n for n, answer in enumerate(answers) if answer == version + 1]
            lost = [a for a in answers if isinstance(a, VersionConflict)]
            loaded = await case.cp.load(thread)
            assert len(won) == 1
            assert len(lost) == 11
            assert loaded is not None
            assert loaded.messages[version:] == [{"n": won[0]}]


@clause(
    "concurrent.event-loops-share-the-store",
    "handles",
    level=CONCURRENT,
    deadline=40,
)
async def event_loops_share_the_store(case: Case) -> None:
    """Of handles in several event loops one wins each version, and one each key."""
    thread, count, loops = case.id(), case.times(60), 3
    keys = [case.id("key") for _ in range(count)]
    begin = threading.Barrier(loops)

    async def use() -> tuple[list[int], list[str]]:
        won: list[int] = []
        claimed: list[str] = []
        version = 0

        async with case.open() as cp:
            await asyncio.to_thread(begin.wait, 20)

            for key in keys:
                try:
                    version = await cp.append(
                        thread, [{"n": version + 1}], expected_version=version
                    )
                    won.append(version)
                except VersionConflict as exc:
                    version = exc.actual

                if await cp.record_issued(thread, case.call(key)) is None:
                    claimed.append(key)

        return won, claimed

    answers = await asyncio.gather(
        *(asyncio.to_thread(asyncio.run, use()) for _ in range(loops))
    )
    loaded = await case.cp.load(thread)
    assert loaded is not None
    versions = sorted(version for won, _ in answers for version in won)
    assert versions == list(range(1, loaded.version + 1))
    assert [message["n"] for message in loaded.messages] == versions
    assert sorted(key for _, claimed in answers for key in claimed) == sorted(keys)
    assert len(loaded.pending) == count


@clause("concurrent.merges-are-not-lost", level=CONCURRENT)
async def merges_are_not_lost(case: Case) -> None:
    """No concurrent merge of different keys is lost."""
    thread = case.id()

    async with handles(case) as cps:
        await asyncio.gather(
            *(cps[n % 3].save_extra(thread, {f"key-{n}": n}) for n in range(60))
        )
        loaded = await case.cp.load(thread)

    assert loaded is not None
    assert loaded.extra == {f"key-{n}": n for n in range(60)}


@clause("concurrent.merges-are-atomic", level=CONCURRENT)
async def merges_are_atomic(case: Case) -> None:
    """A reader sees all keys of a merge or none of them."""
    thread = case.id()
    names = [f"key-{i}" for i in range(20)]
    await case.cp.save_extra(thread, dict.fromkeys(names, -1))
    seen: list[dict[str, Any]] = []

    async def write(cp: Store, n: int) -> None:
        for i in range(10):
            await cp.save_extra(thread, dict.fromkeys(names, n * 100 + i))

    async def read(cp: Store) -> None:
        for _ in range(15):
            loaded = await cp.load(thread)
            assert loaded is not None
            seen.append(loaded.extra)

    async with handles(case) as cps:
        writers = [write(cps[n % 3], n) for n in range(4)]
        await asyncio.gather(*writers, *(read(cp) for cp in cps))

    torn = [extra for extra in seen if len(set(extra.values())) != 1]
    assert not torn


@clause("concurrent.loads-are-snapshots", level=CONCURRENT)
async def loads_are_snapshots(case: Case) -> None:
    """A load during writes extends earlier loads and never sees a partial append."""
    thread = case.id()
    done = asyncio.Event()

    async def write(cp: Store, n: int) -> None:
        for i in range(12):
            await cp.append(thread, [{"n": n, "i": i, "part": p} for p in range(3)])

    async def read(cp: Store) -> None:
        earlier: list[Any] = []

        while not done.is_set():
            loaded = await cp.load(thread)
            messages = [] if loaded is None else loaded.messages
            assert messages[: len(earlier)] == earlier
            assert [m["part"] for m in messages] == [0, 1, 2] * (len(messages) // 3)
            earlier = messages

    async with handles(case) as cps:
        readers = [asyncio.create_task(read(cp)) for cp in cps]

        try:
            await asyncio.gather(*(write(cps[n % 3], n) for n in range(3)))
        finally:
            done.set()
            await asyncio.gather(*readers)


@clause("concurrent.append-and-extra-are-one", level=CONCURRENT)
async def append_and_extra_are_one(case: Case) -> None:
    """A reader sees the messages and the extra of an append together, or neither."""
    thread = case.id()
    done = asyncio.Event()

    async def write(cp: Store, count: int) -> None:
        version = 0

        for _ in range(count):
            # ``n`` is always the number of messages: a writer that is late tries again.
            while True:
                try:
                    version = await cp.append(
                        thread,
                        [{"n": version + 1}, {"n": version + 2}],
                        expected_version=version,
                        extra={"n": version + 2},
                    )
                except VersionConflict as exc:
                    version = exc.actual
                else:
                    break

    async def read(cp: Store) -> None:
        while not done.is_set():
            loaded = await cp.load(thread)
            version, extra = (loaded.version, loaded.extra) if loaded else (0, {"n": 0})
            assert extra == {"n": version}

    async with handles(case) as cps:
        readers = [asyncio.create_task(read(cp)) for cp in cps]

        try:
            count = case.times(40)
            await asyncio.gather(*(write(cps[n], count) for n in range(3)))
        finally:
            done.set()
            await asyncio.gather(*readers)

    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert loaded.version == 3 * 2 * count


@clause("concurrent.dumps-are-snapshots", MovesThreads, level=CONCURRENT)
async def dumps_are_snapshots(case: Case) -> None:
    """A dump during writes has the messages and the extra of one moment."""
    thread = case.id()
    done = asyncio.Event()

    async def write(cp: Store) -> None:
        for n in range(1, case.times(40) + 1):
            await cp.append(thread, [{"n": n}], extra={"n": n})

    async def read(cp: Store) -> None:
        while not done.is_set():
            dump = await cp.dump_thread(thread)
            version, extra = (len(dump.messages), dump.extra) if dump else (0, {"n": 0})
            assert extra == {"n": version}

    async with handles(case) as cps:
        readers = [asyncio.create_task(read(cp)) for cp in cps]

        try:
            await write(cps[0])
        finally:
            done.set()
            await asyncio.gather(*readers)


@clause("concurrent.one-restores", MovesThreads, level=CONCURRENT)
async def one_restores(case: Case) -> None:
    """Of concurrent restores of an id, or of a key, exactly one succeeds."""
    async with handles(case) as cps:
        for same_thread in (True, False) * 4:
            thread, key = case.id(), case.id("key")
            dumps = []

            for n in range(6):
                one = thread if same_thread else case.id()
                call = made_call(one, "completed", key=None if same_thread else key)
                dumps.append(made_dump(one, call, messages=[{"n": n}]))

            answers = await asyncio.gather(
                *(cps[n % 3].restore_thread(dump) for n, dump in enumerate(dumps)),
                return_exceptions=True,
            )
            refused = VersionConflict if same_thread else KeyTaken
            lost = [answer for answer in answers if isinstance(answer, refused)]
            assert answers.count(None) == 1
            assert len(lost) == 5

            won = dumps[answers.index(None)]
            assert await case.cp.dump_thread(won.thread_id) == won

            if not same_thread:
                found = await case.cp.find_completed(key)
                assert found == won.calls[0]


@clause("concurrent.one-claims-a-key", level=CONCURRENT)
async def one_claims_a_key(case: Case) -> None:
    """Of concurrent claims of a key, in any threads, exactly one succeeds."""
    threads = [case.id() for _ in range(3)]

    async with handles(case) as cps:
        for _ in range(8):
            key = case.id("key")
            calls = [case.call(key) for _ in range(12)]
            answers = await asyncio.gather(
                *(
                    cps[n % 3].record_issued(threads[n % 2], call)
                    for n, call in enumerate(calls)
                )
            )
            won = [n for n, answer in enumerate(answers) if answer is None]
            assert len(won) == 1
            holders = [answer for answer in answers if answer is not None]
            assert {holder.call.call_id for holder in holders} == {
                calls[won[0]].call_id
            }


@clause("concurrent.one-takes-over", level=CONCURRENT)
async def one_takes_over(case: Case) -> None:
    """Of concurrent claims of a freed key exactly one becomes the next attempt."""
    thread, key = case.id(), case.id("key")

    async with handles(case) as cps:
        for attempt in range(1, 7):
            calls = [case.call(key) for _ in range(9)]
            answers = await asyncio.gather(
                *(cps[n % 3].record_issued(thread, c) for n, c in enumerate(calls))
            )
            won = [c for c, answer in zip(calls, answers, strict=True) if not answer]
            assert len(won) == 1
            failed = await case.cp.record_result(
                thread, won[0].call_id, None, success=False
            )
            assert failed.attempt == attempt


@clause("concurrent.one-result-stays", level=CONCURRENT)
async def one_result_stays(case: Case) -> None:
    """Of concurrent results of a call one is stored, and all callers get its record."""
    thread = case.id()

    async with handles(case) as cps:
        for _ in range(8):
            call = case.call()
            await case.cp.record_issued(thread, call)
            records = await asyncio.gather(
                *(
                    cps[n % 3].record_result(
                        thread, call.call_id, n, success=n % 2 == 0
                    )
                    for n in range(10)
                )
            )
            assert all(record == records[0] for record in records)
            assert records[0].status == (
                "completed" if records[0].result in range(0, 10, 2) else "failed"
            )


@clause("concurrent.same-call-claims-once", level=CONCURRENT)
async def same_call_claims_once(case: Case) -> None:
    """Of concurrent claims of the same call exactly one succeeds."""
    thread = case.id()

    async with handles(case) as cps:
        for _ in range(8):
            call = case.call()
            answers = await asyncio.gather(
                *(cps[n % 3].record_issued(thread, call) for n in range(9))
            )
            loaded = await case.cp.load(thread)
            assert answers.count(None) == 1
            assert all(a is None or a.call == call for a in answers)
            assert loaded is not None
            assert [r.call for r in loaded.pending].count(call) == 1


@clause("concurrent.threads-make-progress", level=CONCURRENT)
async def threads_make_progress(case: Case) -> None:
    """Constant load on one thread does not block the use of another thread."""
    busy, calm = case.id(), case.id()
    done = asyncio.Event()
    await case.cp.append(busy, [{"text": "x" * 1000}] * 300)

    async def hold(cp: Store, n: int) -> None:
        while not done.is_set():
            if n % 2:
                await cp.load(busy)
            else:
                await cp.append(busy, [{"text": "x" * 1000}])

    async with handles(case) as cps:
        holders = [asyncio.create_task(hold(cps[n % 2], n)) for n in range(6)]

        try:
            for n in range(1, 21):
                version = await cps[n % 3].append(calm, [{"n": n}])
                assert version == n
        finally:
            done.set()
            await asyncio.gather(*holders)


@clause("concurrent.opens-at-once", "processes", level=CONCURRENT, deadline=40)
def opens_at_once(case: Case) -> None:
    """Many processes and tasks can open a store at the same time, even a new one."""

    async def use() -> None:
        async with case.open() as cp:
            await cp.append(case.id(), [{"n": 1}])

    async def run() -> None:
        options = {"threads": [case.id()], "count": 2}
        job = {"does": "threads", "with": options, "seed": 1}
        jobs = [{**job, "clients": [f"process {n}"]} for n in range(4)]

        async with workers(case.harness, jobs) as started:
            await asyncio.gather(*(use() for _ in range(4)))
            await asyncio.gather(*(worker.finished() for worker in started))

    asyncio.run(run())
