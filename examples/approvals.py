"""An approval that survives a killed process, and wakes the run.

For each store: an agent wants to wire money and asks for an approval; its process is
killed with SIGKILL; a person approves from a second terminal (``cpkit approve``); a
worker (``cpkit worker``) wakes and finishes. The bank's books show one payment.

    python examples/approvals.py                     # SQLite and files
    python examples/approvals.py redis://localhost   # any URLs
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cpkit import JsonValue, open_checkpointer
from cpkit.effects import ApprovalRequest, Effect, EffectLedger
from cpkit.lease import Lease, thread_lease

BANK = Path(os.environ.get("BANK", "bank.txt"))
THREAD = os.environ.get("THREAD", "payroll")


# The agent


async def agent(cp: Any, lease: Lease) -> None:
    """Pay a salary, once a person approved it. A worker calls this function."""
    ledger = EffectLedger(
        cp, requires_approval=lambda effect: True, on_approval_required=ask_people
    )
    args: dict[str, JsonValue] = {"to": "ann", "amount": 900}
    # Under a worker this does not wait for people: the decision wakes the worker.
    receipt = await ledger.run(lease.thread_id, "wire", args, wire)
    data = await lease.load()
    version = 0 if data is None else data.version
    await cp.append(lease.thread_id, [{"paid": receipt}], expected_version=version)


def wire(effect: Effect) -> str:
    """Send the money; the bank's books are a file."""
    with BANK.open("a") as books:
        books.write(f"{effect.key} {effect.args['amount']}\n")

    return "wired"


def ask_people(request: ApprovalRequest) -> None:
    """Send a mail, a chat message, or here: print a line."""
    print(f"please decide: {request.tool} {dict(request.args)}: {request.key}")
    sys.stdout.flush()


async def first_run(url: str) -> None:
    """Run the agent in a process of its own, which waits for the approval."""
    async with (
        open_checkpointer(url) as cp,
        thread_lease(cp, THREAD, stale_after=1) as lease,
    ):
        await agent(cp, lease)


# The story: three processes, one after the other


async def tell(url: str) -> None:
    """Kill the agent while it waits, approve its request, and let a worker finish."""
    store = url.partition(":")[0]
    began = time.monotonic()

    with tempfile.TemporaryDirectory() as folder:
        bank = Path(folder) / "bank.txt"
        here = str(Path(__file__).parent)
        # A new thread each time, because the store keeps what an earlier run paid.
        thread = f"payroll-{os.urandom(4).hex()}"
        env = {**os.environ, "BANK": str(bank), "PYTHONPATH": here, "THREAD": thread}

        asking = await _start(env, __file__, "--first-run", url)
        key = (await _line(asking)).rpartition(" ")[2]
        asking.send_signal(signal.SIGKILL)
        await asking.wait()
        print(f"{store}: the agent asked for {key[:8]}, and its process was killed")

        work = ["worker", url, f"{Path(__file__).stem}:agent", "--prefix", thread]
        worker = await _start(env, "-m", "cpkit", *work, "--stale-after", "1")

        try:
            decide = ["approve", url, key[:8], "--by", "ann"]
            person = await _start(env, "-m", "cpkit", *decide)
            print(f"{store}: {(await _line(person))[:32]}")
            await person.wait()
            await _paid(url, thread)
        finally:
            worker.terminate()
            await worker.wait()

        books = bank.read_text().splitlines()

    assert len(books) == 1, books
    seconds = time.monotonic() - began
    print(f"{store}: a worker finished, one payment in the books, {seconds:.1f} s")


async def _paid(url: str, thread: str) -> None:
    """Wait until the agent has written its last message."""
    async with open_checkpointer(url) as cp, cp.watch(thread) as changes:
        while (data := await cp.load(thread)) is None or not data.messages:
            await anext(changes)


async def _start(env: dict[str, str], *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE, env=env
    )


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def main(urls: list[str]) -> None:
    """Tell the story on all stores at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        urls = urls or [f"sqlite:///{folder}/agent.db", f"file://{folder}/agent"]

        async with asyncio.timeout(60):
            await asyncio.gather(*(tell(url) for url in urls))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first-run"]:
        asyncio.run(first_run(sys.argv[2]))
    else:
        asyncio.run(main(sys.argv[1:]))
