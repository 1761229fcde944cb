"""What the recorded writer does, and what a store must hold after each step.

Each client works on its own thread and its own keys, one step after another. So after
a power loss a thread is as it was after the last acknowledged step, or after the step
that was under way. Clients that share a key have their own threads too.
"""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import Any, NamedTuple

from conformance.case import Store
from conformance.difference import shown
from cpkit import (
    CallRecord,
    ErasesThreads,
    KeepsReceipts,
    MemoryCheckpointer,
    MovesThreads,
    ThreadDump,
    ToolCall,
    UnknownCall,
)

__all__ = [
    "SHARED",
    "Client",
    "Step",
    "abilities_of",
    "clients",
    "expected",
    "observe",
    "perform",
]

_RESTORED = datetime(2026, 1, 1, tzinfo=UTC)

SHARED = "shared key"

LARGE = 1500
"""Characters of a large message: several sectors."""


class Step(NamedTuple):
    """One call of a method. A claim that ``waits`` is made when its key is free."""

    method: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = {}
    waits: bool = False

    def __str__(self) -> str:
        given = [shown(one) for one in self.args]
        given += [f"{name}={shown(value)}" for name, value in self.options.items()]
        return f"{self.method}({', '.join(given)})"


class Client(NamedTuple):
    """A thread, its keys, and the steps of the one client that uses them."""

    thread: str
    keys: list[str]
    steps: list[Step]


def abilities_of(cp: Store) -> list[str]:
    """Return the names of the optional methods that a script may use."""
    found = {ErasesThreads: "erase", MovesThreads: "move", KeepsReceipts: "receipts"}
    return [name for protocol, name in found.items() if isinstance(cp, protocol)]


def clients(
    names: list[str],
    count: int,
    seed: object,
    abilities: list[str],
    shares: bool = False,
) -> list[Client]:
    """Return the clients, with ``count`` steps each; the same for the same seed.

    If it ``shares``, each client claims the same key again and again, and fails.
    """
    if shares:
        return [_sharing(name, count, seed) for name in names]

    return [_client(name, count, Random(f"{seed} {name}"), abilities) for name in names]


def _sharing(name: str, count: int, seed: object) -> Client:
    thread = f"thread {name}"
    steps: list[Step] = []

    while len(steps) < count:
        call = ToolCall(f"{seed}.{len(steps)}", "pay", {}, SHARED)
        failed = (thread, call.call_id, "no answer")
        steps.append(Step("record_issued", (thread, call), waits=True))
        steps.append(Step("record_result", failed, {"success": False}))

    return Client(thread, [SHARED], steps)


def _client(name: str, count: int, random: Random, abilities: list[str]) -> Client:
    thread = f"thread {name}"
    keys = [f"key {name} {n}" for n in range(3)]
    issued: list[str] = []
    steps: list[Step] = []

    def body() -> dict[str, Any]:
        pad = random.choice(("", "", "x" * 20, "y" * LARGE))
        return {"token": f"{name}.{len(steps)}", "pad": pad}

    def extra() -> dict[str, Any]:
        return {random.choice("abc"): body()}

    def append() -> Step:
        return Step("append", (thread, [body() for _ in range(random.choice((1, 3)))]))

    def fenced() -> Step:
        return Step("append", (thread, [body()]), {"extra": extra()})

    def merge() -> Step:
        return Step("save_extra", (thread, extra()))

    def claim() -> Step:
        call_id = f"{name}.{len(steps)}"
        issued.append(call_id)
        call = ToolCall(call_id, "pay", body(), random.choice(keys))
        return Step("record_issued", (thread, call))

    def resolve() -> Step:
        if not issued:
            return claim()

        # The result of an earlier call, which may have been refused or forgotten.
        return Step(
            "record_result",
            (thread, random.choice(issued[-3:]), body()),
            {"success": random.random() < 0.6},
        )

    def delete() -> Step:
        return Step("delete_thread", (thread,))

    def forget() -> Step:
        return Step("delete_thread", (thread,), {"forget_keys": True})

    def restore() -> Step:
        messages = [body() for _ in range(3)]
        # Its key is free: all calls of the thread were forgotten before.
        call = ToolCall(f"{name}.{len(steps)}", "pay", body(), random.choice(keys))
        record = CallRecord(thread, call, "completed", 1, _RESTORED, "done", _RESTORED)
        dump = ThreadDump(thread, messages, extra(), [record], _RESTORED, _RESTORED)
        return Step("restore_thread", (dump,))

    choices = [append] * 5 + [fenced] * 2 + [merge] * 2 + [claim] * 4 + [resolve] * 4

    if "erase" in abilities:
        choices += [delete, forget]

    # Begin with a write of each kind, so that a short script has all of them.
    first = random.sample([append, claim, merge], 3) + [resolve]

    if {"erase", "move"} <= {*abilities}:
        first.append(forget)  # and restore

    while len(steps) < count:
        step = (first.pop(0) if first else random.choice(choices))()
        steps.append(step)

        if step.options.get("forget_keys") and "move" in abilities:
            steps.append(restore())

    return Client(thread, keys, steps)


async def perform(cp: Store, step: Step) -> None:
    """Do a step. What a write returns is the subject of other clauses."""
    try:
        answer = await getattr(cp, step.method)(*step.args, **step.options)

        while step.waits and answer is not None:
            answer = await cp.record_issued(*step.args)
    except UnknownCall:
        return  # of a call that was refused or forgotten


async def expected(client: Client, abilities: list[str]) -> list[Any]:
    """Return what `observe` must find before the first step, and after each step."""
    async with MemoryCheckpointer[Any]() as cp:
        found = [await observe(cp, client, abilities)]

        for step in client.steps:
            await perform(cp, step)
            found.append(await observe(cp, client, abilities))

    return found


async def observe(cp: Store, client: Client, abilities: list[str]) -> Any:
    """Return the thread and its keys without times, as every method shows them."""
    loaded = await cp.load(client.thread)
    found: dict[str, Any] = {"thread": None}

    if loaded is not None:
        found["thread"] = {
            "messages": loaded.messages,
            "extra": loaded.extra,
            "pending": list(map(_shown, loaded.pending)),
        }

    for key in client.keys:
        found[f"find_completed({key!r})"] = _shown(await cp.find_completed(key))

        if "receipts" in abilities:
            found[f"find_call({key!r})"] = _shown(await cp.find_call(key))

    if "receipts" in abilities:
        found["calls"] = list(map(_shown, await cp.list_calls(client.thread)))

    return found


def _shown(record: CallRecord | None) -> Any:
    if record is None:
        return None

    call = record.call
    return [
        [call.call_id, call.tool_name, dict(call.args), call.idempotency_key],
        [record.status, record.attempt, record.result, record.erased],
    ]
