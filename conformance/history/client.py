"""What a client of a history does: random operations that reach every case."""

from __future__ import annotations

import asyncio
from random import Random

from conformance.history.recorder import Recorder

__all__ = ["use_keys", "use_threads"]


async def use_threads(
    recorder: Recorder,
    random: Random,
    threads: list[str],
    count: int,
    pace: float = 0,
    *,
    deletes: bool = False,
    trims: bool = False,
) -> None:
    """Append, merge, load and load ranges, on threads that other clients use too.

    ``pace`` is in seconds between operations. With ``deletes`` the client also deletes
    threads, and dumps and restores them where the store can; with ``trims`` it trims.
    """
    versions = dict.fromkeys(threads, 0)

    for n in range(count):
        if pace:
            await asyncio.sleep(pace)

        thread = random.choice(threads)
        tokens = [f"{recorder.client}.{n}.{i}" for i in range(random.choice((1, 1, 3)))]
        keys = random.sample("abc", random.randint(1, 3))
        extra = dict.fromkeys(keys, f"{recorder.client}.{n}")
        dice = random.random()

        if dice < 0.25:
            await recorder.append(thread, tokens)
        elif dice < 0.35:
            await recorder.append(thread, tokens, extra=extra)
        elif dice < 0.45:
            # The last version that this client saw: current often enough.
            await recorder.append(thread, tokens, versions[thread])
        elif dice < 0.55:
            await recorder.append(thread, tokens, versions[thread], extra)
        elif dice < 0.6:
            await recorder.append(thread, [], versions[thread], extra)
        elif dice < 0.75:
            await recorder.save_extra(thread, extra)
        else:
            await recorder.load(thread)

        if recorder.reads_ranges and random.random() < 0.2:
            look = random.choice((recorder.read, recorder.load_range))
            start = random.choice((0, 1, 3, -2))
            await look(thread, start, random.choice((None, 0, start + 4)))

        versions[thread] = _last_version(recorder, thread, versions[thread])

        if deletes:
            token = f"{recorder.client}.{n}"
            await _delete(recorder, random, thread, token, versions[thread])
            versions[thread] = _last_version(recorder, thread, versions[thread])

        if trims and random.random() < 0.3:
            version = versions[thread]
            before = random.choice((1, 2, max(0, version - 1), version, version + 1))
            await recorder.trim(thread, before, random.choice((None, None, version)))
            versions[thread] = _last_version(recorder, thread, version)


async def use_keys(
    recorder: Recorder,
    random: Random,
    threads: dict[str, str],
    keys: list[str],
    count: int,
    pace: float = 0,
    *,
    deletes: bool = False,
) -> None:
    """Claim, resolve and find, on keys that other clients claim too.

    ``threads`` maps a client to its thread. A call id contains the client's name. So a
    client can send a result for another client's call: late, twice, or for an unknown
    call. With ``deletes`` the client also deletes threads, its own or another one's.
    """
    for n in range(count):
        if pace:
            await asyncio.sleep(pace)

        key = random.choice(keys)
        call_id = f"{recorder.client}.{n}.{keys.index(key)}"
        claimed = await recorder.record_issued(threads[recorder.client], call_id, key)

        if claimed and random.random() < 0.8:
            await recorder.record_result(
                threads[recorder.client],
                call_id,
                key,
                f"result of {call_id}",
                success=random.random() < 0.15,
            )

        dice = random.random()

        if dice < 0.35:
            other = random.choice(list(threads))
            call_id = f"{other}.{random.randint(0, n)}.{keys.index(key)}"
            await recorder.record_result(
                threads[other],
                call_id,
                key,
                f"{recorder.client} for {call_id}",
                success=random.random() < 0.15,
            )
        elif dice < 0.6:
            await recorder.find_completed(key)
        elif dice < 0.7 and recorder.keeps_receipts:
            await recorder.find_call(key)
        elif dice < 0.8:
            await recorder.record_issued(threads[recorder.client], call_id, key)

        if deletes and random.random() < 0.15:
            owner = random.choice(list(threads))
            await recorder.delete_calls(
                threads[owner], owner, keys, forget_keys=random.random() < 0.5
            )


async def _delete(
    recorder: Recorder, random: Random, thread: str, token: str, version: int
) -> None:
    """Now and then delete, dump or restore a thread."""
    dice = random.random()

    if dice < 0.1:
        await recorder.delete_thread(thread)
    elif dice < 0.15:
        await recorder.delete_thread(thread, version)
    elif dice < 0.3 and recorder.moves_threads:
        await recorder.restore_thread(thread, [f"{token}.r"], {"a": f"{token}.r"})
    elif dice < 0.4 and recorder.moves_threads:
        await recorder.dump_thread(thread)


def _last_version(recorder: Recorder, thread: str, known: int) -> int:
    """Return the latest version of the thread that the client saw."""
    last = recorder.last.get(thread)

    if last is None:
        return known

    kind, *rest = last

    if kind == "deleted":
        return 0

    if kind in ("version", "conflict"):
        return int(rest[0])

    if kind == "part":
        return int(rest[2])

    return len(rest[0]) if kind == "loaded" else known
