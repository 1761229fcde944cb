"""Another process that uses a store: it obeys one command a line, in JSON.

Run as ``python -m tests.file.worker``; `Worker` is its handle in the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cpkit import BackendUnavailable, ToolCall
from cpkit_file import FileCheckpointer

__all__ = ["NOBODY", "Worker"]

Store = FileCheckpointer[Any]

NOBODY = 65534


class Worker:
    """A worker process, ready when it is made; `close` ends it whatever it is doing."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.file.worker"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: str, *args: Any) -> None:
        """Start a command; `answer` waits for what it gives."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *args]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Return what the next line says."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, command: str, *args: Any) -> Any:
        self.tell(command, *args)
        return self.answer()

    def kill(self) -> list[Any]:
        """Kill it with SIGKILL, and return what it had still said by then."""
        assert self.process.stdout is not None
        self.process.kill()
        said = self.process.stdout.read()
        self.process.wait()
        return [json.loads(line) for line in said.splitlines() if line]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def say(value: Any) -> None:
    # One write a line: a reader never sees half of one, even after a kill.
    os.write(1, (json.dumps(value) + "\n").encode())


async def append_one(path: str) -> int:
    """Open the store, append one message, and return the version."""
    async with Store(path) as cp:
        return await cp.append("shared", [{"by": os.getpid()}])


async def begin_anew(path: str) -> int:
    """Delete the thread ``t``, append one message to it, and return the version."""
    async with Store(path) as cp:
        await cp.delete_thread("t", forget_keys=True)
        return await cp.append("t", [{"by": os.getpid()}])


async def mixed(path: str, name: str, count: int) -> dict[str, Any]:
    """Append, merge and claim in turn; return versions and the keys that were won."""
    versions, won = [], []

    async with Store(path) as cp:
        for i in range(count):
            versions.append(await cp.append("shared", [{"by": name, "i": i}]))
            await cp.save_extra("shared", {f"{name} {i}": i, "last": name})
            call = ToolCall(f"{name} {i}", "tool", {"i": i}, f"key {i}")

            if await cp.record_issued("shared", call) is None:
                won.append(call.idempotency_key)

    return {"versions": versions, "won": won}


async def contend(path: str, name: str, count: int) -> list[int]:
    """Claim one key again and again, let go of it, and return the attempts."""
    attempts: list[int] = []

    async with Store(path) as cp:
        while len(attempts) < count:
            call_id = f"{name} {len(attempts)} {os.urandom(4).hex()}"

            if await cp.record_issued(name, ToolCall(call_id, "t", {}, "key")) is None:
                record = await cp.record_result(name, call_id, None, success=False)
                attempts.append(record.attempt)

    return attempts


async def write_for_ever(path: str, name: str) -> None:
    """Write in turn all that can be written, and say each acknowledgement."""
    async with Store(path) as cp:
        for i in range(1_000_000):
            body: Any = [{"by": name, "i": i, "half": half} for half in (0, 1)]
            say(["append", await cp.append("t", body)])
            await cp.save_extra("t", {"by": name, "i": i})
            say(["extra", name, i])
            call = ToolCall(f"{name} {i}", "tool", {}, f"key {name} {i}")
            await cp.record_issued("t", call)
            say(["issued", call.call_id])
            await cp.record_result("t", call.call_id, i)
            say(["completed", call.call_id])


async def append_big_for_ever(path: str) -> None:
    """Append messages so large that a kill comes in the middle of one."""
    async with Store(path, durability="normal") as cp:
        for i in range(1_000_000):
            version = await cp.append("t", [{"i": i, "pad": "x" * 4_000_000}])
            say(version)


async def use_unprivileged(path: str) -> dict[str, str]:
    """Say what fails for a user whom permissions bind (root's are not)."""
    # What is needed is loaded while that is still allowed.
    with TemporaryDirectory() as folder:
        await append_one(folder)

    if os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)

    said = {}

    async with Store(path) as cp:
        uses: dict[str, Coroutine[Any, Any, Any]] = {
            "load": cp.load("t"),
            "replay": cp.record_issued("t", ToolCall("c", "tool", {}, "key")),
            "append": cp.append("t", [{}]),
            "new thread": cp.append("new", [{}]),
            "claim": cp.record_issued("t", ToolCall("d", "tool", {}, "free")),
            "delete": cp.delete_thread("t"),
        }

        for name, use in uses.items():
            try:
                said[name] = repr(await use)
            except BackendUnavailable as exc:
                said[name] = str(exc)

    return said


async def open_unprivileged(path: str) -> str:
    """Say how opening fails for such a user."""
    try:
        await use_unprivileged(path)
    except BackendUnavailable as exc:
        return str(exc)

    return "opened"


async def fill_up_to(path: str, limit: int) -> dict[str, Any]:
    """Write under a limit on the size of files, lift it, and write again."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    acknowledged = 0
    failure: BackendUnavailable | None = None

    async with Store(path) as cp:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

        try:
            for _ in range(10_000):
                acknowledged = await cp.append("t", [{"pad": "x" * 1000}] * 3)
        except BackendUnavailable as exc:
            failure = exc

        data = await cp.load("t")
        size = sum(file.stat().st_size for file in Path(path, "threads").iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        after = await cp.append("t", [{}])

    return {
        "acknowledged": acknowledged,
        "failure": str(failure),
        "maybe_applied": failure and failure.maybe_applied,
        "loaded": data.version if data else 0,
        "size": size,
        "after": after,
    }


COMMANDS: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
    command.__name__: command
    for command in (
        append_big_for_ever,
        append_one,
        begin_anew,
        contend,
        fill_up_to,
        mixed,
        open_unprivileged,
        use_unprivileged,
        write_for_ever,
    )
}


def main() -> None:
    for line in sys.stdin:
        command, *args = json.loads(line)

        try:
            say(asyncio.run(COMMANDS[command](*args)))
        except Exception as exc:
            say({"error": repr(exc)})


if __name__ == "__main__":
    main()
