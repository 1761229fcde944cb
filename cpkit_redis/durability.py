"""What the server's settings make of an acknowledged write.

Sources: redis.io, "Redis persistence", "Key eviction" and "Redis replication".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cpkit.records import Durability, Survives
from cpkit_redis.operations import pairs

__all__ = ["QUESTIONS", "durability_of", "settings_of"]

_NAMES = (b"appendonly", b"appendfsync", b"save", b"maxmemory", b"maxmemory-policy")

QUESTIONS = [*((b"CONFIG", b"GET", name) for name in _NAMES), (b"INFO",)]
"""Commands that ask for the settings; a service or an ACL may deny any of them."""

# What INFO tells too, where CONFIG is denied.
_IN_INFO = {
    b"aof_enabled": b"appendonly",
    b"maxmemory": b"maxmemory",
    b"maxmemory_policy": b"maxmemory-policy",
}


def settings_of(answers: Sequence[Any]) -> dict[bytes, bytes]:
    """Return the settings that the answers to `QUESTIONS` tell, and INFO's fields."""
    *configuration, information = answers
    settings: dict[bytes, bytes] = {}

    if not isinstance(information, Exception):
        for line in information.splitlines():
            name, _, value = line.partition(b":")
            settings[_IN_INFO.get(name, name)] = value

    for answer in configuration:
        if not isinstance(answer, Exception):
            settings.update(pairs(answer))

    return settings


def durability_of(settings: Mapping[bytes, bytes]) -> Durability:
    """Return what an acknowledgement is worth, with what could not be read in words."""
    logged = _logged(settings)
    survives, words = logged.survives, logged.words
    limit, policy = settings.get(b"maxmemory"), settings.get(b"maxmemory-policy")

    if policy is None:
        words += "; whether it evicts when memory is full could not be read"
    elif policy.startswith(b"allkeys") and limit != b"0":
        # The volatile policies take only keys that expire, and none of ours does.
        survives = Survives.NONE
        words += f"; when memory is full it evicts anything ({policy.decode()})"

    if settings.get(b"connected_slaves", b"0") != b"0":
        words += "; a failover to a replica can lose acknowledged writes"

    return Durability(survives, {}, (words,))


def _logged(settings: Mapping[bytes, bytes]) -> Durability:
    appendonly = settings.get(b"appendonly")
    appendfsync = settings.get(b"appendfsync")

    if appendonly is None:
        advice = (
            "whether the server has an append-only file could not be read "
            "(it denies CONFIG and INFO)"
        )
        return Durability(Survives.NONE, {}, (advice,))

    if appendonly not in (b"yes", b"1"):
        snapshots = settings.get(b"save") != b""
        since = " since the last snapshot" if snapshots else ""
        advice = (
            f"a restart of the server loses everything{since} (appendonly no): "
            "CONFIG SET appendonly yes, and in redis.conf"
        )
        return Durability(Survives.NONE, {}, (advice,))

    if appendfsync == b"always":
        advice = "the append-only file is synced before the answer (appendfsync always)"
        return Durability(Survives.MACHINE, {}, (advice,))

    if appendfsync == b"everysec":
        advice = (
            "the append-only file is synced every second (appendfsync everysec): a "
            "power cut, or a kill of the server while its disk stalls, can lose about "
            "the last second: CONFIG SET appendfsync always"
        )
        return Durability(Survives.PROCESS, {}, (advice,))

    if appendfsync == b"no":
        advice = (
            "the append-only file is synced when the system does (appendfsync no): a "
            "power cut can lose the last half minute: CONFIG SET appendfsync everysec"
        )
        return Durability(Survives.PROCESS, {}, (advice,))

    advice = (
        "there is an append-only file, and how often it is synced could not be read "
        "(the server denies CONFIG): a power cut can lose the last writes"
    )
    return Durability(Survives.PROCESS, {}, (advice,))
