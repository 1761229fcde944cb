"""How the suite reaches a store: what the author of a backend supplies.

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
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from cpkit import Checkpointer, JsonValue, open_checkpointer
from cpkit.registry import driver_names, redacted

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
    """How to open one store, again and again.

    Only ``open`` is required; whatever else is there lets the suite ask more. For the
    clauses that need other processes the harness is built again over there: it is a
    dataclass in an importable module and its fields are JSON values (or `elsewhere`
    returns one that is).
    """

    shared: bool = True
    """Whether all handles that ``open`` returns are of one store."""

    options: frozenset[str] = frozenset(
        {"max_payload", "message_type", "strict_roundtrip"}
    )
    """The keywords that ``open`` takes."""

    @property
    def name(self) -> str:
        """How reports and command lines call the store; it holds no password."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def open(self, **options: Any) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        """Return an unopened handle."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to open")

    def elsewhere(self) -> Harness | None:
        """Return the harness by which another process opens the store, if one can."""
        return self

    async def reset(self) -> None:
        """Prepare for a clause. Nothing is needed: clauses use fresh ids."""

    async def bytes_written(self) -> int | None:
        """Return how many bytes the store has written so far, by its own figures.

        Without it the bytes that this process writes are taken, where it writes any.
        """
        return None

    async def kill(self) -> None:
        """Kill the server, as ``kill -9`` does."""
        raise NotImplementedError("this harness has no server")

    async def start(self) -> None:
        """Start the server after `kill`, on the same data and address; wait for it."""
        raise NotImplementedError("this harness has no server")

    def lacks(self, ability: str) -> str | None:
        """Say why a clause that needs the ability cannot be asked, if it cannot."""
        if ability in ("max_payload", "message_type", "strict_roundtrip"):
            if ability not in self.options:
                return f"the harness opens stores without {ability}="

        elif ability == "handles":
            if not self.shared:
                return "each handle is a store of its own"

        elif ability == "processes":
            return self._not_elsewhere()

        elif ability == "server":
            if type(self).kill is Harness.kill:
                return "the harness cannot kill and start a server"

        else:
            raise ValueError(f"no ability {ability!r}")

        return None

    def _not_elsewhere(self) -> str | None:
        there = self.elsewhere()

        if not self.shared or there is None:
            return "other processes cannot open the store"

        try:
            rebuild(address(there))
        except (ImportError, AttributeError, TypeError, ValueError) as exc:
            kind = type(there).__qualname__
            return f"another process cannot build the harness {kind}: {exc}"

        return None


@dataclass(repr=False)
class URLHarness(Harness):
    """A store behind a URL; raises ``InvalidURL`` where it is none."""

    url: str

    def __post_init__(self) -> None:
        # Checks the URL, and imports the driver here rather than in an event loop.
        open_checkpointer(self.url)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    @property
    def name(self) -> str:
        return redacted(self.url)

    @property
    def shared(self) -> bool:  # type: ignore[override]  # a fact of the URL, read-only
        return self.url not in ("memory://", "sqlite:///:memory:")

    def open(self, **options: Any) -> AbstractAsyncContextManager[Checkpointer[Any]]:
        return open_checkpointer(self.url, **options)

    def elsewhere(self) -> Harness | None:
        return None if self.url.startswith("memory:") else self


@dataclass
class FactoryHarness(Harness):
    """A store that ``package.module:factory`` opens, called with options by keyword."""

    factory: str

    @property
    def name(self) -> str:
        return self.factory

    @property
    def options(self) -> frozenset[str]:  # type: ignore[override]  # as it is callable
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

    The factory is a `Harness`, a callable that returns one, or a callable that takes
    options by keyword and returns an unopened handle. Raises ``ValueError`` or
    ``ImportError`` where the target names none.
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

    made = found()
    return made if isinstance(made, Harness) else FactoryHarness(target)


def address(harness: Harness) -> str:
    """Return the text from which `rebuild` makes the harness again.

    Raises ``TypeError`` where it is no dataclass of JSON values.
    """
    made: Any = harness

    if not is_dataclass(made):
        raise TypeError(f"{type(harness).__name__} is not a dataclass")

    kind = f"{type(harness).__module__}:{type(harness).__qualname__}"
    values = {field.name: getattr(harness, field.name) for field in fields(made)}
    return json.dumps([kind, values])


def rebuild(text: str) -> Harness:
    """Return the harness of an `address`."""
    kind: str
    values: dict[str, JsonValue]
    kind, values = json.loads(text)
    found = find(kind)

    if not (isinstance(found, type) and issubclass(found, Harness)):
        raise TypeError(f"{kind} is no harness")

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
