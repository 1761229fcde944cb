"""Clients of several processes that begin an operation at the same instant.

Time is cut into slots of the machine's monotonic clock, which all processes share. In
a slot all clients use the same new thread or key, whose name is the slot's number. A
client waits for the beginning of the next slot, so no client waits for another one,
and one that is late joins the others in a later slot.

What the clients do is chosen by the seed and the slot, so that they do the same kind
of thing at once. A client may begin later, by up to the time of one operation: the seed
chooses it, so that many different overlaps occur.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from random import Random

from conformance.history.recorder import Recorder

__all__ = ["meet_at_keys", "meet_at_threads", "slots"]

LENGTH = 12
"""How many operations of the usual duration fit in a slot."""

_WITH_DELETIONS: list[tuple[str, ...]] = [
    ("append", "delete", "load", "append", "load"),
    ("append at the version", *("append or delete at the version",) * 5),
]
"""What the clients do one after another, where the store can delete threads."""

SPIN = 300_000
"""Nanoseconds before a slot begins when a client stops to sleep and only waits."""


async def slots(random: Random, usual: float, count: int) -> AsyncIterator[int]:
    """Yield the numbers of the next slots, shortly after each begins.

    ``usual`` is the duration of an operation in seconds. Half of the time a client
    begins exactly with the slot, else up to that time later.
    """
    step = round(LENGTH * usual * 1e9)

    for _ in range(count):
        slot = time.monotonic_ns() // step + 1
        late = random.choice((0, random.random())) * usual
        begin = slot * step + round(late * 1e9)
        await asyncio.sleep(max(0, begin - SPIN - time.monotonic_ns()) / 1e9)

        while time.monotonic_ns() < begin:
            pass

        yield slot


async def meet_at_threads(
    recorder: Recorder,
    random: Random,
    thread: str,
    seed: int,
    usual: float,
    count: int,
    deletes: bool,
) -> None:
    """Append, merge, load and delete in threads that begin with ``thread``."""
    name = recorder.client
    plans: Sequence[Sequence[str]] = [
        ("append", "append", "append", "load"),
        ("append at the version",) * 6,
        ("append", "load", "append", "load", "load"),
        ("append with extra", "load", "append with extra", "load"),
        ("save_extra", "load") * 4,
        *(_WITH_DELETIONS if deletes else []),
    ]

    async for slot in slots(random, usual, count):
        subject = f"{thread}-{slot}"
        version = 0

        for step, what in enumerate(plans[(seed + slot) % len(plans)]):
            word = f"{name}.{slot}.{step}"
            tokens = [f"{word}.{i}" for i in range(3)]
            extra = {"all": word, name: word, f"{name} {step}": word}

            if what == "append or delete at the version":
                deleting = Random(f"{seed} {word}").random() < 0.5
                what = f"{'delete' if deleting else 'append'} at the version"

            if what == "append":
                await recorder.append(subject, tokens)
            elif what == "append at the version":
                await recorder.append(subject, tokens, version)
                version = int(recorder.last[subject][1])
            elif what == "delete at the version":
                await recorder.delete_thread(subject, version)
                _, *actual = recorder.last[subject]
                version = int(actual[0]) if actual else 0
            elif what == "append with extra":
                await recorder.append(subject, tokens, extra=extra)
            elif what == "save_extra":
                await recorder.save_extra(subject, extra)
            elif what == "delete":
                await recorder.delete_thread(subject)
            else:
                await recorder.load(subject)


async def meet_at_keys(
    recorder: Recorder,
    random: Random,
    thread: str,
    seed: int,
    usual: float,
    count: int,
) -> None:
    """Claim, resolve and find keys that begin with ``thread``."""
    name = recorder.client
    mine = f"{thread} of {name}"

    async for slot in slots(random, usual, count):
        key = f"{thread}-{slot}"
        success = Random(f"{seed} {slot}").random() < 0.5

        for attempt in range(2):
            call_id = f"{name}.{slot}.{attempt}"

            if await recorder.record_issued(mine, call_id, key):
                await recorder.record_result(
                    mine, call_id, key, f"result of {call_id}", success=success
                )
            else:
                await recorder.find_completed(key)
