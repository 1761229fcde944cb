"""Backends that are broken on purpose, at least one for every clause.

They prove that the suite bites, and show what each clause is there to catch.
"""

from tests.broken import (  # noqa: F401  # they register what they break
    appends,
    calls,
    cancelled,
    costs,
    crashes,
    erasing,
    extras,
    handles,
    loads,
    races,
    reading,
    servers,
    values,
)
from tests.broken.store import BROKEN, Break

__all__ = ["BROKEN", "Break"]
