"""Orders are charged exactly once, by workers that are killed all the time.

::

    python examples/payments.py
    python examples/payments.py --orders 1000 --url postgresql://localhost/mydb

Three worker processes charge the same orders at a payment server on this machine, and
are killed with ``kill -9`` at random and started again. Orders above a limit need an
approval, which another process gives or refuses. In the end the payment server's own
books, of which cpkit knows nothing, say who was charged how often.

It runs three times on the same orders:

``none``    without the ledger: look whether it was charged, charge, take a note
``verify``  with the ledger; what a killed worker left is looked up at the server
``key``     with the ledger; its key goes to the server, which knows a repetition by it

The exit status is 1 unless both runs with the ledger charged every order that they
should have exactly once, and no other. It needs a POSIX system.
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
AT_ONCE = 16
LIMIT = 1500
"""Dollars that may be charged without asking."""
STALE_AFTER = 4.0
"""Seconds of silence that mean death. Far more than a charge takes: a worker that was
merely paused for longer could still charge after `verify` has looked."""


@dataclass(frozen=True)
class Order:
    """What there is to be charged; the same orders each time."""

    number: int

    @property
    def amount(self) -> int:
        return random.Random(self.number).randrange(5, 2000)

    @property
    def needs_approval(self) -> bool:
        return self.amount > LIMIT

    @property
    def refused(self) -> bool:
        """What the person at the other end will say."""
        return self.needs_approval and self.number % 5 == 0

    @property
    def args(self) -> dict[str, Any]:
        return {"order": self.number, "amount": self.amount}

    @classmethod
    def of(cls, asked: Effect | ApprovalRequest) -> Order:
        number = asked.args["order"]
        assert isinstance(number, int)
        return cls(number)


# The payment server


@dataclass
class Bank:
    """A payment server on loopback, with its own books.

    A request is a line of JSON, and so is its answer. It does what it is told as often
    as it is told, unless the request has a key that it has seen. It takes its time
    before and after an entry in its books, and finishes a request whose sender died.
    """

    books: list[dict[str, Any]] = field(default_factory=list)
    approved: set[int] = field(default_factory=set)
    unapproved: int = 0

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if line := await reader.readline():  # else its sender died before it asked
            request = json.loads(line)
            await asyncio.sleep(random.uniform(0, 0.02))
            answer = getattr(self, request.pop("do"))(**request)
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


# A worker, which may be killed anywhere in here


async def work(url: str, thread: str, port: int, how: str, orders: list[Order]) -> None:
    """Charge all orders, many at a time, in an order of its own."""
    # Each takeover is a warning, for somebody to look at; here there are hundreds.
    logging.getLogger("cpkit.effects").setLevel(logging.ERROR)
    random.shuffle(orders)
    turns = asyncio.Semaphore(AT_ONCE)

    async with open_checkpointer(url) as cp:
        charge = (
            _naively(cp, thread, port)
            if how == "none"
            else _once(cp, thread, port, how)
        )
        print("ready", flush=True)

        async def in_turn(order: Order) -> None:
            async with turns:
                await charge(order)

        async with asyncio.TaskGroup() as group:
            for order in orders:
                group.create_task(in_turn(order))


def _once(
    cp: Checkpointer[Any], thread: str, port: int, how: str
) -> Callable[[Order], Awaitable[object]]:
    """Charge through the ledger: this is the part to copy."""
    ledger = EffectLedger(
        cp,
        requires_approval=lambda effect: Order.of(effect).needs_approval,
        stale_after=STALE_AFTER,
        timeout=60,
    )

    async def charge(effect: Effect) -> Any:
        key = effect.key if how == "key" else None
        return await ask(port, do="charge", key=key, **effect.args)

    async def verify(effect: Effect) -> Landed | NotLanded:
        found = await ask(port, do="find", order=effect.args["order"])
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


def _naively(
    cp: Checkpointer[Any], thread: str, port: int
) -> Callable[[Order], Awaitable[object]]:
    """Charge as many an agent does: look, act, take a note."""

    async def run(order: Order) -> object:
        data = await cp.load(thread)

        if data is not None and str(order.number) in data.extra:
            return None

        number = await ask(port, do="charge", key=None, **order.args)
        await cp.save_extra(thread, {str(order.number): number})
        return number

    return run


async def decide(url: str, thread: str, port: int) -> None:
    """Be the person who approves and refuses, in a process of their own."""
    parent = os.getppid()

    async with open_checkpointer(url) as cp:
        ledger = EffectLedger(cp)
        print("ready", flush=True)

        while os.getppid() == parent:  # else the one who started it was killed
            for request in await ledger.pending(thread):
                order = Order.of(request)

                if order.refused:
                    await ledger.deny(thread, request.key, reason="too much")
                else:
                    # The server is told first, so its books can tell what came early.
                    await ask(port, do="approve", order=order.number)
                    await ledger.approve(thread, request.key, by="a person")

            await asyncio.sleep(0.1)


# The one who starts them all, kills them, and reads the books


@dataclass
class Verdict:
    """What the books say about a run."""

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


async def run(how: str, url: str, orders: list[Order], kills: int) -> Verdict:
    """Run the workers to their end, whatever happens to them on the way."""
    began = time.monotonic()
    bank = Bank()
    thread = f"payments-{uuid4().hex}"

    async with AsyncExitStack() as stack:
        server = await asyncio.start_server(bank.serve, "127.0.0.1", 0)
        await stack.enter_async_context(server)
        port = server.sockets[0].getsockname()[1]
        command = [url, thread, str(port), how, str(len(orders))]
        person = await _start("decide", command)
        stack.push_async_callback(_stop, person)

        async with asyncio.TaskGroup() as group:
            killer = _Killer(kills, bank, len(orders))
            ends = [
                group.create_task(_until_done(command, killer)) for _ in range(WORKERS)
            ]
            there = group.create_task(_stays(person))
            done = sum(await asyncio.gather(*ends))
            there.cancel()

    times = Counter(entry["order"] for entry in bank.books)
    return Verdict(
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
    """Kills workers while there is work left, each at a moment of its own."""

    def __init__(self, kills: int, bank: Bank, orders: int) -> None:
        self.left = kills
        self._bank = bank
        self._orders = orders

    async def strike(self, worker: asyncio.subprocess.Process) -> None:
        """Kill the worker after a while, unless it is done by then."""
        start = len(self._bank.books)
        share = max(1, self._orders // 10)

        # By progress rather than by time, so that slow stores are hit as hard.
        while len(self._bank.books) < start + random.randrange(1, share + 1):
            await asyncio.sleep(random.uniform(0, 0.05))

            if worker.returncode is not None or self.left == 0:
                return

        self.left -= 1
        worker.send_signal(signal.SIGKILL)


async def _until_done(command: list[str], killer: _Killer) -> int:
    """Start a worker again until it has come to its end; return how often it died."""
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


async def _stays(person: asyncio.subprocess.Process) -> None:
    """Raise when the process ends: without it all would wait for ever."""
    raise RuntimeError(f"the approver ended with status {await person.wait()}")


async def _start(role: str, command: list[str]) -> asyncio.subprocess.Process:
    """Start a process, and wait until it has opened the store."""
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
    """Run it all, and print what the books say."""
    orders = [Order(number) for number in range(args.orders)]
    good = True

    with tempfile.TemporaryDirectory() as folder:
        url = args.url or f"sqlite:///{folder}/payments.db"
        refused = sum(order.refused for order in orders)
        asked = sum(order.needs_approval for order in orders)
        print(
            f"{len(orders)} orders, {asked} of them above {LIMIT} dollars: "
            f"{asked - refused} will be approved and {refused} refused.\n"
            f"So {len(orders) - refused} orders are to be charged. "
            f"In the columns after that, each number is a mistake.\n\n{HEADER}",
            flush=True,
        )

        for how in args.ledger:
            verdict = await run(how, url, list(orders), args.kills)
            good = good and (verdict.good or how == "none")
            print(verdict, flush=True)

    if not good:
        print("\nThe books show what must not be.")
    elif args.ledger != ["none"]:
        print(
            "\nWith the ledger every order was charged exactly once and none "
            "unapproved, by the books."
        )

    return good


def main() -> None:
    """Read the command line: a person's, or that of one of its own processes."""
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
