"""What a server's bytes hold no more, and the command that frees them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["dead_space"]

# Below it, a server always has some.
_LARGE = 16 * 2**20


def dead_space(info: Mapping[str, str]) -> dict[str, str]:
    """Return what INFO says of memory and of the append-only file, for people to read.

    Both are those of the whole server, with all its databases and prefixes.
    """
    dead: dict[str, str] = {}
    used, unused = (
        int(info.get(name, 0)) for name in ("used_memory", "mem_fragmentation_bytes")
    )

    if unused > _LARGE and unused * 10 > used:
        words = f"{unused:,} bytes that the server holds beyond what it uses"
        dead["memory"] = f"{words}; MEMORY PURGE, or a restart, gives them back"

    size, rewritten = (
        int(info.get(name, 0)) for name in ("aof_current_size", "aof_base_size")
    )

    if size - rewritten > _LARGE and (size - rewritten) * 10 > size:
        words = f"{size - rewritten:,} bytes since its last rewrite"
        dead["append-only file"] = f"{words}; BGREWRITEAOF frees what counts no more"

    return dead
