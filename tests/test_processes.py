"""Many processes open and write one store on disk, and some are killed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpkit import CallRecord, CheckpointData, KeepsReceipts, open_checkpointer
from tests.processes import Workers, started

pytestmark = pytest.mark.long


@pytest.fixture(params=["sqlite:///{}/agent.db", "file://{}"])
def place(request: pytest.FixtureRequest) -> str:
    """The URL of a store in a folder, whose name is left open."""
    return str(request.param)


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Start worker processes, which end with the test."""
    with started("tests.worker") as start:
        yield start


async def read_all(
    url: str, thread_id: str
) -> tuple[CheckpointData[dict[str, Any]], list[CallRecord]]:
    """Return the thread and its calls."""
    async with open_checkpointer(url) as cp:
        data = await cp.load(thread_id)
        assert data is not None
        assert isinstance(cp, KeepsReceipts)
        return data, await cp.list_calls(thread_id)


def test_eight_processes_open_a_new_store_at_once(
    place: str, tmp_path: Path, workers: Workers
) -> None:
    """One of them creates the store, and the writes of all are stored."""
    eight = workers(8)

    for round_ in range(6):
        url = place.format(tmp_path / f"new {round_}")

        for worker in eight:
            worker.tell("append_one", url)

        assert sorted(worker.answer() for worker in eight) == list(range(1, 9))


def test_processes_write_one_thread(
    place: str, tmp_path: Path, workers: Workers
) -> None:
    """Versions have no gap, no merge is lost, and each key has one holder."""
    url, four, count = place.format(tmp_path), workers(4), 40

    for number, worker in enumerate(four):
        worker.tell("mixed", url, f"w{number}", count)

    answers = [worker.answer() for worker in four]
    data, _ = asyncio.run(read_all(url, "shared"))
    versions = [version for answer in answers for version in answer["versions"]]
    won = Counter(key for answer in answers for key in answer["won"])

    assert (
        sorted(versions)
        == list(range(1, 4 * count + 1))
        == [*range(1, data.version + 1)]
    )
    assert won == Counter({f"key {i}": 1 for i in range(count)})
    assert len(data.extra) == 4 * count + 1
    assert len(data.pending) == count

    for number in range(4):
        mine = [m["i"] for m in data.messages if m["by"] == f"w{number}"]
        assert mine == list(range(count))


def test_a_killed_writer_loses_nothing_that_it_acknowledged(
    place: str, tmp_path: Path, workers: Workers
) -> None:
    """After SIGKILL acknowledged writes are stored, and none is stored in part."""
    url, chance = place.format(tmp_path), random.Random(5)

    for round_, worker in enumerate(workers(4)):
        worker.tell("write_for_ever", url, f"w{round_}")
        said = [
            worker.answer() for _ in range(chance.randrange(1, 120))
        ] + worker.kill()
        data, records = asyncio.run(read_all(url, "t"))
        appended = [line[1] for line in said if line[0] == "append"]
        merged = [line[2] for line in said if line[0] == "extra"]
        issued = {line[1] for line in said if line[0] == "issued"}
        completed = {line[1] for line in said if line[0] == "completed"}
        status = {record.call.call_id: record.status for record in records}

        # One write can be stored without an answer.
        assert data.version - max(appended) in (0, 2)
        assert [m["half"] for m in data.messages] == [0, 1] * (data.version // 2)
        assert not merged or data.extra["i"] - max(merged) in (0, 1)
        assert issued <= status.keys()
        assert {status[call_id] for call_id in completed} <= {"completed"}
