"""Several processes that write one session."""

from __future__ import annotations

from cpkit import open_checkpointer
from cpkit.sessions import SessionLog
from tests.processes import Forked
from tests.sessions.talk import texts

COUNT = 40


def start(url: str, session_id: str, name: str) -> Forked:
    """Start a writer that waits for a line before its first append."""
    return Forked("tests.sessions.writer", url, session_id, name, str(COUNT))


async def test_two_processes_write_one_branch(shared_url: str, session_id: str) -> None:
    """Each entry follows the one before it, and no entry is lost or doubled."""
    writers = {name: start(shared_url, session_id, name) for name in ("a", "b")}
    acknowledged: dict[str, list[str]] = {}

    try:
        for process in writers.values():
            assert process.stdout.readline() == "ready\n"

        for process in writers.values():
            process.stdin.write("go\n")
            process.stdin.flush()

        for name, process in writers.items():
            out, err = process.communicate()
            acknowledged[name] = out.split()
            assert process.returncode == 0, err
    finally:
        for process in writers.values():
            process.close()

    async with open_checkpointer(shared_url) as cp:
        log = await SessionLog.open(cp, session_id)

    assert len(log.entries) == 2 * COUNT
    assert log.branch() == log.entries
    parents = [entry["parentId"] for entry in log.entries]
    assert parents == [None, *(entry["id"] for entry in log.entries[:-1])]

    said = texts(log.context().messages)

    for name, ids in acknowledged.items():
        assert [text for text in said if text.startswith(name)] == [
            f"{name} {number}" for number in range(COUNT)
        ]
        assert [entry["id"] for entry in log.entries if entry["id"] in ids] == ids
