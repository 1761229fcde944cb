"""A write that a power loss left in parts is set aside by the next writer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cpkit import CorruptThread, ThreadDump, ToolCall
from cpkit_file import FileCheckpointer
from tests.file.disk import make_tree, torn_states, tree_of
from tests.sweeps import sweep

Store = FileCheckpointer[Any]

CALL = ToolCall("c", "pay", {"pad": "x" * 900}, "key")
OTHER = ToolCall("d", "pay", {"pad": "y" * 900}, "other key")


async def append(cp: Store) -> None:
    await cp.append("t", [{"pad": "x" * 1500}])


async def append_batch(cp: Store) -> None:
    """One write and one sync for lines of several kinds."""
    await asyncio.gather(
        *(cp.append("t", [{"n": n, "pad": "x" * 400}]) for n in range(3)),
        cp.save_extra("t", {"pad": "y" * 300}),
    )


async def claim(cp: Store) -> None:
    await cp.record_issued("t", CALL)


async def resolve(cp: Store) -> None:
    await cp.record_result("t", "d", {"pad": "x" * 900})


WRITES: dict[str, Callable[[Store], Awaitable[None]]] = {
    "one line": append,
    "a batch": append_batch,
    "a claim": claim,
    "a result": resolve,
}


async def states_of(cp: Store) -> ThreadDump | None:
    """Return the thread, after checking that all ways of reading it agree."""
    dump = await cp.dump_thread("t")
    data = await cp.load("t")
    listed = [(i.thread_id, i.version) for i in await cp.list_threads()]

    if dump is None or dump.created_at is None:
        assert data is None
        assert listed == []
    else:
        assert data is not None
        assert data.messages == dump.messages == await cp.read("t")
        assert data.extra == dump.extra
        assert listed == [("t", len(dump.messages))]

    calls = [] if dump is None else dump.calls
    assert await cp.list_calls("t") == calls

    for record in calls:
        assert await cp.find_call(record.call.idempotency_key) == record

    return dump


@pytest.mark.parametrize("name", sweep(WRITES, ["one line"]))
@pytest.mark.parametrize("first", sweep([True, False], [False]))
async def test_a_write_with_holes_or_cut_short_does_not_block_the_thread(
    home: Path, log: Path, name: str, first: bool
) -> None:
    """Whole lines before the first hole stay; the rest is set aside by a writer."""
    async with Store(home) as cp:
        if not first:
            await cp.append("t", [{"n": 1}], extra={"k": 1})

        if name == "a result":
            await cp.record_issued("t", OTHER)

        before = log.read_bytes() if log.exists() else b""
        old = await states_of(cp)
        await WRITES[name](cp)
        after = log.read_bytes()
        new = await states_of(cp)

    seen = []
    kept = dict(tree_of(home))

    for state in torn_states(before, after):
        kept[str(log.relative_to(home))] = state
        make_tree(home, tuple(kept.items()))

        async with Store(home) as cp:
            found = await states_of(cp)
            seen.append(found)

            if name != "a batch":
                assert found in (old, new)

            version = len(found.messages) if found else 0
            assert await cp.append("t", [{"n": 2}], expected_version=version)
            again = await cp.record_issued("t", CALL)
            known = [record.call for record in found.calls] if found else []
            assert (again is None) is (CALL not in known)

        async with Store(home) as cp:
            await cp.append("t", [{"n": 3}])
            assert (await cp.read("t"))[version:] == [{"n": 2}, {"n": 3}]
            assert await cp.find_call("key") is not None

    assert old in seen
    assert len(seen) >= 20


@pytest.mark.parametrize("lost", [1, 2, 9, 15])
async def test_a_hole_anywhere_in_a_long_write_is_found(
    home: Path, log: Path, lost: int
) -> None:
    """Its last lines are whole, and more than a writer looks at otherwise."""
    async with Store(home) as cp:
        await cp.append("t", [{"n": 0}])
        before = log.stat().st_size
        await asyncio.gather(
            *(cp.append("t", [{"n": n, "pad": "x" * 900}]) for n in range(1, 10))
        )

    content = bytearray(log.read_bytes())
    content[lost * 512 : (lost + 1) * 512] = bytes(512)
    log.write_bytes(content)
    left = (lost * 512 - before) // 960 + 1

    async with Store(home) as cp:
        assert await cp.append("t", [{}]) == left + 1
        assert [one.get("n") for one in await cp.read("t")] == [*range(left), None]


async def test_a_sector_of_zeros_before_written_bytes_is_set_aside(
    home: Path, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Appends after it can be read."""
    line = b'{"add":{"never":"acknowledged"},"at":[2,1795232045123456,"00000000"]}\n'

    async with Store(home) as cp:
        await cp.append("t", [{"n": 1}])
        whole = log.read_bytes()

        for torn in (b"\0" * 512, b"\0" * 512 + line, line[:9] + b"\0" * 512 + line):
            log.write_bytes(whole + torn)
            assert await cp.read("t") == [{"n": 1}]
            assert await cp.append("t", [{"n": 2}]) == 2
            assert await cp.read("t") == [{"n": 1}, {"n": 2}]
            assert log.with_name(f"{log.name}.torn").read_bytes().endswith(torn + b"\n")

    assert "never acknowledged" in caplog.text


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 600, b"\0" * 300 + b'"}\n'])
async def test_a_first_write_of_zeros_is_an_absent_thread(
    home: Path, log: Path, content: bytes
) -> None:
    """The thread is absent, has no calls, and begins with the next write."""
    async with Store(home) as cp:
        assert log.parent.is_dir()
        log.write_bytes(content)
        assert await states_of(cp) is None
        await cp.delete_thread("t")
        log.write_bytes(content)
        assert await cp.append("t", [{}], expected_version=0) == 1
        assert await cp.read("t") == [{}]


@pytest.mark.parametrize("damage", [b"X", b" ", b"\r", b""])
@pytest.mark.parametrize("last", [True, False])
async def test_a_damaged_newline_between_two_claims_frees_no_key(
    home: Path, log: Path, damage: bytes, last: bool
) -> None:
    """Both lines were acknowledged, so this is corruption."""
    async with Store(home) as cp:
        await cp.record_issued("t", CALL)
        await cp.record_issued("t", OTHER)

        if not last:
            await cp.append("t", [{}])

    lines = log.read_bytes().splitlines(keepends=True)
    assert CALL.call_id.encode() in lines[1]
    lines[1] = lines[1][:-1] + damage
    log.write_bytes(b"".join(lines))

    async with Store(home) as cp:
        for key in ("key", "other key"):
            with pytest.raises(CorruptThread):
                await cp.find_call(key)

            with pytest.raises(CorruptThread):
                await cp.record_issued("u", ToolCall("e", "pay", {}, key))


@pytest.mark.parametrize("lost", sweep(range(1, 6), [1, 3, 5]))
async def test_a_hole_in_synced_lines_is_corruption(
    home: Path, log: Path, lost: int
) -> None:
    """A later line shows that the line with the hole had been synced."""
    async with Store(home) as cp:
        for n in range(8):
            await cp.append("t", [{"n": n, "pad": "x" * 700}])

    content = bytearray(log.read_bytes())
    content[lost * 512 : (lost + 1) * 512] = bytes(512)
    log.write_bytes(content)

    async with Store(home) as cp:
        for use in (cp.load("t"), cp.dump_thread("t"), cp.list_calls("t")):
            with pytest.raises(CorruptThread):
                await use

        assert await cp.append("t", [{}]) == 9
        assert log.read_bytes().startswith(content)
