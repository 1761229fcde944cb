"""Leases of killed runs: ``cpkit worker --once``, and ``cpkit recover``."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpkit.cli.stores import Store
from cpkit.runs.threads import RunThread
from tests.cli.command import Ended, forked, in_store
from tests.stores import fresh_url
from tests.sweeps import sweep

AGENT = """
async def agent(cp, lease):
    await cp.append(lease.thread_id, [{"text": "ran"}])
"""


async def die(cp: Store) -> None:
    """Leave a lease behind, like a process that was killed."""
    run = RunThread(cp, "t")
    await run.claim(run.new_term("host:7", stale_after=0.2))


@pytest.mark.parametrize("kind", sweep(["sqlite", "file"], ["sqlite"]))
def test_a_killed_run_is_found_by_one_call(tmp_path: Path, kind: str) -> None:
    """The command watches the lease until it is stale; the next call has no work."""
    url = fresh_url(kind, tmp_path)
    (tmp_path / "my_agent.py").write_text(AGENT)
    in_store(url, die)

    def once() -> Ended:
        return forked("worker", url, "my_agent:agent", "--once", "--json", cwd=tmp_path)

    ended = once()
    assert (ended.code, ended.json["ran"], ended.json["failed"]) == (0, 1, 0)
    assert in_store(url, lambda cp: cp.read("t")) == [{"text": "ran"}]
    assert once().json["ran"] == 0
    assert "watchfiles" not in ended.err


def test_recover_says_once_for_whom_it_waits(tmp_path: Path) -> None:
    """The line is on standard error, and the wait ends with ``--timeout``."""
    url = fresh_url("sqlite", tmp_path)
    (tmp_path / "my_tools.py").write_text("TOOLS = []\n")

    async def hold(cp: Store) -> None:
        await cp.append("t", [{}])
        run = RunThread(cp, "t")
        await run.claim(run.new_term("host:7", stale_after=60))

    in_store(url, hold)
    ended = forked(
        "recover", url, "t", "my_tools:TOOLS", "--timeout", "0.1", cwd=tmp_path
    )
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.count("waiting for the lease of thread 't': host:7 has it") == 1
