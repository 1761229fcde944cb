"""``cpkit worker --once``, as a scheduler calls it: each time in a new process."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpkit.cli.stores import Store
from cpkit.driver.backoff import Backoff
from cpkit.terms import Terms
from tests.cli.command import Ended, cpkit, in_store
from tests.stores import fresh_url

AGENT = """
async def agent(cp, lease):
    await cp.append(lease.thread_id, [{"text": "ran"}])
"""


async def die(cp: Store) -> None:
    """Leave a lease behind, like a process that was killed."""
    terms = Terms(cp, "t", Backoff(), 1.0)
    await terms.claim(terms.new_call("host:7", stale_after=0.2))


@pytest.mark.parametrize("kind", ["sqlite", "file"])
def test_a_killed_run_is_found_by_one_call(tmp_path: Path, kind: str) -> None:
    """The command watches the lease until it is stale; the next call has no work."""
    url = fresh_url(kind, tmp_path)
    (tmp_path / "my_agent.py").write_text(AGENT)
    in_store(url, die)

    def once() -> Ended:
        return cpkit("worker", url, "my_agent:agent", "--once", "--json", cwd=tmp_path)

    ended = once()
    assert (ended.code, ended.json["ran"], ended.json["failed"]) == (0, 1, 0)
    assert in_store(url, lambda cp: cp.read("t")) == [{"text": "ran"}]
    assert once().json["ran"] == 0
