"""Run in a network of its own: its firewall forgets the connections of a store.

``unshare -n python -m tests.redis.forgetful``; a read has to connect again by itself.
"""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any

from redis.asyncio import Redis

from cpkit_redis import RedisCheckpointer
from tests.servers.redis import RedisServer


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


async def main() -> None:
    ip("link set lo up")
    # Rules before that of the machine's own addresses.
    ip("rule add pref 100 lookup local")
    ip("rule del pref 0")

    with RedisServer() as server:
        async with (
            # The limit of an operation has no part in this.
            RedisCheckpointer[Any](server.url, timeout=600) as cp,
            Redis.from_url(server.url, client_name="raw") as raw,
        ):
            await cp.append("t", [{}])
            await asyncio.gather(*(cp.read("t") for _ in range(8)))
            clients = [one for one in await raw.client_list() if one["name"] != "raw"]
            assert len(clients) == 8

            for client in clients:
                port = client["addr"].rpartition(":")[2]
                ip(f"rule add pref 50 ipproto tcp sport {port} blackhole")

            async with asyncio.timeout(60):
                assert await asyncio.gather(*(cp.read("t") for _ in range(8)))


if __name__ == "__main__":
    asyncio.run(main())
