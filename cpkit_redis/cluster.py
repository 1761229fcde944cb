"""Agent state in a Redis Cluster.

URL forms
    ``redis+cluster://user:password@host:6379,host:6379`` with one or more of the nodes,
    and ``rediss+cluster://`` (TLS). Options as for ``redis://``; ``pool_size`` is for
    each node. ``connect_timeout`` limits opening. Later operations follow moved slots
    and failovers for ``timeout`` seconds.

Where things are
    Each thread is in one slot and each idempotency key in one, so threads and claims
    spread over all nodes (`cpkit_redis.spread`). With a tag in the prefix
    (``?prefix={agents}``) the whole store is in one slot, on one node: a write is one
    round trip, as on a single server. A store with a tag and one without are two
    stores.

Durability
    A node answers before its replicas have a write. A failover loses the last
    acknowledged writes, whatever ``appendfsync`` says. ``min-replicas-to-write`` limits
    how many.

    A claim is on two nodes. If a failover loses the register's part alone, the key can
    be claimed again: both calls are then on record in their threads, and
    ``find_completed`` and ``find_call`` know the newer one.

Permissions
    Those of `cpkit_redis.store`, and on every node::

        ACL SETUSER agent +cluster|slots +hincrby +zrangebyscore
            +spublish +ssubscribe +sunsubscribe

    Without the last three, or before Redis 7, a watch polls.

Caveats
    While a slot moves to another node, operations on its threads and keys wait for its
    arrival, up to ``timeout``. A slot of a store with a tag may take long. A read that
    a node does not answer within a quarter of ``timeout`` is repeated, at the node that
    has the slot then.
"""

from __future__ import annotations

from cpkit_redis.one_slot import ClusterOptions, OneSlotStore
from cpkit_redis.spread import SpreadStore
from cpkit_redis.store import RedisOptions

__all__ = ["ClusterOptions", "ClusterStore"]


class ClusterStore(OneSlotStore):
    """The driver of the URLs: it returns a store in one slot, or over all of them."""

    @classmethod
    def from_url(cls, url: str, options: RedisOptions) -> OneSlotStore:
        kind = OneSlotStore if "{" in options.prefix else SpreadStore
        return kind(url, options)
