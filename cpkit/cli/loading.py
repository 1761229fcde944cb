"""Import what a command line names as ``module:attribute``."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from cpkit.cli.running import BadUse
from cpkit.registry import redacted

__all__ = ["load"]


def load(target: str) -> Any:
    """Return the object that ``module:attribute`` names; modules are also found here.

    Raises ``BadUse`` if there is no such module or attribute. An error in the module
    itself is raised as it is.
    """
    name, colon, attribute = target.partition(":")

    if not (name and colon and attribute) or name.startswith("."):
        raise _bad_use(target, "write it as module:name, for instance my_agent:run")

    if "" not in sys.path:
        sys.path.insert(0, "")  # like python -m, find modules of the current folder

    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise

        why = f"there is no module {exc.name!r} here or on the path"
        raise _bad_use(target, why) from None

    for part in attribute.split("."):
        if not hasattr(found, part):
            raise _bad_use(target, f"{name!r} has no {redacted(attribute)!r}")

        found = getattr(found, part)

    return found


def _bad_use(target: str, why: str) -> BadUse:
    return BadUse(f"{redacted(target)!r}: {why}")
