"""A real session of 1,019 lines in version 1 of the format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpkit import open_checkpointer
from cpkit.sessions import SessionLog
from tests.sessions.conftest import Store

REAL = Path(__file__).parents[3] / "shared" / "data" / "pi_session_v1.jsonl"

pytestmark = pytest.mark.skipif(
    not REAL.exists(), reason="the real session is not part of the repository"
)


async def test_it_is_imported_completely(url: str, session_id: str) -> None:
    """The log has every entry, and the context every message."""
    async with open_checkpointer(url) as cp:
        await SessionLog.import_jsonl(cp, REAL, session_id=session_id)

    async with open_checkpointer(url) as cp:
        log = await SessionLog.open(cp, session_id)

    assert len(log.entries) == 1018
    assert log.branch() == log.entries
    context = log.context()
    assert [m["role"] for m in context.messages].count("user") == 88
    assert len(context.messages) == 914
    assert context.model is not None
    assert context.model.model_id == "claude-sonnet-4-5"
    assert context.thinking_level == "off"
    calls = sum(
        block["type"] == "toolCall"
        for message in context.messages
        for block in message["content"]
    )
    answered = sum(m["role"] == "toolResult" for m in context.messages)
    assert len(context.missing_results) == calls - answered


async def test_its_export_imports_to_the_same_session(
    cp: Store, tmp_path: Path
) -> None:
    """A second export has the same bytes."""
    log = await SessionLog.import_jsonl(cp, REAL)
    await log.export_jsonl(tmp_path / "one.jsonl")
    again = await SessionLog.import_jsonl(cp, tmp_path / "one.jsonl", session_id="two")
    await again.export_jsonl(tmp_path / "two.jsonl")
    assert (again.header, again.entries) == (log.header, log.entries)
    assert again.context() == log.context()
    one = (tmp_path / "one.jsonl").read_bytes()
    assert one == (tmp_path / "two.jsonl").read_bytes()


async def test_migration_only_adds_fields(cp: Store, tmp_path: Path) -> None:
    """Without ids, parents and version the export equals the source."""
    log = await SessionLog.import_jsonl(cp, REAL)
    await log.export_jsonl(tmp_path / "out.jsonl")
    header, *lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    plain = [header.replace(b'"version":3,', b"", 1)]

    for line, entry in zip(lines, log.entries, strict=True):
        parent = json.dumps(entry["parentId"])
        link = f'"id":"{entry["id"]}","parentId":{parent},'
        plain.append(line.replace(link.encode(), b"", 1))

    assert b"".join(plain) == REAL.read_bytes()


async def test_its_missing_results_can_be_closed(cp: Store) -> None:
    """Each result stands behind its call, and no message moves."""
    log = await SessionLog.import_jsonl(cp, REAL)
    before = log.context()
    closed = await log.close_missing_results("gone")
    after = log.context()
    assert len(closed) == len(before.missing_results) > 0
    assert after.missing_results == []
    kept = [m for m in after.messages if "gone" not in json.dumps(m)]
    assert kept == [m for m in before.messages if "gone" not in json.dumps(m)]
