"""What a store answers is what it was asked for: calls in the place of others."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cpkit import CorruptThread, ToolCall, open_checkpointer
from cpkit.driver import handle_over
from cpkit.driver.key_value import _hash, _number
from cpkit.driver.sealed import SealedStore
from cpkit_file.lines import SEAL, sealed
from tests.driver.test_key_value import _Dict
from tests.privacy.raw import ring

PAY = ToolCall("c1", "pay", {"n": 1}, "pay-1")
MAIL = ToolCall("c2", "mail", {"n": 2}, "mail-2")
PLACE = b"k" + _hash("pay-1")  # the row that says where the call of this key is

Moves = dict[bytes, Callable[[dict[bytes, bytes]], bytes]]

# Rows that an attacker replaces by others, and the operation that meets them.
ATTACKS: dict[str, tuple[Moves, Callable[[Any], Awaitable[Any]]]] = {
    "the result of another key": (
        {b"k" + _hash("new"): lambda rows: rows[PLACE]},
        lambda cp: cp.find_completed("new"),
    ),
    "a claim of another key": (
        {b"k" + _hash("new"): lambda rows: rows[PLACE]},
        lambda cp: cp.record_issued("b", ToolCall("c9", "pay", {}, "new")),
    ),
    "an outcome of another call": (
        {b"i" + _hash("b") + _hash("c2"): lambda rows: rows[PLACE]},
        lambda cp: cp.record_result("b", "c2", 1),
    ),
    "a call of another thread": (
        {b"c" + _hash("b") + _number(5): lambda rows: rows[rows[PLACE]]},
        lambda cp: cp.list_calls("b"),
    ),
    "a dump with a call of another thread": (
        {b"c" + _hash("b") + _number(5): lambda rows: rows[rows[PLACE]]},
        lambda cp: cp.dump_thread("b"),
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_call_of_another_place_is_refused(attack: str) -> None:
    """Each row is as it was written; a row that leads to it is not."""
    moves, operation = ATTACKS[attack]
    rows: dict[bytes, bytes] = {}

    async with handle_over(SealedStore(_Dict(rows, "asked"), ring())) as opened:
        cp: Any = opened
        await cp.record_issued("a", PAY)
        await cp.record_result("a", "c1", {"receipt": 1})
        await cp.record_issued("b", MAIL)
        await cp.append("b", [{"n": 1}])
        assert (await cp.find_completed("pay-1")).result == {"receipt": 1}
        rows |= {place: row(rows) for place, row in moves.items()}

        with pytest.raises(CorruptThread, match="not the call in this place"):
            await operation(cp)

        assert (await cp.find_completed("pay-1")).result == {"receipt": 1}


async def test_a_file_with_a_call_of_another_thread(tmp_path: Path) -> None:
    """A line of one file is added to another one, with the thread it is from."""
    url = f"file://{tmp_path}/files"

    async with open_checkpointer(url, keyring=ring()) as filled:
        await filled.record_issued("a", PAY)
        await filled.record_issued("b", MAIL)

    logs = {
        json.loads(path.read_bytes().partition(b"\n")[0])["thread"]: path
        for path in (tmp_path / "files").rglob("*")
        if path.is_file() and path.read_bytes().startswith(b'{"thread":')
    }
    [line] = [
        one for one in logs["a"].read_bytes().splitlines() if one.startswith(b'{"call"')
    ]
    content = line[: line.rfind(b',"at":[')]
    moved = content.replace(b'"call_id"', b'"thread_id":"a","call_id"', 1)
    whole = logs["b"].read_bytes()
    added = sealed(whole[-SEAL:], [(moved, 1, 1_800_000_000_000_000)])
    logs["b"].write_bytes(whole + added)

    async with open_checkpointer(url, keyring=ring()) as opened:
        cp: Any = opened

        for read in (cp.load, cp.list_calls):
            with pytest.raises(CorruptThread, match="not the call in this place"):
                await read("b")
