"""Killed processes, and processes that write one thread concurrently."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint

from cpkit import open_checkpointer
from cpkit.integrations.langgraph import CheckpointSaver
from tests.integrations.langgraph_worker import CONFIG
from tests.stores import quick_on

WORKER = "tests.integrations.langgraph_worker"
ROOT = Path(__file__).parents[2]


def start(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", WORKER, *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(worker: subprocess.Popen[str]) -> str:
    """Wait for a worker; return its output, unless it was killed."""
    out, err = worker.communicate()
    assert worker.returncode in (0, 9), err
    return out


@pytest.mark.long
@pytest.mark.parametrize("shared_url", quick_on(), indirect=True)
@pytest.mark.parametrize(("checkpoints", "writes"), [(1, 1), (2, 3), (3, 4)])
def test_a_killed_run_continues(
    shared_url: str, tmp_path: Path, checkpoints: int, writes: int
) -> None:
    """A node whose writes were stored before the kill does not run again."""
    effects = tmp_path / "effects"
    assert end(start("run", shared_url, effects, checkpoints, writes)) == ""
    ran = effects.read_text().split() if effects.exists() else []
    # The input is the first write.
    assert len(ran) == writes - 1
    assert end(start("run", shared_url, effects, 99, 0)) == "go left right last\n"
    assert sorted(effects.read_text().split()) == ["last", "left", "right"]


@pytest.mark.parametrize("shared_url", quick_on(), indirect=True)
async def test_two_processes_write_one_thread(shared_url: str) -> None:
    """Each branch is complete, in its writer and in any other process."""
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    count = 25

    async with open_checkpointer(shared_url) as cp:
        saver = CheckpointSaver(cp)
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"log": ["base"] * 9}
        checkpoint["channel_versions"] = {"log": "1"}
        await saver.aput(config, checkpoint, {}, {"log": "1"})
        assert await saver.aget_tuple(CONFIG) is not None

        workers = [
            start("put", shared_url, checkpoint["id"], name, count)
            for name in ("a", "b")
        ]

        for worker in workers:
            end(worker)

        for reader in (saver, CheckpointSaver(cp)):
            found = [one async for one in reader.alist(CONFIG)]
            assert len(found) == 1 + 2 * count

            for one in found:
                log = one.checkpoint["channel_values"]["log"]
                assert log[:9] == ["base"] * 9
                names = {line.split()[0] for line in log[9:]}
                assert len(names) <= 1

                if names:
                    (name,) = names
                    assert log[9:] == [f"{name} {n}" for n in range(len(log) - 9)]
                    assert one.pending_writes == [(name, "log", name)]
