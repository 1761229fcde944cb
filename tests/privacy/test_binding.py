"""A value that is changed, moved or exchanged in the raw file is found."""

from __future__ import annotations

import random
import shutil
from base64 import urlsafe_b64decode
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cpkit import CorruptThread, KeyMissing
from cpkit.driver.seal import DataKey, Sealer
from cpkit.privacy import rewrap
from tests.privacy.raw import fill, opened, ring, rows, run

SWAP = "UPDATE {0} SET {1} = (SELECT {1} FROM {0} WHERE {2}) WHERE {3}"
MESSAGE = "cpkit_messages", "body"
EXTRA = "cpkit_extra", "value"
FIRST = "thread_number = 1 AND key = "

# What an attacker does to thread t, whose twin has the same content.
ATTACKS = {
    "message moved": SWAP.format(*MESSAGE, "key = (1 << 32)", "key = (1 << 32) + 1"),
    "message of the twin": SWAP.format(*MESSAGE, "key = (2 << 32)", "key = (1 << 32)"),
    "message became extra": "UPDATE cpkit_extra SET value = "
    f"(SELECT body FROM cpkit_messages) WHERE {FIRST}'\"a\"'",
    "extra became message": "UPDATE cpkit_messages SET body = "
    "(SELECT value FROM cpkit_extra) WHERE key = (1 << 32)",
    "extra moved": SWAP.format(*EXTRA, FIRST + "'\"a\"'", FIRST + "'\"b\"'"),
    "extra renamed": f"UPDATE cpkit_extra SET key = '\"z\"' WHERE {FIRST}'\"a\"'",
    "extra of the twin": SWAP.format(
        *EXTRA, "thread_number = 2 AND key = '\"a\"'", FIRST + "'\"a\"'"
    ),
    "args of another call": SWAP.format(
        "cpkit_calls", "args", "sequence = 2", "sequence = 1"
    ),
    "result of another call": SWAP.format(
        "cpkit_calls", "result", "sequence = 2", "sequence = 1"
    ),
    "result became args": "UPDATE cpkit_calls SET args = result WHERE sequence = 1",
    "another outcome": "UPDATE cpkit_calls SET status = 'failed' WHERE sequence = 1",
    "another key": "UPDATE cpkit_calls SET idempotency_key = 'k' WHERE sequence = 1",
    "another tool": "UPDATE cpkit_calls SET tool_name = 'x' WHERE sequence = 1",
    "another call id": "UPDATE cpkit_calls SET call_id = 'x' WHERE sequence = 1",
    "another thread id": "UPDATE cpkit_threads SET thread_id = 'u' WHERE number = 1",
    "threads exchanged": "UPDATE cpkit_messages SET key = key - (1 << 32) "
    "WHERE key >= (2 << 32) AND NOT EXISTS "
    "(SELECT 1 FROM cpkit_messages AS m WHERE m.key = cpkit_messages.key - (1 << 32))",
    "a message left out": "UPDATE cpkit_messages SET key = key - 1 "
    "WHERE key >= (1 << 32) + 1 AND key < (2 << 32)",
    "the head of another key": "UPDATE cpkit_messages SET body = CAST((SELECT "
    "substr(body, 1, instr(body, x'2c')) FROM cpkit_messages WHERE key = (2 << 32)) "
    "|| substr(body, instr(body, x'2c') + 1) AS BLOB) WHERE key = (1 << 32)",
}
FORGED = "UPDATE cpkit_calls SET {} WHERE sequence = 1"
PLAIN = "status = 'completed', result = '{\"paid\":1}'"
# Without a keyring: a call gets an outcome that no process wrote, or loses it.
ATTACKS |= {
    "an outcome without a result": FORGED.format("status = 'completed', result = NULL"),
    "erased with a result": FORGED.format(f"erased = 1, args = '{{}}', {PLAIN}"),
    "erased with args": FORGED.format("erased = 1, args = '{\"to\":2}', result = NULL"),
}
BEFORE = {
    "threads exchanged": "DELETE FROM cpkit_messages WHERE key < (2 << 32)",
    "a message left out": "DELETE FROM cpkit_messages WHERE key = (1 << 32)",
}


async def read_all(cp: Any) -> None:
    """Read every value of every thread."""
    for info in await cp.list_threads():
        await cp.load(info.thread_id)
        await cp.list_calls(info.thread_id)

    for key in ("t c1", "k"):
        await cp.find_call(key)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_value_in_another_place_is_found(attack: str, tmp_path: Path) -> None:
    """Each value opens in its own place only."""
    async with opened(tmp_path) as cp:
        await fill(cp, "t")
        await fill(cp, "twin")

    if attack in BEFORE:
        run(tmp_path, BEFORE[attack])

    run(tmp_path, ATTACKS[attack])

    async with opened(tmp_path) as cp:
        with pytest.raises(CorruptThread):
            await read_all(cp)


async def test_a_message_of_an_ended_life_does_not_move(tmp_path: Path) -> None:
    """A message of a deleted thread is refused in every other place."""
    async with opened(tmp_path) as cp:
        await fill(cp, "t")
        [[old]] = rows(tmp_path, "SELECT body FROM cpkit_messages WHERE key=(1 << 32)")
        await cp.delete_thread("t", forget_keys=True)
        await fill(cp, "t")

    run(tmp_path, "UPDATE cpkit_messages SET body = ? WHERE key = (1 << 32) + 1", old)

    async with opened(tmp_path) as cp:
        with pytest.raises(CorruptThread, match="message 1"):
            await cp.load("t")


VALUES = [
    ("cpkit_messages", "body", "key"),
    ("cpkit_extra", "value", "key"),
    ("cpkit_calls", "args", "sequence"),
    ("cpkit_calls", "result", "sequence"),
]


async def test_each_changed_byte_is_found(tmp_path: Path) -> None:
    """In the raw file; ``test_each_store.py`` changes every byte."""
    async with opened(tmp_path) as cp:
        await fill(cp, "t", "a canary")

    chosen = random.Random(46)
    place = tmp_path / "a.db"
    shutil.copy(place, tmp_path / "whole")

    async with opened(tmp_path) as cp:
        for table, column, key in VALUES:
            found = rows(tmp_path, f"SELECT {key}, {column} FROM {table}")
            row, text = found[0]
            whole = text if isinstance(text, bytes) else text.encode()
            spots = chosen.sample(range(len(text)), 12)

            for spot in [*spots, 0, 1, 2, len(text) - 1, len(text) - 2]:
                other = bytes([chosen.randrange(32, 127)])
                changed = whole[:spot] + other + whole[spot + 1 :]

                if changed == whole:
                    continue

                run(
                    tmp_path,
                    f"UPDATE {table} SET {column}=? WHERE {key}=?",
                    changed,
                    row,
                )

                with pytest.raises(CorruptThread):
                    await read_all(cp)

            run(tmp_path, f"UPDATE {table} SET {column} = ? WHERE {key} = ?", text, row)

        await read_all(cp)


async def test_plain_values_are_refused_where_the_ring_says_so(tmp_path: Path) -> None:
    """Without ``sealed_only``, an attacker can put readable values into the store."""
    async with opened(tmp_path) as cp:
        await fill(cp, "t")

    run(tmp_path, "UPDATE cpkit_extra SET value = '1' WHERE key = '\"a\"'")

    async with opened(tmp_path) as cp:
        assert (await cp.load("t")).extra["a"] == 1

    async with opened(tmp_path, ring(sealed_only=True)) as cp:
        with pytest.raises(CorruptThread, match="not encrypted"):
            await cp.load("t")


async def test_a_plain_message_after_a_sealed_one_is_refused(tmp_path: Path) -> None:
    """A thread is plain from its begin, up to the first value with a keyring."""
    async with opened(tmp_path) as cp:
        await fill(cp, "t")

    run(tmp_path, "UPDATE cpkit_messages SET body = '{}' WHERE key = (1 << 32) + 2")

    async with opened(tmp_path) as cp:
        with pytest.raises(CorruptThread, match="message 2"):
            await cp.load("t")


async def test_what_the_page_says_is_not_found(tmp_path: Path) -> None:
    """An older state of a thread, or of a key of extra, opens: it was written there."""
    async with opened(tmp_path) as cp:
        await fill(cp, "t")
        [[old]] = rows(tmp_path, "SELECT value FROM cpkit_extra WHERE key = '\"b\"'")
        await cp.save_extra("t", {"b": "new"})

    run(tmp_path, "UPDATE cpkit_extra SET value = ? WHERE key = '\"b\"'", old)
    run(tmp_path, "DELETE FROM cpkit_messages WHERE key = (1 << 32) + 2")

    async with opened(tmp_path) as cp:
        data = await cp.load("t")
        assert (data.extra["b"], data.version) == ("", 2)


async def test_a_value_of_another_thread_brings_no_key(tmp_path: Path) -> None:
    """A writer goes on with the data key of a value that opens in its thread only."""
    async with opened(tmp_path) as cp:
        await fill(cp, "t")
        await fill(cp, "twin")

    run(tmp_path, SWAP.format(*MESSAGE, "key = (2 << 32) + 2", "key = (1 << 32) + 2"))

    async with opened(tmp_path) as cp:
        await cp.append("t", [{"n": 3}])

    heads = [
        body.partition(b",")[0]
        for [body] in rows(tmp_path, "SELECT body FROM cpkit_messages ORDER BY key")
    ]
    assert heads[3] not in heads[4:]


# A record of a thread in SQL, without the thread's number.
RECORD = "key LIKE '\"cpkit:key:%' AND thread_number ="


async def rewrapped(folder: Path) -> None:
    """Fill two threads, with the numbers 1 and 2, which get records."""
    async with opened(folder) as cp:
        await fill(cp, "t")
        await fill(cp, "twin")

    async with opened(folder, ring("k1", "k2")) as cp:
        await rewrap(cp)


async def test_a_record_of_another_thread_does_no_harm(tmp_path: Path) -> None:
    """What stands in one thread cannot spoil the keys of another one."""
    await rewrapped(tmp_path)
    run(tmp_path, f"UPDATE cpkit_extra SET thread_number = 3 WHERE {RECORD} 2")
    run(
        tmp_path,
        f"INSERT INTO cpkit_extra SELECT 2, (SELECT key FROM cpkit_extra "
        f"WHERE {RECORD} 1), value FROM cpkit_extra WHERE {RECORD} 3",
    )
    run(tmp_path, SWAP.format(*MESSAGE, "key = (1 << 32)", "key = (2 << 32)"))

    async with opened(tmp_path, ring("k2")) as cp:
        with pytest.raises(CorruptThread):
            await cp.load("twin")

        assert len((await cp.load("t")).messages) == 3


async def test_a_record_that_is_put_right_again(tmp_path: Path) -> None:
    """A handle that met a wrong record looks for the right one later."""
    await rewrapped(tmp_path)
    [[good]] = rows(tmp_path, f"SELECT value FROM cpkit_extra WHERE {RECORD} 1")
    [[bad]] = rows(tmp_path, f"SELECT value FROM cpkit_extra WHERE {RECORD} 2")

    async with opened(tmp_path, ring("k2")) as cp:
        run(tmp_path, f"UPDATE cpkit_extra SET value = ? WHERE {RECORD} 1", bad)

        for operation in (cp.load("t"), cp.find_call("t c1")):
            with pytest.raises(CorruptThread):
                await operation

        run(tmp_path, f"UPDATE cpkit_extra SET value = ? WHERE {RECORD} 1", good)
        assert (await cp.find_call("t c1")).result["by"] == "c1"
        assert len((await cp.load("t")).messages) == 3


async def test_an_old_key_that_leaked_opens_no_new_thread(tmp_path: Path) -> None:
    """Its owner knows data keys of old threads, and finds them under the newest key."""
    stolen = ring("k1")

    async with opened(tmp_path, stolen) as cp:
        await fill(cp, "t")

    async with opened(tmp_path, ring("k1", "k2")) as cp:
        await rewrap(cp)

    async with opened(tmp_path, ring("k2")) as cp:
        await cp.append("victim", [{"n": 0}])

    [[old]] = rows(tmp_path, "SELECT body FROM cpkit_messages WHERE key = (1 << 32)")
    [[record]] = rows(
        tmp_path, "SELECT value FROM cpkit_extra WHERE key LIKE '\"cpkit:key:%'"
    )
    head = old.partition(b",")[0]
    key_id, wrapped = head.split(b":")[2:4]
    opens = stolen.unwrap(key_id.decode(), urlsafe_b64decode(wrapped))[:32]

    for taken in (record.encode()[:-1], head):
        for thread_id, number, position in (("t", 1, 3), ("victim", 2, 1)):
            sealer = Sealer(stolen)
            bound = sealer._bound(taken, thread_id)
            data_key = DataKey("k2", taken, AESGCM(opens), bound)
            forged = sealer._sealed_bytes(data_key, b"{}", b"%bm%d" % (bound, position))
            place = (number << 32) + position
            run(
                tmp_path,
                "INSERT INTO cpkit_messages VALUES (?, 0, ?)",
                place,
                forged,
            )

            async with opened(tmp_path, ring("k2")) as cp:
                if (taken, thread_id) == (head, "t"):
                    assert len((await cp.load("t")).messages) == 4
                    continue

                with pytest.raises((CorruptThread, KeyMissing)):
                    await cp.load(thread_id)

            run(tmp_path, "DELETE FROM cpkit_messages WHERE key = ?", place)


async def test_a_key_of_extra_that_is_not_text(tmp_path: Path) -> None:
    """The error has it in a form that can be printed."""
    async with opened(tmp_path) as cp:
        await fill(cp, "t")

    run(tmp_path, "UPDATE cpkit_extra SET key = x'22ff22' WHERE key = '\"a\"'")

    async with opened(tmp_path) as cp:
        with pytest.raises(CorruptThread, match="extra key"):
            await cp.load("t")


async def test_a_damaged_call_does_not_hide_the_others(tmp_path: Path) -> None:
    """The error has the calls that can be read, as of a plain store."""
    async with opened(tmp_path) as cp:
        await fill(cp, "t")

    run(tmp_path, "UPDATE cpkit_calls SET args = result WHERE sequence = 1")

    async with opened(tmp_path) as cp:
        with pytest.raises(CorruptThread, match="'c1'") as raised:
            await cp.list_calls("t")

        assert [one.call.args for one in raised.value.calls] == [{"c2": ""}]
