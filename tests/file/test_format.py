"""The stored format, byte for byte: later versions must read it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from cpkit import ToolCall
from cpkit.driver.codec import from_micros
from cpkit_file import FileCheckpointer, lines

Store = FileCheckpointer[Any]

T = "1795232045123456"

MARK = b'{"cpkit":"file","version":1}\n'
LOG = f"""\
{{"thread":"t","created":{T},"at":[null,"35123996"]}}
{{"add":{{"role":"user","content":"h\u00e9llo\\u0000"}},"at":[1,{T},65,"e5e86d04"]}}
{{"add":[\t{{"n":1.0}}\t,\t{{"n":100000000000000000000}}\t],"at":[3,{T},"41ce0293"]}}
{{"extra":{{\t"plan"\t:\tnull\t,\t"a b"\t:\t["x"]\t}},"at":[3,{T},"89a3d164"]}}
{{"add":[\t{{}}\t],"extra":{{\t"n"\t:\t1\t}},"at":[4,{T},"f7be55eb"]}}
{{"call":\t{{"call_id":"c1","tool_name":"pay","idempotency_key":"k1",\
"status":"issued","attempt":1,"issued_at":{T}}}\t,"args":\t{{"amount":10}}\t,"at":[4,\
{T},"5c81bc33"]}}
{{"call":\t{{"call_id":"c1","status":"failed","resolved_at":{T}}}\t,\
"result":\t"busy"\t,"at":[4,{T},"11d7819c"]}}
{{"call":\t{{"call_id":"c2","tool_name":"pay","idempotency_key":"k1",\
"status":"issued","attempt":2,"issued_at":{T}}}\t,"args":\t{{"amount":10}}\t,"at":[4,\
{T},"00ffa61f"]}}
{{"call":\t{{"call_id":"c2","status":"completed","resolved_at":{T}}}\t,\
"result":\t{{"ok":true}}\t,"at":[4,{T},"b38a04d1"]}}
{{"call":\t{{"call_id":"c3","tool_name":"ask","idempotency_key":"k2",\
"status":"issued","attempt":1,"issued_at":{T}}}\t,"args":\t{{}}\t,"at":[4,{T},\
"1b842b75"]}}
"""
ERASED = f"""\
{{"thread":"t","at":[null,"753a8035"]}}
{{"call":\t{{"call_id":"c1","tool_name":"pay","idempotency_key":"k1",\
"status":"failed","attempt":1,"issued_at":{T},"resolved_at":{T},"erased":true}}\t,\
"at":[null,"49885096"]}}
{{"call":\t{{"call_id":"c2","tool_name":"pay","idempotency_key":"k1",\
"status":"completed","attempt":2,"issued_at":{T},"resolved_at":{T},"erased":true}}\t,\
"at":[null,"27407605"]}}
{{"call":\t{{"call_id":"c3","tool_name":"ask","idempotency_key":"k2",\
"status":"issued","attempt":1,"issued_at":{T},"erased":true}}\t,"at":[null,\
"24324b11"]}}
{{"call":\t{{"call_id":"c3","status":"completed","resolved_at":{T}}}\t,"at":[null,\
"c01dbc8e"]}}
{{"thread":"t","created":{T},"at":[null,"f8cd6650"]}}
{{"add":{{}},"at":[1,{T},65,"0350c90d"]}}
"""
TRIMMED = f"""\
{{"thread":"t","created":{T},"trimmed":2,"at":[null,"CCCCCCCC"]}}
{{"add":{{"n":100000000000000000000}},"at":[3,{T},"CCCCCCCC"]}}
{{"add":{{}},"at":[4,{T},"CCCCCCCC"]}}
{{"extra":{{\t"plan"\t:\tnull\t,\t"a b"\t:\t["x"]\t,\t"n"\t:\t1\t}},\
"at":[4,{T},"CCCCCCCC"]}}
{{"call":\t{{"call_id":"c1","tool_name":"pay","idempotency_key":"k1",\
"status":"failed","attempt":1,"issued_at":{T},"resolved_at":{T}}}\t,\
"args":\t{{"amount":10}}\t,"result":\t"busy"\t,"at":[4,{T},"CCCCCCCC"]}}
{{"call":\t{{"call_id":"c2","tool_name":"pay","idempotency_key":"k1",\
"status":"completed","attempt":2,"issued_at":{T},"resolved_at":{T}}}\t,\
"args":\t{{"amount":10}}\t,"result":\t{{"ok":true}}\t,"at":[4,{T},"CCCCCCCC"]}}
{{"call":\t{{"call_id":"c3","tool_name":"ask","idempotency_key":"k2",\
"status":"issued","attempt":1,"issued_at":{T}}}\t,"args":\t{{}}\t,"at":[4,{T},\
"CCCCCCCC"]}}
"""
NAME = "t~e3b98a4da31a127d4bde6e43033f66ba274cab0eb7eb1c70ec41402bf6273dd8.jsonl"
REGISTERS = {
    "01.jsonl": """\
{"key":"k2","attempt":1,"thread":"t","call":"c3","at":[null,"77583d58"]}
""",
    "6a.jsonl": """\
{"key":"k1","attempt":1,"thread":"t","call":"c1","at":[null,"658b88de"]}
{"key":"k1","attempt":2,"thread":"t","call":"c2","at":[null,"0bce605a"]}
""",
}


async def fill(cp: Store) -> None:
    await cp.append("t", [{"role": "user", "content": "héllo\0"}])
    await cp.append("t", [{"n": 1.0}, {"n": 10**20}])
    await cp.save_extra("t", {"plan": None, "a b": ["x"]})
    await cp.append("t", [{}], extra={"n": 1})
    await cp.record_issued("t", ToolCall("c1", "pay", {"amount": 10}, "k1"))
    await cp.record_result("t", "c1", "busy", success=False)
    await cp.record_issued("t", ToolCall("c2", "pay", {"amount": 10}, "k1"))
    await cp.record_result("t", "c2", {"ok": True})
    await cp.record_issued("t", ToolCall("c3", "ask", {}, "k2"))


def frozen(text: str) -> str:
    """Replace times and checksums by fixed ones."""
    text = re.sub(r"\b1\d{15}\b", T, text)
    return re.sub(r'"[0-9a-f]{8}"\]\}\n', '"CCCCCCCC"]}\n', text)


def sealed(text: str) -> str:
    """Return a log with its checksums."""
    sum_, found = 0, b""

    for line in text.encode().splitlines(keepends=True):
        sum_ = crc32(line[: -lines.SEAL], sum_)
        seal = b'%08x"]}\n' % sum_
        found += line[: -lines.SEAL] + seal
        sum_ = crc32(seal, sum_)

    return found.decode()


def registers(home: Path) -> dict[str, str]:
    """Return what is in the registers."""
    files = (home / "used-keys").iterdir()
    return {path.name: text for path in files if (text := path.read_text())}


def restore(home: Path, log: str) -> None:
    """Create the folder that another version of cpkit would have left."""
    for name in ("threads", "used-keys"):
        (home / name).mkdir(parents=True, exist_ok=True)

    (home / "cpkit.json").write_bytes(MARK)
    (home / "threads" / NAME).write_text(log)

    for name, text in REGISTERS.items():
        (home / "used-keys" / name).write_text(text)


async def test_the_written_bytes_are_the_frozen_format(home: Path) -> None:
    """All bytes except times and checksums."""
    async with Store(home) as cp:
        await fill(cp)

    assert (home / "cpkit.json").read_bytes() == MARK
    assert frozen((home / "threads" / NAME).read_text()) == frozen(LOG)
    assert {n: frozen(one) for n, one in registers(home).items()} == {
        name: frozen(text) for name, text in REGISTERS.items()
    }


async def test_the_bytes_after_a_deletion_are_the_frozen_format(home: Path) -> None:
    """Ids, tools, keys and times of the calls stay; arguments and results do not."""
    async with Store(home) as cp:
        await fill(cp)
        before = registers(home)
        await cp.delete_thread("t")
        await cp.record_result("t", "c3", "dropped")
        await cp.append("t", [{}])

    assert frozen((home / "threads" / NAME).read_text()) == frozen(ERASED)
    assert registers(home) == before
    assert [path.name for path in (home / "threads").iterdir()] == [NAME]


async def test_the_bytes_after_a_trim_are_the_frozen_format(home: Path) -> None:
    """One line has one message, and a line with two was written again without one."""
    async with Store(home) as cp:
        await fill(cp)
        before = registers(home)
        assert await cp.trim("t", 2) == 2

    assert frozen((home / "threads" / NAME).read_text()) == TRIMMED
    assert registers(home) == before
    assert [path.name for path in (home / "threads").iterdir()] == [NAME]


async def test_a_frozen_trim_is_read(home: Path) -> None:
    """Positions go on at the version, also where a log of before is in its place."""
    restore(home, LOG)

    async with Store(home) as cp, Store(home) as other:
        assert await other.read("t", 1, 2) == [{"n": 1.0}]
        restore(home, sealed(TRIMMED))
        data = await other.load("t")
        assert data is not None
        assert (data.first, data.version) == (2, 4)
        assert data.messages == [{"n": 10**20}, {}]
        assert data.extra == {"plan": None, "a b": ["x"], "n": 1}
        assert [record.call.call_id for record in data.pending] == ["c3"]
        assert await cp.load("t") == data
        assert await cp.append("t", [{"n": 5}], expected_version=4) == 5
        assert await other.read("t", -2) == await other.read("t", 3) == [{}, {"n": 5}]
        (info,) = await cp.list_threads()
        assert info.created_at == (await cp.list_calls("t"))[0].issued_at


async def test_a_frozen_store_is_read(home: Path) -> None:
    """A later version reads everything that this version wrote."""
    restore(home, LOG)

    async with Store(home) as cp:
        data = await cp.load("t")
        assert data is not None
        assert data.messages == [
            {"role": "user", "content": "héllo\0"},
            {"n": 1.0},
            {"n": 10**20},
            {},
        ]
        assert data.extra == {"plan": None, "a b": ["x"], "n": 1}
        assert [record.call.call_id for record in data.pending] == ["c3"]
        calls = await cp.list_calls("t")
        assert [(c.call.call_id, c.status, c.attempt, c.result) for c in calls] == [
            ("c1", "failed", 1, "busy"),
            ("c2", "completed", 2, {"ok": True}),
            ("c3", "issued", 1, None),
        ]
        assert {str(c.issued_at) for c in calls} == {"2026-11-21 03:34:05.123456+00:00"}
        assert await cp.find_completed("k1") == calls[1]
        assert await cp.find_call("k2") == calls[2]
        (info,) = await cp.list_threads()
        assert info.version == 4
        assert info.created_at == info.updated_at == calls[0].issued_at
        assert await cp.append("t", [{}], expected_version=4) == 5


async def test_a_frozen_deletion_is_read(home: Path) -> None:
    """Erased calls keep their keys; messages written later are a new thread."""
    restore(home, ERASED)

    async with Store(home) as cp:
        data = await cp.load("t")
        assert data is not None
        assert (data.messages, data.extra, data.pending) == ([{}], {}, [])
        calls = await cp.list_calls("t")
        assert [(c.status, c.attempt, c.erased, c.result) for c in calls] == [
            ("failed", 1, True, None),
            ("completed", 2, True, None),
            ("completed", 1, True, None),
        ]
        assert await cp.find_completed("k1") == calls[1]
        assert await cp.find_completed("k2") == calls[2]


MESSAGES: dict[str, Callable[[], list[Any]]] = {
    "lookalikes": lambda: [
        {"text": '"},"at":[7,1795232045123456,"00000000"]}'},
        {"text": '\t,\t{"n":1}\t],"extra":{\t"at"\t:\t[9', "at": [5, "x"]},
        {"at": [1, T], "extra": {"a\tb": "\t}"}},
        {"add": {"n": 1}, "at": None},
        {"call": {"call_id": "c1"}, "args": {}},
    ],
    "empty": lambda: [{}, {}],
    "one": lambda: [{"extra": {"\t": "\t]"}}],
    "newlines": lambda: [{"text": "a\nb\r\n\u2028"}, {"a\nb": "\\n"}],
    "large": lambda: [{"pad": "x" * 3_000_000}, {"n": 1}, {"pad": "y" * 1_048_570}],
}


@pytest.mark.parametrize("name", MESSAGES)
async def test_messages_that_look_like_the_format_are_only_messages(
    home: Path, name: str
) -> None:
    """Alone in a line and with others, in extra, args and results."""
    messages = MESSAGES[name]()

    async with Store(home) as cp:
        for message in messages:
            await cp.append("t", [message])

        await cp.append("t", messages)
        await cp.save_extra("t", {f"k{i}": m for i, m in enumerate(messages)})

        for number, message in enumerate(messages):
            call = ToolCall(f'c"}},"args":{number}', "},", {"a": message}, f"k{number}")
            await cp.record_issued("t", call)
            await cp.record_result("t", call.call_id, message)

    async with Store(home) as cp:
        data = await cp.load("t")
        assert data is not None
        assert data.messages == messages + messages
        assert list(data.extra.values()) == messages
        calls = await cp.list_calls("t")
        assert [record.result for record in calls] == messages
        assert [record.call.args for record in calls] == [{"a": m} for m in messages]

        for start in range(-1, len(messages) + 1):
            assert (
                await cp.read("t", start, start + 2)
                == (messages * 2)[start : start + 2]
            )


async def test_messages_that_are_arrays_keep_their_brackets(home: Path) -> None:
    """A line with one message has no brackets around it."""
    lists = [[], [[]], [1], ["],[", ",\t"], [{"extra": ["\t]"]}]]

    async with Store(home, message_type=list[Any]) as cp:
        for one in lists:
            await cp.append("t", [one])

        await cp.append("t", lists)
        assert await cp.read("t") == lists + lists


async def test_every_line_is_json_for_a_program_that_follows_the_log(
    home: Path, log: Path
) -> None:
    """One line for each operation, complete as soon as it can be read."""
    async with Store(home) as cp:
        await cp.append("t", [{"step": 0}])
        seen: list[Any] = []

        with log.open() as follower:
            for step in range(1, 5):
                text = follower.read()
                assert text.endswith("\n")
                seen += map(json.loads, text.splitlines())
                await cp.append("t", [{"step": step}])

    assert [line["add"]["step"] for line in seen[1:]] == [0, 1, 2, 3]
    assert [line["at"][0] for line in seen[1:]] == [1, 2, 3, 4]


async def test_times_never_go_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the clock is behind the last time, the next microsecond is written."""
    now = time.time_ns()

    async with Store(home) as cp:
        for offset, written in ((0, 0), (-(10**12), 1000), (5000, 5000)):
            monkeypatch.setattr(time, "time_ns", lambda offset=offset: now + offset)
            await cp.append("t", [{}])
            (info,) = await cp.list_threads()
            expected = from_micros((now + written) // 1000)
            assert (info.updated_at, info.created_at) == (
                expected,
                from_micros(now // 1000),
            )
