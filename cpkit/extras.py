"""Say which ``pip install`` brings a package that an optional part of cpkit needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MissingExtra", "needs_extra"]


class MissingExtra(ModuleNotFoundError):
    """A package is not installed; the message has the pip command."""

    def __init__(self, part: str, extra: str, name: str) -> None:
        super().__init__(part, extra, name, name=name)
        self.part = part
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.part} needs {self.name}: pip install 'cpkit[{self.extra}]'"

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[object, ...]]:
        return type(self), self.args


@contextmanager
def needs_extra(part: str, extra: str) -> Iterator[None]:
    """Raise `MissingExtra` where an import in the block misses a package."""
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as exc:
        # A missing module of cpkit itself is a broken installation.
        if not exc.name or exc.name.startswith(("cpkit", "conformance")):
            raise

        raise MissingExtra(part, extra, exc.name.partition(".")[0]) from exc
