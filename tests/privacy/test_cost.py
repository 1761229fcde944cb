"""What encryption costs an append and a load: calls of functions, not time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from cpkit import open_checkpointer
from cpkit.memory import MemoryStore
from tests.privacy.raw import ring
from tests.stores import fresh_url
from tests.test_cost import MESSAGE, Calls


async def measured(url: str, calls: Calls, **options: Any) -> tuple[int, int, int]:
    """Return the calls of an append, and of loads of 10 and 110 messages."""
    async with open_checkpointer(url, **options) as cp:
        for n in (10, 110):
            await cp.append(f"{n}", [MESSAGE] * n)

        return (
            await calls.of(lambda i: cp.append("t", [MESSAGE])),
            await calls.of(lambda i: cp.load("10")),
            await calls.of(lambda i: cp.load("110")),
        )


@pytest.mark.parametrize(
    ("kind", "takes_bytes"), [("memory", True), ("memory", False), ("sqlite", True)]
)
def test_encryption_has_few_calls(
    kind: str, takes_bytes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load opens its messages in one pass, from which ``decrypt`` alone is called.

    Servers are left out: how often the event loop turns for one answer is luck.
    """
    monkeypatch.setattr(MemoryStore, "takes_bytes", takes_bytes)
    calls = Calls()
    threading.setprofile(calls.hook)

    try:
        plain, sealed = (
            asyncio.run(measured(fresh_url(kind, tmp_path, name), calls, **options))
            for name, options in (("a", {}), ("b", {"keyring": ring()}))
        )
    finally:
        threading.setprofile(None)

    append, load, longer = (b - a for a, b in zip(plain, sealed, strict=True))
    assert 0 < append <= 12, (plain, sealed)
    assert load <= 70, (plain, sealed)
    assert 0 < longer - load <= 120, (plain, sealed)
