"""What the server's settings make of an acknowledged write.

Sources: redis.io, "Redis persistence", "Key eviction" and "Redis replication".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from cpkit.records import Durability, Survives

SETTINGS = (
    *("appendonly", "appendfsync", "no-appendfsync-on-rewrite", "aof-load-truncated"),
    *("maxmemory", "maxmemory-policy"),
)
"""What to ask CONFIG for; a service or an ACL may deny it."""

# What an append-only file can lose, by a setting and its text (None: not readable).
_LOSSES = {
    ("appendfsync", "everysec"): "a power loss, or a kill of the server while its disk "
    "stalls, can lose about the last second: CONFIG SET appendfsync always",
    ("appendfsync", "no"): "a power loss can lose the last half minute, because only "
    "the operating system syncs the append-only file: CONFIG SET appendfsync everysec",
    ("appendfsync", None): "how often the append-only file is synced could not be "
    "read, and a power loss can lose the last writes: allow CONFIG GET to the user",
    ("no-appendfsync-on-rewrite", "yes"): "while the server rewrites its append-only "
    "file, or saves a snapshot, it does not sync that file, and a power loss can lose "
    "what was written since it began: CONFIG SET no-appendfsync-on-rewrite no",
    # Redis removes the last command of a file that was cut, and keeps the MULTI before
    # it: the next load takes what was appended since for a part of that transaction.
    ("aof-load-truncated", "yes"): "after a power loss, or a kill of the server in a "
    "large write, the server may keep half of a transaction in its append-only file, "
    "and apply it at the restart after that: CONFIG SET aof-load-truncated no, write "
    "it into redis.conf, and run redis-check-aof --fix if the server then refuses to "
    "start",
}

# While a file that was just switched on is written for the first time, nothing is in
# it. INFO says no more than that a file is being written.
_REWRITE = (
    "the server rewrites its append-only file: if that was switched on just now, a "
    "restart loses everything until the rewrite ends (INFO: aof_rewrite_in_progress:0, "
    "aof_rewrite_scheduled:0): open the store again then"
)


def durability_of(
    config: Mapping[str, str], info: Mapping[str, str], in_cluster: bool
) -> Durability:
    """Return what an acknowledgement is worth.

    ``config`` has the answers to CONFIG GET, ``info`` that to INFO; each is empty where
    the server denies it. In a cluster they are those of one node.
    """
    known = {
        "appendonly": {"0": "no", "1": "yes"}.get(info.get("aof_enabled", "")),
        "maxmemory": info.get("maxmemory"),
        "maxmemory-policy": info.get("maxmemory_policy"),
        **config,
    }
    settings = {name: text for name in SETTINGS if (text := known.get(name))}
    policy, limit = settings.get("maxmemory-policy", ""), settings.get("maxmemory", "0")
    evicted, used = (int(info.get(one, 0)) for one in ("evicted_keys", "used_memory"))
    survives, advice = Survives.MACHINE, []

    if "appendonly" not in settings:
        survives = Survives.NONE
        advice.append(
            "whether the server has an append-only file could not be read: "
            "allow CONFIG GET and INFO to the user"
        )
    elif settings["appendonly"] != "yes":
        survives = Survives.NONE
        advice.append(
            "a restart of the server loses everything since its last snapshot, if it "
            "makes any: CONFIG SET appendonly yes, and write it into redis.conf"
        )
    else:
        advice += [
            loss for (name, text), loss in _LOSSES.items() if settings.get(name) == text
        ]
        survives = Survives.PROCESS if advice else Survives.MACHINE
        rewrites = "aof_rewrite_in_progress", "aof_rewrite_scheduled"

        if "1" in map(info.get, rewrites):
            survives = Survives.NONE
            advice.append(_REWRITE)

    # The volatile policies evict only keys that expire.
    if not policy:
        advice.append(
            "whether the server evicts keys when its memory is full could not be read: "
            "allow INFO to the user"
        )
    elif policy.startswith("allkeys") and limit != "0":
        survives = Survives.NONE
        advice.append(
            f"the server evicts any key when its memory is full ({policy}): "
            "CONFIG SET maxmemory-policy noeviction"
        )

    if evicted and not policy.startswith("volatile"):
        advice.append(
            f"the server has evicted {evicted} keys since it started, and keys of this "
            "store may be among them: restore a backup"
        )

    if 0 < 0.9 * int(limit) < used:
        advice.append(
            f"the server uses {used} of its {limit} bytes (maxmemory): it refuses "
            "writes when they are used up: CONFIG SET maxmemory to more"
        )

    for name, state in info.items():
        if re.fullmatch(r"slave\d+", name):
            link = dict(one.split("=", 1) for one in state.split(","))

            if link["state"] != "online" or int(link["lag"]) > 10:
                advice.append(
                    f"the replica {link['ip']}:{link['port']} does not follow "
                    f"(state {link['state']}, {link['lag']} s behind): see its log"
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
