"""A session whose writer is killed."""

from __future__ import annotations

from itertools import islice

from cpkit import open_checkpointer
from cpkit.sessions import SessionLog
from tests.sessions.talk import texts, user
from tests.sessions.test_processes import start


async def test_a_killed_writer_leaves_a_complete_log(
    shared_url: str, session_id: str
) -> None:
    """It has every acknowledged entry, and the session continues."""
    with start(shared_url, session_id, "a") as process:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        acknowledged = [line.strip() for line in islice(process.stdout, 10)]
        process.kill()
        acknowledged += [line.strip() for line in process.stdout if line.endswith("\n")]
    async with open_checkpointer(shared_url) as cp:
        log = await SessionLog.open(cp, session_id)
        ids = [entry["id"] for entry in log.branch()]
        assert ids[: len(acknowledged)] == acknowledged
        # One more entry may have been written without an acknowledgement.
        assert len(ids) <= len(acknowledged) + 1
        assert log.branch() == log.entries
        assert log.leaf_id == ids[-1]

        await log.append_message(user("on"))
        expected = [f"a {number}" for number in range(len(ids))]
        assert texts(log.context().messages) == [*expected, "on"]
