"""The stored format, byte by byte: other versions of cpkit have to read it."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cpkit_redis
from cpkit import SchemaMismatch, ToolCall
from cpkit_redis import RedisCheckpointer
from tests.servers.redis import RedisServer, redis_binary

Store = RedisCheckpointer[Any]


async def stored(raw: Any, prefix: str) -> dict[str, Any]:
    """Return every key of the store, without the prefix, and its value."""
    found: dict[str, Any] = {}

    async for key in raw.scan_iter(f"{{{prefix}}}:*", count=1000):
        name = key.decode().removeprefix(f"{{{prefix}}}:")
        kind = await raw.type(key)

        if kind == b"string":
            found[name] = await raw.get(key)
        elif kind == b"list":
            found[name] = await raw.lrange(key, 0, -1)
        elif kind == b"hash":
            found[name] = await raw.hgetall(key)
        else:
            found[name] = await raw.zrange(key, 0, -1, withscores=True)

    return found


async def test_the_stored_format_is_frozen(cp: Store, raw: Any, prefix: str) -> None:
    """Keys, types and values are always the same, except for times."""
    await cp.append("t", [{"é": "\0"}, {"n": "\ud83d"}])
    await cp.save_extra("t", {"plan": [1], "": None})
    await cp.record_issued("t", ToolCall("c1", "pay", {"b": 1, "a": 2}, "{key}"))
    await cp.record_result("t", "c1", {"no": 1}, success=False)
    await cp.record_issued("t", ToolCall("c2", "pay", {}, "{key}"))
    await cp.record_issued("t", ToolCall("c3", "x", {"z": 1}, "other"))
    await cp.record_result("t", "c3", None)
    found = await stored(raw, prefix)

    times = found["t:t"]
    assert set(times) == {b"created", b"updated"}
    assert all(int(time) > 1_700_000_000_000_000 for time in times.values())

    def untimed(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
        return {
            name: b"\0".join(
                b"T" if part.isdigit() and len(part) == 16 else part
                for part in text.split(b"\0")
            )
            for name, text in fields.items()
        }

    hashes = {name: untimed(found[name]) for name in ("p:t", "c:t")}
    assert re.fullmatch(rb"1 [0-9a-f]{32}", found["schema"])
    assert found | hashes | {"t:t": None} == {
        "schema": found["schema"],
        "threads": [(b"t", 0.0)],
        "m:t": ['{"é":"\\u0000"}'.encode(), b'{"n":"\\ud83d"}'],
        "x:t": {b'"plan"': b"[1]", b'""': b"null"},
        "t:t": None,
        "p:t": {b"c2": b"2\0002\0{key}\0pay\0T\0issued\0\0{}\0"},
        "c:t": {
            b"c1": b'1\0001\0{key}\0pay\0T\0failed\0T\0{"b":1,"a":2}\0{"no":1}',
            b"c3": b'3\0001\0other\0x\0T\0completed\0T\0{"z":1}\0null',
        },
        "k:{key}": [(b"t\0c1", 1.0), (b"t\0c2", 2.0)],
        "k:other": [(b"t\0c3", 1.0)],
    }

    await cp.delete_thread("t")
    erased = await stored(raw, prefix)
    assert untimed(erased.pop("c:t")) == {
        b"c1": b"1\0001\0{key}\0pay\0T\0failed\0T\0\0",
        b"c2": b"2\0002\0{key}\0pay\0T\0issued\0\0\0",
        b"c3": b"3\0001\0other\0x\0T\0completed\0T\0\0",
    }
    assert erased == {
        "schema": found["schema"],
        "erased": [(b"t", 0.0)],
        "k:{key}": found["k:{key}"],
        "k:other": found["k:other"],
    }


async def test_a_trim_changes_first_and_nothing_else(
    cp: Store, raw: Any, prefix: str
) -> None:
    """The messages are gone from the list, also all of them; no time moves."""
    await cp.append("t", [{"n": n} for n in range(3)], extra={"a": 1})
    before = await stored(raw, prefix)
    assert await cp.trim("t", 2) == 2
    times = before["t:t"] | {b"first": b"2"}
    assert await stored(raw, prefix) == before | {"m:t": [b'{"n":2}'], "t:t": times}
    assert await cp.trim("t", 9) == 1
    del before["m:t"]
    assert await stored(raw, prefix) == before | {"t:t": times | {b"first": b"3"}}


@pytest.mark.parametrize("erased", [False, True])
async def test_a_restored_thread_is_stored_as_the_original(
    cp: Store, raw: Any, prefix: str, erased: bool
) -> None:
    """Every key and value is the same, also of an id with nothing but erased calls.

    Only the time of the restore is new.
    """
    await cp.append("t", [{"é": "\0"}, {"n": 1.5}], extra={"plan": [1], "": None})
    await cp.record_issued("t", ToolCall("c1", "pay", {"b": 1}, "{key}"))
    await cp.record_result("t", "c1", {"no": 1}, success=False)
    await cp.record_issued("t", ToolCall("c2", "pay", {}, "{key}"))
    await cp.trim("t", 1)

    if erased:
        await cp.delete_thread("t")

    before = await stored(raw, prefix)
    dump = await cp.dump_thread("t")
    assert dump is not None
    await cp.delete_thread("t", forget_keys=True)
    await cp.restore_thread(dump)
    found = await stored(raw, prefix)

    if not erased:
        assert int(found["t:t"].pop(b"restored")) > int(before["t:t"][b"updated"])

    assert found == before


async def test_a_store_written_by_hand_is_read(url: str, raw: Any, prefix: str) -> None:
    """Values that schema.py describes can be read, whatever wrote them.

    The first ten messages of this thread are gone.
    """
    base = f"{{{prefix}}}:"
    await raw.set(f"{base}schema", 1)
    await raw.zadd(f"{base}threads", {"t": 0})
    await raw.rpush(f"{base}m:t", '{"a":1}', '{ "b" : 2 }')
    await raw.hset(f"{base}x:t", mapping={'"k"': "1"})
    times = {"created": 1, "updated": 2_000_000, "first": 10}
    await raw.hset(f"{base}t:t", mapping=times)
    record = "1\0001\0key\0pay\0001500000\0issued\0\0{}\0"
    await raw.hset(f"{base}p:t", mapping={"c": record})
    await raw.zadd(f"{base}k:key", {"t\0c": 1})

    async with Store(url, prefix=prefix) as cp:
        data = await cp.load("t")
        assert data is not None
        assert (data.version, data.first) == (12, 10)
        assert data.messages == [{"a": 1}, {"b": 2}]
        assert data.extra == {"k": 1}
        [found] = data.pending
        assert found == await cp.find_call("key")
        assert found.issued_at.timestamp() == 1.5
        [info] = await cp.list_threads()
        assert info.version == 12
        assert info.updated_at.timestamp() == 2
        assert await cp.append("t", [{}], expected_version=12) == 13
        resolved = await cp.record_result("t", "c", 1)
        assert [resolved] == await cp.list_calls("t")

        everything: list[dict[str, int]] = [{"a": 1}, {"b": 2}, {}]
        assert await cp.read("t", 11) == everything[1:]
        assert await cp.read("t", 0, 11) == everything[:1]
        assert await cp.read("t", 12, -1) == []
        assert await cp.read("t", -2) == everything[1:]
        assert await cp.read("t", 0, 10) == await cp.read("t", 13) == []


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ("2", "version 2, and this cpkit knows 1: upgrade cpkit"),
        ("2 0123abc", "version 2, and this cpkit knows 1: upgrade cpkit"),
        ("0", "use another place"),
        ("a song", "a song"),
    ],
    ids=["newer", "newer, with an id", "older", "text"],
)
async def test_another_version_is_refused(
    url: str, raw: Any, prefix: str, there: str, message: str
) -> None:
    """A newer version and an alien value raise ``SchemaMismatch`` and stay."""
    name = f"{{{prefix}}}:schema"
    await raw.set(name, there)
    before = await raw.dump(name)

    with pytest.raises(SchemaMismatch, match=message):
        async with Store(url, prefix=prefix):
            pytest.fail("it opened")

    assert await raw.dump(name) == before
    assert [key async for key in raw.scan_iter(f"{{{prefix}}}:*", count=1000)] == [
        name.encode()
    ]


async def test_many_open_a_new_store_at_once(url: str, raw: Any, prefix: str) -> None:
    """One of them sets the version and the id, and all can write."""

    async def use(number: int) -> int:
        async with Store(url, prefix=prefix) as cp:
            return await cp.append("t", [{"n": number}])

    versions = await asyncio.gather(*(use(number) for number in range(20)))
    assert sorted(versions) == list(range(1, 21))
    assert (await raw.get(f"{{{prefix}}}:schema")).startswith(b"1 ")


async def test_a_person_can_run_the_script(servers: Callable[..., RedisServer]) -> None:
    """The commands in the script's comments work with ``redis-cli``."""
    cli = Path(redis_binary()).with_name("redis-cli")

    if not cli.exists():
        pytest.skip(f"needs {cli}")

    server = servers()
    folder = Path(cpkit_redis.__file__).parent
    script = (folder / "operations.lua").read_text()
    commands = re.findall(r"^--   redis-cli (--eval .*)$", script, re.MULTILINE)
    assert len(commands) > 3
    answers = []

    for command in commands:
        words = [str(cli), "-p", str(server.port), *shlex.split(command)]
        process = await asyncio.create_subprocess_exec(
            *words, cwd=folder, stdout=asyncio.subprocess.PIPE
        )
        answer, _ = await process.communicate()
        answers.append(answer.split())

    assert [words[:2] for words in answers] == [
        [b"1"],
        [b"1"],
        [],
        [b"call", b"t"],
        [b"t", b"1"],
    ]
    call = ToolCall("call", "tool", {}, "key")

    async with Store(server.url) as cp:
        assert await cp.read("t") == [{"a": 1}]
        found = await cp.find_call("key")
        assert found is not None
        assert (found.thread_id, found.call, found.attempt) == ("t", call, 1)
