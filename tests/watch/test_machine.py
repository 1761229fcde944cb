"""SQLite and files: a watch that would poll once a day hears of another handle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpkit import ToolCall, open_checkpointer
from tests.stores import fresh_url

NEVER = 86_400.0


@pytest.mark.parametrize("kind", ["memory", "sqlite", "file"])
@pytest.mark.parametrize("named", [True, False], ids=["one", "any"])
async def test_a_notification_wakes(kind: str, named: bool, tmp_path: Path) -> None:
    """Each change of another handle wakes without a poll."""
    url = fresh_url(kind, tmp_path)
    call = ToolCall("c", "pay", {}, "k")

    watching: Any = open_checkpointer(url, poll=NEVER)
    writing: Any = open_checkpointer(url)

    async with (
        watching as cp,
        writing as other,
        cp.watch(*["t"] * named) as changes,
    ):
        steps: list[Callable[[], Any]] = [
            lambda: other.append("t", [{"n": 1}]),
            lambda: other.save_extra("t", {"a": 1}),
            lambda: other.record_issued("t", call),
            lambda: other.record_result("t", "c", 1),
            lambda: other.delete_thread("t"),
        ]

        for step in steps:
            await step()
            assert await anext(changes) == "t"


async def test_files_without_the_package_are_polled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch on a folder works without watchfiles."""
    monkeypatch.setattr("cpkit_file.store.find_spec", lambda name: None)
    url = fresh_url("file", tmp_path)

    watching: Any = open_checkpointer(url, poll=0.02)

    async with (
        watching as cp,
        open_checkpointer(url) as other,
        cp.watch("t") as changes,
    ):
        await other.append("t", [{"n": 1}])
        assert await anext(changes) == "t"


@pytest.mark.parametrize("kind", ["sqlite", "file"])
async def test_a_marker_rests_on_no_clock(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change gives another marker while the clock stands still."""
    monkeypatch.setattr("time.time_ns", lambda: 1_700_000_000_000_000_000)
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)

    opened: Any = open_checkpointer(fresh_url(kind, tmp_path))

    async with opened as cp:
        store = cp.store
        seen = [await store.markers(["t"])]

        steps: list[Callable[[], Any]] = [
            lambda: cp.append("t", [{"n": 1}]),
            lambda: cp.save_extra("t", {"a": 1}),
            lambda: cp.save_extra("t", {"a": 1}),
            lambda: cp.record_issued("t", ToolCall("c", "pay", {}, "k")),
            lambda: cp.record_issued("t", ToolCall("d", "pay", {}, "l")),
            lambda: cp.record_result("t", "c", 1),
        ]

        for step in steps:
            await step()
            seen.append(await store.markers(["t"]))
            assert (await store.markers(None)) == seen[-1]

        assert len({str(one) for one in seen}) == len(seen)
