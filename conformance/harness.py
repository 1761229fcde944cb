"""How the suite opens a store. The author of a backend supplies a harness.

A simple store needs five lines::

    @dataclass
    class MyHarness(Harness):
        path: str

        def open(self, **options):
            return MyCheckpointer(self.path, **options)

A URL, or ``package.module:factory``, is a harness by itself: see `harness_for`.
"""

from __future__ import annotations

import importlib
import inspect
import json
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from conformance.nodes import Nodes
from cpkit import Checkpointer, InvalidURL, JsonValue, open_checkpointer
from cpkit.registry import driver_names, inspect_store, is_one_process, redacted

__all__ = [
    "FactoryHarness",
    "Harness",
    "URLHarness",
    "address",
    "find",
    "harness_for",
    "rebuild",
]


class Harness:
    """Opens handles of one store.

    Only ``open`` is required. With the other methods the suite can check more clauses.
    Some clauses start other processes, which build the harness again. For these the
    harness, or the one that `elsewhere` returns, must be a dataclass in an importable
    module, with JSON values as fields.
    """

    shared: bool = True
    """Whether all handles that ``open`` returns share one store."""

    options: frozenset[str] = frozenset(
        {
            "max_append",
            "max_payload",
            "message_type",
            "notify",
            "poll",
            "strict_roundtrip",
        }
    )
    """The keyword options that ``open`` accepts; a client of a server adds timeout."""

    appends_in_order: bool = False
    """Whether the engine needs a file system that writes appended bytes in their order.

    If so, the simulated disk of the level ``powerloss`` cuts off the end of a file that
    is not synced, and leaves no holes in it.
    """

    names_in_order: bool = False
    """Whether the engine needs a file system whose names reach the disk in their order.

    If so, the simulated disk keeps the first of the names that are not synced, and
    loses the others; without it, each of them is there or not.
    """

    maps_in_memory: bool = False
    """Whether the engine maps a file that it syncs where it is in shared memory.

    InnoDB does so with its log. If so, ``powerloss`` takes a folder on a disk.
    """

    @property
    def name(self) -> str:
        """The store's name in reports and command lines, without a password."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def open(self, **options: Any) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        """Return an unopened handle."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define open(): return an unopened handle"
        )

    def elsewhere(self) -> Harness | None:
        """Return the harness for another process, or ``None`` if none can open."""
        return self

    async def reset(self) -> None:
        """Prepare for a clause. The default does nothing: clauses use fresh ids."""

    async def bytes_written(self) -> int | None:
        """Return how many bytes the store has written so far, by its own count.

        If this returns ``None``, the suite counts the bytes that this process writes.
        """
        return None

    async def connections(self) -> int | None:
        """Return how many clients are connected to the server, without this one.

        If this returns ``None``, only the sockets of this process are counted.
        """
        return None

    async def kill(self) -> None:
        """Kill the server with SIGKILL."""
        raise NotImplementedError("this harness has no server")

    async def start(self) -> None:
        """Start the server again, with the same data and address, and wait for it."""
        raise NotImplementedError("this harness has no server")

    async def pause(self) -> None:
        """Stop every process of the server with SIGSTOP; its connections stay open."""
        raise NotImplementedError("this harness has no server")

    async def resume(self) -> None:
        """Continue the server that `pause` stopped."""
        raise NotImplementedError("this harness has no server")

    async def in_folder(self, folder: str) -> Harness | None:
        """Return a harness for a new store whose files are all in this empty folder.

        The level ``powerloss`` uses it; other processes build the harness again. For a
        server, `start` and `kill` of the returned harness are for a server of its own,
        with the same settings. `start` creates the data if the folder is empty.
        Otherwise it starts on the files that are there, and does what an operator does
        after a power loss. Return ``None`` where that is not possible.
        """
        return None

    def server_address(self) -> tuple[str, int] | None:
        """Return the host and the port where the server listens, if there is one."""
        return None

    def through(self, host: str, port: int) -> Harness:
        """Return a harness of the same store whose handles connect to this address.

        The suite listens there and relays to `server_address`.
        """
        raise NotImplementedError("this harness has no server")

    async def damage(self, thread_id: str) -> None:
        """Make a stored message of this thread a text that cannot be decoded.

        Change the row with the engine's own means, as a bad disk or a program does.
        """
        raise NotImplementedError("this harness cannot damage a stored row")

    def nodes(self) -> Nodes | None:
        """Return the nodes of a replicated store, for the level ``replicated``."""
        return None

    def at_node(self, node: str) -> Harness | None:
        """Return a harness whose handles connect to this one of the `nodes`.

        ``None``, the default, is for an engine whose clients choose the node.
        """
        return None

    def short_waits(self, seconds: float) -> dict[str, Any]:
        """Return options with which a handle waits so long for another one's lock.

        Empty where it cannot be told; then the suite waits as long as the store does.
        """
        return {"timeout": seconds} if "timeout" in self.options else {}

    async def gather_statistics(self) -> None:
        """Let the store gather the statistics that its query planner uses, if any."""

    def lacks(self, ability: str) -> str | None:
        """Return why the harness lacks an ability, or ``None`` if it has it."""
        if ability in Harness.options:
            if ability not in self.options:
                return f"the harness opens stores without {ability}="

        elif ability == "handles":
            if not self.shared:
                return "each handle has its own store"

        elif ability == "processes":
            return self._lacks_processes()

        elif ability == "one process":
            if self.elsewhere() is not None:
                return "several processes may open the store"

            if not self.shared:
                return "each handle has its own store"

            return self._lacks_rebuilding(self)

        elif ability == "server":
            if type(self).kill is Harness.kill:
                return "the harness cannot kill and start a server"

        elif ability == "pause":
            if type(self).pause is Harness.pause:
                return "the harness cannot pause and resume a server"

        elif ability == "damage":
            if type(self).damage is Harness.damage:
                return "the harness cannot damage a stored row"

        elif ability == "nodes":
            if self.nodes() is None:
                return "the harness has no nodes that can fail"

        elif ability == "proxy":
            if self.server_address() is None:
                return "the harness does not say where its server listens"

        else:
            raise ValueError(f"unknown ability {ability!r}")

        return None

    def _lacks_processes(self) -> str | None:
        target = self.elsewhere()

        if not self.shared or target is None:
            return "other processes cannot open the store"

        return self._lacks_rebuilding(target)

    def _lacks_rebuilding(self, target: Harness) -> str | None:
        try:
            rebuild(address(target))
        except (ImportError, AttributeError, TypeError, ValueError) as exc:
            kind = type(target).__qualname__
            return f"another process cannot build the harness {kind}: {exc}"

        return None


@dataclass(repr=False)
class URLHarness(Harness):
    """A store behind a URL. Raises ``InvalidURL`` for a URL that is not valid."""

    url: str

    def __post_init__(self) -> None:
        # Checks the URL, and imports the driver, which would block an event loop.
        open_checkpointer(self.url)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    @property
    def name(self) -> str:
        return redacted(self.url)

    @property
    def shared(self) -> bool:  # type: ignore[override]  # read-only, because it follows from the URL
        return self.url.partition("?")[0] not in ("memory://", "sqlite:///:memory:")

    def open(self, **options: Any) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        return open_checkpointer(self.url, **options)

    def elsewhere(self) -> Harness | None:
        return None if is_one_process(self.url) else self

    def server_address(self) -> tuple[str, int] | None:
        place = urlsplit(self.url)

        # TLS checks the server's name, and clients of a cluster connect to the
        # addresses that its nodes name.
        if place.scheme.startswith("rediss") or "cluster" in place.scheme:
            return None

        if "," in place.netloc:  # several hosts: the suite relays to one
            return None

        return (place.hostname, place.port) if place.hostname and place.port else None

    def through(self, host: str, port: int) -> Harness:
        place = urlsplit(self.url)
        user, at, _ = place.netloc.rpartition("@")
        netloc = f"{user}{at}{host}:{port}"
        relayed = URLHarness(place._replace(netloc=netloc).geturl())
        relayed.options = self.options | {"timeout"}
        return relayed

    def short_waits(self, seconds: float) -> dict[str, Any]:
        for name in ("busy_timeout", "timeout"):
            with suppress(InvalidURL):
                open_checkpointer(self.url, **{name: seconds})
                return {name: seconds}

        return {}

    async def in_folder(self, folder: str) -> Harness | None:
        found = await inspect_store(self.url)

        if found is None or found.path is None:
            return None

        # With four slashes, because some drivers take a path with three as relative.
        base, question, query = self.url.partition("?")
        # The driver creates the folder of its store, and must sync its name.
        path = quote(f"{folder}/new/store")
        scheme = base.partition(":")[0]
        return URLHarness(f"{scheme}:///{path}{question}{query}")


@dataclass
class FactoryHarness(Harness):
    """A store that ``package.module:factory`` opens, called with keyword options.

    Each call must open the same store: a factory of ``memory://`` without a name does
    not, and the clauses that need two handles fail.
    """

    factory: str

    @property
    def name(self) -> str:
        return self.factory

    @property
    def options(self) -> frozenset[str]:  # type: ignore[override]  # read-only, because it follows from the signature
        parameters = inspect.signature(find(self.factory)).parameters

        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return Harness.options

        return Harness.options & parameters.keys()

    def open(self, **options: Any) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        opened: AbstractAsyncContextManager[Checkpointer[Any]] = find(self.factory)(
            **options
        )
        return opened


def harness_for(target: str | Harness) -> Harness:
    """Return the harness of a URL or of ``package.module:factory``.

    The name is that of a `Harness`, of a callable that returns one, or of a callable
    that takes keyword options and returns an unopened handle. Raises ``InvalidURL`` for
    a URL that is not valid, and ``ValueError`` for any other target.
    """
    if isinstance(target, Harness):
        return target

    module, colon, attribute = target.partition(":")

    if not colon or module in driver_names() or not _is_dotted(module, attribute):
        return URLHarness(target)

    try:
        found = find(target)
    except (ImportError, AttributeError) as exc:
        raise ValueError(f"{target}: {exc}") from exc

    if isinstance(found, Harness):
        return found

    if not callable(found):
        raise ValueError(f"{target} is neither a harness nor callable")

    if hasattr(found, "test_clause"):
        raise ValueError(
            f"{target} is a pytest class: run it with pytest, or give the harness that "
            "its fixture returns"
        )

    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError) as exc:
        raise ValueError(f"{target} cannot be called without arguments: {exc}") from exc

    made = found()

    if isinstance(made, Harness):
        return made

    if not isinstance(made, AbstractAsyncContextManager):
        raise ValueError(
            f"{target} returned a {type(made).__name__}: return a Harness or an "
            "unopened handle"
        )

    return FactoryHarness(target)


def address(harness: Harness) -> str:
    """Return a text from which `rebuild` makes the harness again.

    Raises ``TypeError`` if it is not a dataclass of JSON values in a module that other
    processes can import.
    """
    made: Any = harness

    if not is_dataclass(made):
        raise TypeError(f"{type(harness).__name__} is not a dataclass")

    if type(harness).__module__ == "__main__":
        raise TypeError(
            "it is in the program that runs: put it into a module of its own"
        )

    kind = f"{type(harness).__module__}:{type(harness).__qualname__}"
    values = {field.name: getattr(harness, field.name) for field in fields(made)}
    return json.dumps([kind, values])


def rebuild(text: str) -> Harness:
    """Return the harness that `address` described."""
    kind: str
    values: dict[str, JsonValue]
    kind, values = json.loads(text)
    found = find(kind)

    if not (isinstance(found, type) and issubclass(found, Harness)):
        raise TypeError(f"{kind} is not a subclass of Harness")

    return found(**values)


def find(dotted: str) -> Any:
    """Import what ``package.module:name`` names."""
    module, _, attribute = dotted.partition(":")
    found: Any = importlib.import_module(module)

    for part in attribute.split("."):
        found = getattr(found, part)

    return found


def _is_dotted(module: str, attribute: str) -> bool:
    return all(part.isidentifier() for part in f"{module}.{attribute}".split("."))
