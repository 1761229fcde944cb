"""Writes that a store applies late: after a kill, a pause or a timeout."""

from __future__ import annotations

from contextlib import suppress

from conformance.case import Store
from conformance.failure import Failure
from cpkit import VersionConflict

__all__ = ["append_at_loaded_version"]


async def append_at_loaded_version(cp: Store, thread: str, late: int) -> None:
    """Load and append; a conflict is allowed for each of the ``late`` writes."""
    for _ in range(late + 1):
        loaded = await cp.load(thread)
        version = 0 if loaded is None else loaded.version

        with suppress(VersionConflict):
            message = {"token": "next"}
            written = await cp.append(thread, [message], expected_version=version)
            assert written == version + 1
            return

    raise Failure(
        "an append at the version that was just loaded",
        f"{late + 1} conflicts in a row",
    )
