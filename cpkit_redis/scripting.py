"""Scripts: how they are put together, and how they are called."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError

from cpkit.errors import BackendUnavailable
from cpkit_redis.wire import Wire

__all__ = ["Script", "call_scripts"]


class Script:
    """A script, put together from parts in the folder ``scripts``.

    One call of it runs any number of operations of one kind, one after another, each
    with arguments of its own.
    """

    def __init__(self, *parts: str) -> None:
        folder = files("cpkit_redis").joinpath("scripts")
        self._text = b"".join(
            folder.joinpath(f"{part}.lua").read_bytes()
            for part in ("names", *parts, "each")
        )
        digest = hashlib.sha1(self._text, usedforsecurity=False).hexdigest()
        self._name = digest.encode()

    def command(
        self, base: bytes, operations: Sequence[Sequence[bytes]], *, whole: bool
    ) -> list[bytes]:
        """Return the command that runs the operations.

        ``base`` is what all keys of the store start with. The command names the script
        or has the ``whole`` of it, for a server that does not know it.
        """
        head = (b"EVAL", self._text) if whole else (b"EVALSHA", self._name)
        command = [*head, b"1", base]

        for arguments in operations:
            command.append(b"%d" % len(arguments))
            command += arguments

        return command


async def call_scripts(
    wire: Wire,
    base: bytes,
    calls: Sequence[tuple[Script, Sequence[Sequence[bytes]]]],
    *,
    again: bool,
) -> list[list[Any]]:
    """Call scripts, each for its operations, in one round trip.

    Returns for each call an answer for each of its operations, errors included; an
    error of the call is the answer for all of them. A call whose script the server does
    not know has not run, and is made once more with the script itself.
    """
    answers = await _asked(wire, base, calls, whole=False, again=again)
    left = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]

    if left:
        unknown = [calls[i] for i in left]
        found = await _asked(wire, base, unknown, whole=True, again=again)

        for i, answer in zip(left, found, strict=True):
            answers[i] = answer

    return [
        [answer] * len(operations) if isinstance(answer, Exception) else answer
        for (_, operations), answer in zip(calls, answers, strict=True)
    ]


async def _asked(
    wire: Wire,
    base: bytes,
    calls: Sequence[tuple[Script, Sequence[Sequence[bytes]]]],
    *,
    whole: bool,
    again: bool,
) -> list[Any]:
    commands = [
        script.command(base, operations, whole=whole) for script, operations in calls
    ]

    try:
        return await wire.ask(*commands, again=again)
    except BackendUnavailable as exc:
        return [exc] * len(calls)
