"""What the recorded writer does, and what a store must hold after each step.

Each client works on its own thread and its own keys, one step after another. So after
a power loss a thread is as it was after the last acknowledged step, or after the step
that was under way. Clients that share a key have their own threads too.

The clients of a script do every write of `operations.WRITES` between them, each at a
random place among writes of random sizes. One client may do all of them alone: where
clients work at once, the sync of one may cover a write of another that has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import Any, NamedTuple

from conformance.case import Store
from conformance.difference import shown
from conformance.operations import LATER, WRITES, Place, Write
from cpkit import (
    CallRecord,
    ErasesCalls,
    ErasesThreads,
    KeepsReceipts,
    MemoryCheckpointer,
    MovesThreads,
    ThreadDump,
    ToolCall,
    TrimsThreads,
    UnknownCall,
)

__all__ = [
    "SHARED",
    "Client",
    "Step",
    "abilities_of",
    "again",
    "clients",
    "continued",
    "expected",
    "observe",
    "outcome",
    "perform",
    "table",
]

ABILITIES: dict[type, str] = {
    ErasesThreads: "erase",
    MovesThreads: "move",
    KeepsReceipts: "receipts",
    TrimsThreads: "trim",
    ErasesCalls: "erase calls",
}

_RESTORED = datetime(2026, 1, 1, tzinfo=UTC)

SHARED = "shared key"

SEVERAL_SECTORS = 1500
"""Characters of a message that fills several sectors of a disk."""

SMALL = 3
"""How often a client that appends large messages does small writes afterwards."""

_HANDS = 4
"""So many clients do all kinds of writes between them."""


class Step(NamedTuple):
    """One call of a method. A claim that ``waits`` is made when its key is free."""

    method: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = {}
    waits: bool = False

    @property
    def thread(self) -> str:
        """The thread that it changes."""
        first = self.args[0]
        return first.thread_id if isinstance(first, ThreadDump) else str(first)

    @property
    def keys(self) -> list[str]:
        """The keys that it may take."""
        calls = [one for one in self.args if isinstance(one, ToolCall)]
        calls += [
            record.call
            for one in self.args
            if isinstance(one, ThreadDump)
            for record in one.calls
        ]
        return [call.idempotency_key for call in calls]

    def __str__(self) -> str:
        given = [shown(one) for one in self.args]
        given += [f"{name}={shown(value)}" for name, value in self.options.items()]
        return f"{self.method}({', '.join(given)})"


class Client(NamedTuple):
    """The steps of one client. No other client uses its threads."""

    name: str
    steps: list[Step]

    @property
    def thread(self) -> str:
        """The thread of most steps."""
        return _thread(self.name)

    @property
    def threads(self) -> list[str]:
        return sorted({self.thread, *(step.thread for step in self.steps)})

    @property
    def keys(self) -> list[str]:
        return sorted({key for step in self.steps for key in step.keys})


class _Spot(Place):
    """A place for one write on the thread of a client; the token is *name.number*."""

    @property
    def thread(self) -> str:
        return _thread(self.token.rpartition(".")[0])


class _Steps:
    """Has every method of a store, and returns the call as a step."""

    def __getattr__(self, method: str) -> Callable[..., Step]:
        return lambda *args, **options: Step(method, args, options)


def _thread(name: str) -> str:
    return f"thread {name}"


def abilities_of(cp: Store) -> list[str]:
    """Return the names of the optional methods that a script may use."""
    return [name for protocol, name in ABILITIES.items() if isinstance(cp, protocol)]


def table(abilities: list[str]) -> list[Write]:
    """Return the kinds of writes of a store with these abilities."""
    return [
        one
        for one in WRITES
        if one.needs is None or ABILITIES.get(one.needs) in abilities
    ]


def clients(
    names: list[str],
    count: int,
    seed: object,
    abilities: list[str],
    shares: bool = False,
    lone: int | None = None,
    large: int = 0,
) -> list[Client]:
    """Return the clients, with ``count`` writes each; the same for the same seed.

    What some writes need are steps of their own. Four clients, or all if there are
    fewer, do each kind of write once between them, as far as ``count`` goes; the one
    with the number ``lone`` does all kinds. If it ``shares``, each client claims the
    same key again and again, and fails. With ``large`` each client appends ``count``
    messages of so many characters, and does small writes then.
    """
    if large:
        return [_large(name, count, large) for name in names]

    if shares:
        return [_sharing(name, count, seed) for name in names]

    rows, hands = table(abilities), min(_HANDS, len(names))
    Random(f"{seed}").shuffle(rows)
    dealt = [rows[n % hands :: hands][:count] for n in range(len(names))]

    if lone is not None:
        dealt[lone] = rows

    return [
        _client(name, count, Random(f"{seed} {name}"), abilities, some)
        for name, some in zip(names, dealt, strict=True)
    ]


def continued(client: Client, done: int, row: Write, token: str) -> Client:
    """Return a client with ``done`` of its steps, and then a kind of write and others.

    The ``token`` is new, and has no dot.
    """
    steps = client.steps[:done]
    steps += _written(row, client.name, token, steps, is_first=True)
    call = ToolCall(f"call {token}", "pay", {}, f"key {token} {client.name}")
    fenced = {"expected_version": _version(client.thread, steps)}
    steps += [
        Step("append", (client.thread, [{"token": token}]), fenced),
        Step("record_issued", (client.thread, call)),
        Step("record_result", (client.thread, call.call_id, "done")),
    ]
    return Client(client.name, steps)


def again(failed: Step) -> Step:
    """Return what a client writes to the same thread after a step that failed."""
    return Step("append", (failed.thread, [{"token": "again"}]))


def _version(thread: str, steps: list[Step]) -> int:
    """Return the version of a thread after steps that were all accepted."""
    version = 0

    for step in steps:
        if step.thread == thread and step.method == "append":
            version += len(step.args[1])
        elif step.thread == thread and step.method == "delete_thread":
            version = 0
        elif step.thread == thread and step.method == "restore_thread":
            version = len(step.args[0].messages)

    return version


def _sharing(name: str, count: int, seed: object) -> Client:
    thread = f"thread {name}"
    steps: list[Step] = []

    while len(steps) < count:
        call = ToolCall(f"{seed}.{len(steps)}", "pay", {}, SHARED)
        failed = (thread, call.call_id, "no answer")
        steps.append(Step("record_issued", (thread, call), waits=True))
        steps.append(Step("record_result", failed, {"success": False}))

    return Client(name, steps)


def _large(name: str, count: int, size: int) -> Client:
    thread, append = _thread(name), "append"
    steps = [
        Step(append, (thread, [{"n": n, "pad": "x" * size}])) for n in range(count)
    ]

    for n in range(SMALL):
        call = ToolCall(f"{name}.{n}", "pay", {}, f"key {name} {n}")
        steps += [
            Step(append, (thread, [{"small": n}]), {"extra": {"n": n}}),
            Step("record_issued", (thread, call)),
            Step("record_result", (thread, call.call_id, n)),
        ]

    return Client(name, steps)


def _client(
    name: str, count: int, random: Random, abilities: list[str], rows: list[Write]
) -> Client:
    thread = _thread(name)
    keys = [f"key {name} {n}" for n in range(3)]
    issued: list[str] = []
    steps: list[Step] = []

    def body() -> dict[str, Any]:
        pad = random.choice(("", "", "x" * 20, "y" * SEVERAL_SECTORS))
        return {"token": f"{name}.{len(steps)}", "pad": pad}

    def extra() -> dict[str, Any]:
        return {random.choice("abc"): body()}

    def append() -> list[Step]:
        messages = [body() for _ in range(random.choice((1, 3)))]
        return [Step("append", (thread, messages))]

    def append_extra() -> list[Step]:
        return [Step("append", (thread, [body()]), {"extra": extra()})]

    def merge() -> list[Step]:
        return [Step("save_extra", (thread, extra()))]

    def claim() -> list[Step]:
        call_id = f"{name}.{len(steps)}"
        issued.append(call_id)
        call = ToolCall(call_id, "pay", body(), random.choice(keys))
        return [Step("record_issued", (thread, call))]

    def resolve() -> list[Step]:
        if not issued:
            return claim()

        # The result of an earlier call, which may have been refused or forgotten.
        given = (thread, random.choice(issued[-3:]), body())
        return [Step("record_result", given, {"success": random.random() < 0.6})]

    def delete() -> list[Step]:
        return [Step("delete_thread", (thread,))]

    def forget() -> list[Step]:
        found = [Step("delete_thread", (thread,), {"forget_keys": True})]
        return found + restore() * ("move" in abilities)

    def trim() -> list[Step]:
        return [Step("trim", (thread, random.choice((1, 2, 3, 5, 9, 99))))]

    def erase_calls() -> list[Step]:
        return [Step("erase_calls", (thread, LATER))]

    def restore() -> list[Step]:
        messages = [body() for _ in range(3)]
        # Its key is free: all calls of the thread were forgotten before.
        call = ToolCall(f"{name}.{len(steps)}", "pay", body(), random.choice(keys))
        record = CallRecord(thread, call, "completed", 1, _RESTORED, "done", _RESTORED)
        dump = ThreadDump(thread, messages, extra(), [record], _RESTORED, _RESTORED)
        return [Step("restore_thread", (dump,))]

    def written(number: int, row: Write) -> list[Step]:
        return _written(row, name, f"{number}", steps)

    choices = [append] * 5 + [append_extra] * 2 + [merge] * 2 + [claim] * 4
    choices += [resolve] * 4

    if "erase" in abilities:
        choices += [delete, forget]

    if "trim" in abilities:
        choices += [trim] * 3

    if "erase calls" in abilities:
        choices += [erase_calls]

    plan: list[Callable[[], list[Step]]] = [
        partial(written, number, row) for number, row in enumerate(rows)
    ]
    plan += random.choices(choices, k=max(0, count - len(plan)))
    random.shuffle(plan)

    for write in plan:
        steps += write()

    return Client(name, steps)


def _written(
    row: Write, name: str, token: str, before: list[Step], *, is_first: bool = False
) -> list[Step]:
    """Return the step of a kind of write, after steps for what it needs.

    A deletion erases a call, unless it ``is_first`` after a power loss.
    """
    steps: Any = _Steps()
    spot, thread = _Spot(f"{name}.{token}"), _thread(name)
    version = _version(thread, before)
    found: list[Step] = []

    if row.needs is not None and row.at == "thread" and not version:
        found, version = [steps.append(thread, [{"n": 1}])], 1

    if row.method == "delete_thread" and not is_first:
        found.append(steps.record_issued(thread, spot.call(2)))
    elif row.method == "erase_calls":
        call = spot.call(2)
        found += [
            steps.record_issued(thread, call),
            steps.record_result(thread, call.call_id, {"paid": 2}),
        ]
    elif row.at == "gone":
        found = [
            steps.record_issued(spot.gone, spot.call(3)),
            steps.delete_thread(spot.gone),
        ]
    elif row.method == "record_result":
        found = [steps.record_issued(thread, spot.call(2))]
    elif row.name == "claim of a freed key":
        failed = spot.call(0)
        found = [
            steps.record_issued(thread, failed),
            steps.record_result(thread, failed.call_id, "refused", success=False),
        ]

    last: Any = row.run(steps, spot, version)
    return [*found, last]


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


async def outcome(
    client: Client, abilities: list[str], steps: Sequence[Step] | None = None
) -> Any:
    """Return what `observe` must find after the client's last step, or after these."""
    async with MemoryCheckpointer[Any]() as cp:
        for step in client.steps if steps is None else steps:
            await perform(cp, step)

        return await observe(cp, client, abilities)


async def observe(cp: Store, client: Client, abilities: list[str]) -> Any:
    """Return the threads and keys without times, as every method shows them.

    The reads are begun at once, which takes a store with a thread of its own half the
    processor time.
    """
    reads: dict[str, Awaitable[Any]] = {}

    for thread in client.threads:
        reads[f"load({thread!r})"] = _loaded(cp, thread)

        if "receipts" in abilities:
            reads[f"list_calls({thread!r})"] = _listed(cp, thread)

    for key in client.keys:
        reads[f"find_completed({key!r})"] = _found(cp.find_completed(key))

        if "receipts" in abilities:
            reads[f"find_call({key!r})"] = _found(cp.find_call(key))

    return dict(zip(reads, await asyncio.gather(*reads.values()), strict=True))


async def _loaded(cp: Store, thread: str) -> Any:
    loaded = await cp.load(thread)
    return loaded and {
        "messages": loaded.messages,
        "first": loaded.first,
        "extra": loaded.extra,
        "pending": list(map(_shown, loaded.pending)),
    }


async def _listed(cp: Store, thread: str) -> Any:
    return list(map(_shown, await cp.list_calls(thread)))


async def _found(read: Awaitable[CallRecord | None]) -> Any:
    return _shown(await read)


def _shown(record: CallRecord | None) -> Any:
    if record is None:
        return None

    call = record.call
    return [
        [call.call_id, call.tool_name, dict(call.args), call.idempotency_key],
        [record.status, record.attempt, record.result, record.erased],
    ]
