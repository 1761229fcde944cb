"""How the content of a restored thread gets to the server: in parts, as a copy.

One operation of the script then renames the copy's keys to those of the thread. The
copy of a process that died expires.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeAlias

from cpkit.driver import Restore
from cpkit_redis.errors import failure

__all__ = ["copy_thread"]

Content: TypeAlias = list[bytes] | dict[bytes, bytes]

# Bytes, and entries of a list or hash, in one command: Redis before 7 takes a million
# arguments, and the server does nothing else meanwhile.
_PART, _ENTRIES = 1024 * 1024, 10_000


async def copy_thread(
    ask: Callable[..., Awaitable[list[Any]]],
    write: Restore,
    copy: bytes,
    lifetime: int,
    token: bytes,
) -> bytes:
    """Write the thread under keys that start with ``copy``.

    Returns how many entries each key has, as the operation ``restore`` takes it. The
    keys live ``lifetime`` seconds. Each call has the ``token``.
    """
    found = _contents(write, token)
    commands: list[Sequence[Any]] = []

    for kind, content in found.items():
        for command in _fill_commands(copy + kind, content):
            commands += [command, ("EXPIRE", copy + kind, lifetime)]

    for answer in await ask(copy, *commands):
        if isinstance(answer, Exception):
            raise failure(answer) from answer

    return b"".join(b"%b%d" % (kind, len(one)) for kind, one in found.items())


def _contents(write: Restore, token: bytes) -> dict[bytes, Content]:
    """Return what stands under each key of a restored thread, by the key's letter."""
    names, times = (b"created", b"updated"), (write.created_at, write.updated_at)
    calls: dict[bool, dict[bytes, bytes]] = {True: {}, False: {}}

    if write.created_at is None:
        changes = [call.issued_at for call in write.calls]
        latest = max(changes + [call.resolved_at or 0 for call in write.calls])
        names, times = (b"first", b"last"), (min(changes), latest)

    for sequence, call in enumerate(write.calls, 1):
        fields = (
            sequence,
            call.attempt,
            call.issued_at,
            call.idempotency_key,
            call.tool_name,
            token,
            call.status,
            call.resolved_at or "",
            b"" if call.erased else call.args,
            call.result or b"",
        )
        is_pending = call.status == "issued" and not call.erased
        calls[is_pending][call.call_id.encode()] = b"\0".join(map(_bytes, fields))

    return {
        b"m": write.bodies,
        b"x": dict(write.items),
        b"t": dict(zip(names, map(_bytes, times), strict=True)),
        b"p": calls[True],
        b"c": calls[False],
    }


def _fill_commands(key: bytes, content: Content) -> Iterator[list[bytes]]:
    """Yield the commands that write a list or a hash, in parts of a limited size."""
    is_hash = isinstance(content, dict)
    head = [b"HSET" if is_hash else b"RPUSH", key]
    command, size = [*head], 0

    for entry in content.items() if isinstance(content, dict) else zip(content):
        command += entry
        size += sum(map(len, entry))

        if size > _PART or len(command) > _ENTRIES:
            yield command
            command, size = [*head], 0

    if len(command) > 2:
        yield command


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
