"""What the server's settings make of an acknowledged write.

Sources: redis.io, "Redis persistence", "Key eviction" and "Redis replication".
"""

from __future__ import annotations

from collections.abc import Mapping

from cpkit.records import Durability, Survives

SETTINGS = (
    *("appendonly", "appendfsync", "aof-load-truncated", "save"),
    *("maxmemory", "maxmemory-policy"),
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


def durability_of(
    config: Mapping[str, str], info: Mapping[str, str], in_cluster: bool = False
) -> Durability:
    """Return what an acknowledgement is worth.

    ``in_cluster``: the settings are those of one node. ``config`` has the answers to
    CONFIG GET, ``info`` that to INFO; each is empty where the server denies it.
    """
    settings = {name: config[name] for name in SETTINGS if name in config}

    if info:  # has some of it too
        aof = "yes" if info.get("aof_enabled") == "1" else "no"
        limits = {one: info.get(one.replace("-", "_"), "") for one in SETTINGS[4:]}
        settings = (
            {"appendonly": aof} | {k: v for k, v in limits.items() if v} | settings
        )

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

    return Durability(survives, settings, advice)
