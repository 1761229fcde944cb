"""What the server's settings make of an acknowledged write.

Sources: redis.io, "Redis persistence", "Key eviction" and "Redis replication".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from cpkit.records import Durability, Survives

SETTINGS = (
    *("appendonly", "appendfsync", "no-appendfsync-on-rewrite", "aof-load-truncated"),
    *("save", "maxmemory", "maxmemory-policy"),
)
"""What to ask CONFIG for; a service or an ACL may deny it."""


_LOSSES = {
    "everysec": "a power loss, or a kill of the server while its disk stalls, can lose "
    "about the last second: CONFIG SET appendfsync always",
    "no": "a power loss can lose the last half minute, because only the operating "
    "system syncs the append-only file: CONFIG SET appendfsync everysec",
    "": "how often the append-only file is synced could not be read, and a power loss "
    "can lose the last writes: allow CONFIG GET to the user",
}
"""What an append-only file that is not synced at once may lose, by ``appendfsync``."""

# Where the file ends inside a transaction, Redis cuts the last command and keeps MULTI:
# the next load takes what was appended since for a part of the transaction.
_CUT = (
    "after a power loss, or a kill of the server in a large write, the server may keep "
    "half of a transaction in its append-only file, and apply it at the restart after "
    "that: CONFIG SET aof-load-truncated no, write it into redis.conf, and run "
    "redis-check-aof --fix if the server then refuses to start"
)


# While a file that was just switched on is written for the first time, nothing is in
# it. INFO says no more than that a file is being written.
_REWRITE = (
    "the server rewrites its append-only file: if that was switched on just now, a "
    "restart loses everything until the rewrite ends (INFO: aof_rewrite_in_progress:0, "
    "aof_rewrite_scheduled:0): open the store again then"
)

_UNSYNCED = (
    "while the server rewrites its append-only file, or saves a snapshot, it does not "
    "sync that file, and a power loss can lose what was written since it began: "
    "CONFIG SET no-appendfsync-on-rewrite no"
)

# From which part of maxmemory on, and behind how many seconds, an operator is told.
_FULL, _LAG = 0.9, 10


def durability_of(
    config: Mapping[str, str], info: Mapping[str, str], in_cluster: bool = False
) -> Durability:
    """Return what an acknowledgement is worth.

    ``in_cluster``: the settings are those of one node. ``config`` has the answers to
    CONFIG GET, ``info`` that to INFO; each is empty where the server denies it.
    """
    settings = {name: config[name] for name in SETTINGS if name in config}

    if info:  # has some of it too
        limits = {one: info.get(one.replace("-", "_"), "") for one in SETTINGS[-2:]}
        settings = {k: v for k, v in limits.items() if v} | settings
        # CONFIG has what is wanted, INFO what is.
        facts = {"0": "no", "1": "yes"}
        wanted = settings.get("appendonly", "no")
        settings["appendonly"] = facts.get(info.get("aof_enabled", ""), wanted)

    survives, advice = Survives.PROCESS, []
    policy = settings.get("maxmemory-policy")

    if "appendonly" not in settings:
        survives = Survives.NONE
        advice.append(
            "whether the server has an append-only file could not be read: "
            "allow CONFIG GET and INFO to the user"
        )
    elif settings["appendonly"] != "yes":
        survives = Survives.NONE
        since = "" if settings.get("save") == "" else " since the last snapshot"
        advice.append(
            f"a restart of the server loses everything{since}: "
            "CONFIG SET appendonly yes, and write it into redis.conf"
        )
    else:
        if settings.get("appendfsync") != "always":
            advice.append(_LOSSES.get(settings.get("appendfsync", ""), _LOSSES[""]))
        elif settings.get("aof-load-truncated") == "no":
            survives = Survives.MACHINE

        if settings.get("no-appendfsync-on-rewrite") == "yes":
            survives = Survives.PROCESS
            advice.append(_UNSYNCED)

        if "1" in (
            info.get("aof_rewrite_in_progress"),
            info.get("aof_rewrite_scheduled"),
        ):
            survives = Survives.NONE
            advice.append(_REWRITE)

        if config and settings.get("aof-load-truncated") != "no":
            advice.append(_CUT)

    if policy is None:
        advice.append(
            "whether the server evicts keys when its memory is full could not be read: "
            "allow INFO to the user"
        )
    elif policy.startswith("allkeys") and settings.get("maxmemory") != "0":
        # The volatile policies evict only keys that expire.
        survives = Survives.NONE
        advice.append(
            f"the server evicts any key when its memory is full ({policy}): "
            "CONFIG SET maxmemory-policy noeviction"
        )

    if in_cluster:
        # The replica takes over while the killed node still has its file.
        survives = Survives.NONE
        advice.append(
            "a failover of the cluster loses the last acknowledged writes, because a "
            "node answers before its replicas have them; without a failover the other "
            "settings decide (a store that must not lose any is Postgres)"
        )
    elif info.get("connected_slaves", "0") != "0":
        advice.append(
            "a failover to a replica can lose acknowledged writes: the server answers "
            "before its replicas have them (min-replicas-to-write narrows it)"
        )

    return Durability(survives, settings, [*advice, *_findings(settings, info)])


def _findings(settings: Mapping[str, str], info: Mapping[str, str]) -> Iterator[str]:
    """Yield what the server says about itself that an operator has to know."""
    evicted = int(info.get("evicted_keys", 0))
    used, limit = (int(info.get(one, 0)) for one in ("used_memory", "maxmemory"))

    # The volatile policies evict only keys that expire.
    if evicted and not settings.get("maxmemory-policy", "").startswith("volatile"):
        yield (
            f"the server has evicted {evicted} keys since it started, and keys of this "
            "store may be among them: restore a backup"
        )

    if limit and used > _FULL * limit:
        yield (
            f"the server uses {used} of its {limit} bytes (maxmemory): it refuses "
            "writes when they are used up: CONFIG SET maxmemory to more"
        )

    for name, state in info.items():
        if re.fullmatch(r"slave\d+", name):
            link = dict(one.split("=", 1) for one in state.split(","))

            if link["state"] != "online" or int(link["lag"]) > _LAG:
                yield (
                    f"the replica {link['ip']}:{link['port']} does not follow "
                    f"(state {link['state']}, {link['lag']} s behind): see its log"
                )
