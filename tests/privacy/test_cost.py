"""What encryption costs an append: calls of functions, not time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from cpkit import open_checkpointer
from tests.privacy.raw import ring
from tests.stores import fresh_url
from tests.test_cost import MESSAGE, Calls


async def appended(url: str, calls: Calls, **options: Any) -> int:
    async with open_checkpointer(url, **options) as cp:
        return await calls.of(lambda i: cp.append("t", [MESSAGE]))


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_an_append_has_twelve_calls_more(kind: str, tmp_path: Path) -> None:
    """For one message, and whatever the store behind it costs."""
    calls = Calls()
    threading.setprofile(calls.hook)

    try:
        plain, sealed = (
            asyncio.run(appended(fresh_url(kind, tmp_path, name), calls, **options))
            for name, options in (("a", {}), ("b", {"keyring": ring()}))
        )
    finally:
        threading.setprofile(None)

    assert 0 < sealed - plain <= 12, (plain, sealed)
