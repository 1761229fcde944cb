"""Charges orders exactly once, with workers that are killed all the time.

::

    python examples/payments.py
    python examples/payments.py --orders 1000 --url postgresql://localhost/mydb

Three worker processes charge the same orders at a payment server on this machine. They
are killed with ``kill -9`` at random, and started again. Orders above a limit need an
approval, which another process gives or refuses. Afterwards the payment server's own
books show how often each order was charged. The server knows nothing of cpkit.

The example runs three times on the same orders:

``none``    without the ledger: look whether it was charged, charge, note it down
``verify``  with the ledger; ``verify`` looks up at the server what a killed worker did
``key``     with the ledger; the server gets the effect's key and ignores repetitions

The exit status is 0 if both runs with the ledger charged every approved order exactly
once, and no other order. The example needs a POSIX system.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from cpkit import Checkpointer, open_checkpointer
from cpkit.effects import (
    ApprovalRequest,
    Effect,
    EffectDenied,
    EffectLedger,
    Landed,
    NotLanded,
)

WORKERS = 3
CONCURRENT = 16
LIMIT = 1500
"""Dollars that may be charged without an approval."""
STALE_AFTER = 4.0
"""Seconds without a heartbeat until a worker counts as dead. A charge takes far less. A
worker that was only paused for longer could still charge after `verify` looked."""


@dataclass(frozen=True)
class Order:
    """An order to charge; the same number is always the same order."""

    number: int

    @property
    def amount(self) -> int:
        return random.Random(self.number).randrange(5, 2000)

    @property
    def needs_approval(self) -> bool:
        return self.amount > LIMIT

    @property
    def refused(self) -> bool:
        """Whether the approver will deny this order."""
        return self.needs_approval and self.number % 5 == 0

    @property
    def args(self) -> dict[str, Any]:
        return {"order": self.number, "amount": self.amount}

    @classmethod
    def of(cls, effect: Effect | ApprovalRequest) -> Order:
        number = effect.args["order"]
        assert isinstance(number, int)
        return cls(number)


# The payment server


@dataclass
class Bank:
    """A payment server on loopback, with its own books.

    A request is a line of JSON, and so is its answer. The server repeats a charge as
    often as it is requested, unless the request has a key that was used before. It
    pauses before and after it writes to its books, and finishes a request even if the
    sender died.
    """

    books: list[dict[str, Any]] = field(default_factory=list)
    approved: set[int] = field(default_factory=set)
    unapproved: int = 0

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if line := await reader.readline():  # empty if the sender died first
            request = json.loads(line)
            await asyncio.sleep(random.uniform(0, 0.02))
            answer = getattr(self, request.pop("action"))(**request)
            await asyncio.sleep(random.uniform(0, 0.02))
            writer.write(json.dumps(answer).encode() + b"\n")

        writer.close()

    def charge(self, order: int, amount: int, key: str | None) -> int:
        for number, entry in enumerate(self.books):
            if key is not None and entry["key"] == key:
                return number

        if amount > LIMIT and order not in self.approved:
            self.unapproved += 1

        self.books.append({"order": order, "amount": amount, "key": key})
        return len(self.books) - 1

    def find(self, order: int) -> int | None:
        found = (n for n, entry in enumerate(self.books) if entry["order"] == order)
        return next(found, None)

    def approve(self, order: int) -> None:
        self.approved.add(order)


async def ask(port: int, **request: Any) -> Any:
    """Ask the payment server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(json.dumps(request).encode() + b"\n")
    answer = json.loads(await reader.readline())
    writer.close()
    return answer


# A worker; it may be killed at any line below


async def work(url: str, thread: str, port: int, how: str, orders: list[Order]) -> None:
    """Charge all orders, several at a time, in random order."""
    # Each takeover logs a warning for a person; this example has hundreds of them.
    logging.getLogger("cpkit.effects").setLevel(logging.ERROR)
    random.shuffle(orders)
    slots = asyncio.Semaphore(CONCURRENT)

    async with open_checkpointer(url) as cp:
        charge = (
            _without_ledger(cp, thread, port)
            if how == "none"
            else _with_ledger(cp, thread, port, how)
        )
        print("ready", flush=True)

        async def charge_in_slot(order: Order) -> None:
            async with slots:
                await charge(order)

        async with asyncio.TaskGroup() as group:
            for order in orders:
                group.create_task(charge_in_slot(order))


def _with_ledger(
    cp: Checkpointer[Any], thread: str, port: int, how: str
) -> Callable[[Order], Awaitable[object]]:
    """Charge through the ledger. This is the part to copy."""
    ledger = EffectLedger(
        cp,
        requires_approval=lambda effect: Order.of(effect).needs_approval,
        stale_after=STALE_AFTER,
        timeout=60,
    )

    async def charge(effect: Effect) -> Any:
        key = effect.key if how == "key" else None
        return await ask(port, action="charge", key=key, **effect.args)

    async def verify(effect: Effect) -> Landed | NotLanded:
        found = await ask(port, action="find", order=effect.args["order"])
        return NotLanded() if found is None else Landed(found)

    async def run(order: Order) -> object:
        try:
            return await ledger.run(
                thread,
                "charge",
                order.args,
                charge,
                key_fields=["order"],
                verify=verify if how == "verify" else None,
            )
        except EffectDenied as denial:
            return denial

    return run


def _without_ledger(
    cp: Checkpointer[Any], thread: str, port: int
) -> Callable[[Order], Awaitable[object]]:
    """Charge as many agents do: look, charge, note it down."""

    async def run(order: Order) -> object:
        data = await cp.load(thread)

        if data is not None and str(order.number) in data.extra:
            return None

        number = await ask(port, action="charge", key=None, **order.args)
        await cp.save_extra(thread, {str(order.number): number})
        return number

    return run


async def decide(url: str, thread: str, port: int) -> None:
    """Approve and deny requests, in place of a person."""
    parent = os.getppid()

    async with open_checkpointer(url) as cp:
        ledger = EffectLedger(cp)
        print("ready", flush=True)

        while os.getppid() == parent:  # changes if the parent process was killed
            for request in await ledger.pending(thread):
                order = Order.of(request)

                if order.refused:
                    await ledger.deny(request.key, reason="too much")
                else:
                    # The server learns it first, so it can detect an early charge.
                    await ask(port, action="approve", order=order.number)
                    await ledger.approve(request.key, by="a person")

            await asyncio.sleep(0.1)


# The parent process: starts the others, kills workers, and reads the books


@dataclass
class Summary:
    """What the books show about a run."""

    how: str
    kills: int
    charged: int
    twice: int
    never: int
    unapproved: int
    refused: int
    seconds: float

    @property
    def good(self) -> bool:
        return not (self.twice or self.never or self.unapproved or self.refused)

    def __str__(self) -> str:
        return (
            f"{self.how:8}{self.kills:7}{self.charged:10}{self.twice:8}{self.never:8}"
            f"{self.unapproved:13}{self.refused:10}{self.seconds:10.1f}"
        )


HEADER = "ledger    kills   charged   twice   never   unapproved   refused   seconds"


async def run(how: str, url: str, orders: list[Order], kills: int) -> Summary:
    """Run workers until all orders are done, and kill some of them meanwhile."""
    began = time.monotonic()
    bank = Bank()
    thread = f"payments-{uuid4().hex}"

    async with AsyncExitStack() as stack:
        server = await asyncio.start_server(bank.serve, "127.0.0.1", 0)
        await stack.enter_async_context(server)
        port = server.sockets[0].getsockname()[1]
        command = [url, thread, str(port), how, str(len(orders))]
        approver = await _start("decide", command)
        stack.push_async_callback(_stop, approver)

        async with asyncio.TaskGroup() as group:
            killer = _Killer(kills, bank, len(orders))
            workers = [
                group.create_task(_until_done(command, killer)) for _ in range(WORKERS)
            ]
            watcher = group.create_task(_watch(approver))
            done = sum(await asyncio.gather(*workers))
            watcher.cancel()

    times = Counter(entry["order"] for entry in bank.books)
    return Summary(
        how,
        done,
        sum(times[order.number] > 0 for order in orders),
        sum(times[order.number] > 1 for order in orders),
        sum(not times[o.number] and not o.refused for o in orders),
        bank.unapproved,
        sum(times[order.number] > 0 and order.refused for order in orders),
        time.monotonic() - began,
    )


class _Killer:
    """Kills workers at random moments, while orders are left."""

    def __init__(self, kills: int, bank: Bank, orders: int) -> None:
        self.left = kills
        self._bank = bank
        self._orders = orders

    async def strike(self, worker: asyncio.subprocess.Process) -> None:
        """Kill the worker after some more charges, unless it ends first."""
        start = len(self._bank.books)
        share = max(1, self._orders // 10)

        # Counts charges and not time, so that slow stores get as many kills.
        while len(self._bank.books) < start + random.randrange(1, share + 1):
            await asyncio.sleep(random.uniform(0, 0.05))

            if worker.returncode is not None or self.left == 0:
                return

        self.left -= 1
        worker.send_signal(signal.SIGKILL)


async def _until_done(command: list[str], killer: _Killer) -> int:
    """Restart a worker until it finishes; return how often it was killed."""
    kills = 0

    while True:
        worker = await _start("work", command)

        try:
            async with asyncio.TaskGroup() as group:
                strike = group.create_task(killer.strike(worker))
                status = await worker.wait()
                strike.cancel()
        finally:
            await _stop(worker)

        if status == 0:
            return kills

        if status != -signal.SIGKILL:
            raise RuntimeError(f"a worker ended with status {status}")

        kills += 1


async def _watch(approver: asyncio.subprocess.Process) -> None:
    """Raise when the approver ends: without it, the workers would wait for ever."""
    raise RuntimeError(f"the approver ended with status {await approver.wait()}")


async def _start(role: str, command: list[str]) -> asyncio.subprocess.Process:
    """Start a process, and wait until it opened the store."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, f"--role={role}", *command, stdout=-1
    )
    assert process.stdout is not None
    await process.stdout.readline()
    return process


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()

    await process.wait()


async def show(args: argparse.Namespace) -> bool:
    """Run all modes, and print what the books show."""
    orders = [Order(number) for number in range(args.orders)]
    good = True

    with tempfile.TemporaryDirectory() as folder:
        url = args.url or f"sqlite:///{folder}/payments.db"
        refused = sum(order.refused for order in orders)
        above = sum(order.needs_approval for order in orders)
        print(
            f"{len(orders)} orders, {above} of them above {LIMIT} dollars: "
            f"{above - refused} will be approved and {refused} refused.\n"
            f"So {len(orders) - refused} orders must be charged. In the columns after "
            f"that, every number above 0 is a mistake.\n\n{HEADER}",
            flush=True,
        )

        for how in args.ledger:
            summary = await run(how, url, list(orders), args.kills)
            good = good and (summary.good or how == "none")
            print(summary, flush=True)

    if not good:
        print("\nThe books show mistakes of the ledger.")
    elif args.ledger != ["none"]:
        print(
            "\nThe books show that with the ledger every order was charged exactly "
            "once, and none without its approval."
        )

    return good


def main() -> None:
    """Run the example, or with ``--role`` one of its child processes."""
    if len(sys.argv) > 1 and sys.argv[1].startswith("--role="):
        url, thread, port, how, count = sys.argv[2:]
        orders = [Order(number) for number in range(int(count))]

        if sys.argv[1] == "--role=work":
            asyncio.run(work(url, thread, int(port), how, orders))
        else:
            asyncio.run(decide(url, thread, int(port)))

        return

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default=os.environ.get("CPKIT_URL"))
    parser.add_argument("--orders", type=int, default=300)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument(
        "--ledger",
        nargs="+",
        choices=["none", "verify", "key"],
        default=["none", "verify", "key"],
    )
    sys.exit(0 if asyncio.run(show(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
