"""The machines of a replicated store, which the level ``replicated`` makes fail."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["Nodes"]


class Nodes(ABC):
    """What a harness of a replicated store lets the suite do to its nodes.

    A node has a name. The *leader* of a thread is the node that takes its writes; all
    threads may have the same one. The suite makes one leader fail, calls `take_over`
    and `restore`, and begins again.
    """

    may_lose: bool = False
    """Whether the engine may lose acknowledged writes when it loses a leader.

    If so, the certificate says how many of how many were lost. A write is not lost that
    was acknowledged before all nodes were in sync and worked, or by a client that began
    after `take_over`, or after `resume` where a leader wakes. Otherwise a lost write
    fails the clause.
    """

    @abstractmethod
    async def names(self) -> list[str]:
        """Return the names of all nodes."""

    @abstractmethod
    async def leader(self, thread_id: str) -> str:
        """Return the node that takes the writes of this thread."""

    @abstractmethod
    async def kill(self, node: str) -> None:
        """Kill a node with SIGKILL."""

    @abstractmethod
    async def pause(self, node: str) -> None:
        """Stop every process of a node with SIGSTOP; its connections stay open."""

    @abstractmethod
    async def resume(self, node: str) -> None:
        """Continue a paused node, which may still believe that it is the leader.

        If the engine `may_lose` writes, return when the node knows better.
        """

    @abstractmethod
    async def cut(self, one: str, other: str) -> None:
        """Cut the link between two nodes. Clients still reach both."""

    @abstractmethod
    async def take_over(self, lost: str) -> None:
        """Return when another node leads what the lost one led.

        Where the engine does not promote by itself, do what its operator's tools do:
        fence the lost node, and promote another one.
        """

    @abstractmethod
    async def restore(self) -> None:
        """Run every node again, with all links, and wait until all are in sync."""
