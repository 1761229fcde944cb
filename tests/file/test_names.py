"""File names: readable, portable, and never the same for two ids."""

from __future__ import annotations

import itertools
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from cpkit import CorruptThread, ToolCall
from cpkit_file import FileCheckpointer
from cpkit_file.schema import LOG_NAME, log_name

Store = FileCheckpointer[Any]

CALL = ToolCall("c", "pay", {}, "key")

# What Windows does not allow as the name of a file, up to the first dot.
RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$)")

HOSTILE = [
    ".",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "C:\\x",
    "C:",
    "~",
    "~root",
    "-rf",
    "--",
    " ",
    "  ",
    "a ",
    "a.",
    "a..",
    " a",
    ".a",
    "*",
    "?",
    '"',
    "<>|",
    "%2e%2e",
    "%00",
    "a%",
    "a%41",
    "con",
    "CON",
    "con.txt",
    "nul",
    "NUL.jsonl",
    "aux",
    "com1",
    "COM9.x",
    "lpt1",
    "a.jsonl",
    "a.jsonl.tmp",
    "a.jsonl.torn",
    "cpkit.json",
    "thread",
    log_name("a"),
    "a:b",
    "a:b:$DATA",
    "straße",
    "STRASSE",
    "ﬁ",
    "fi",
    "İ",
    "i̇",
    "\u202egnp.exe",
    "\ud7ff\ue000\U0010ffff",
    "\x01\x02\x1f\x7f",
    "\n",
    "\r\n",
    "a\nb",
    "\N{ZERO WIDTH SPACE}",
    unicodedata.normalize("NFC", "é"),
    unicodedata.normalize("NFD", "é"),
    "x" * 512,
    "x" * 511 + "y",
    "X" * 512,
    "\U0001f600" * 128,
    "\x01" * 512,
]
CASES = ["".join(c) for c in itertools.product("aA", "bB", "cC")]


def ids() -> list[str]:
    chance = random.Random(3)
    words = [
        "".join(chr(chance.randrange(1, 0xD800)) for _ in range(chance.randrange(1, 9)))
        for _ in range(2000)
    ]
    return list(dict.fromkeys(HOSTILE + CASES + words))


def test_no_two_ids_have_one_name_on_any_file_system() -> None:
    """Also where letter case is ignored, and where Unicode is normalised."""
    names = [log_name(thread_id) for thread_id in ids()]
    folded = {unicodedata.normalize("NFKC", name).casefold() for name in names}
    assert len(folded) == len(names)


@pytest.mark.parametrize("name", [log_name(word) for word in HOSTILE + CASES])
def test_a_name_is_valid_on_every_file_system(name: str) -> None:
    """It is ASCII, of moderate length, not reserved, and without shell characters."""
    assert LOG_NAME.fullmatch(name)
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]*~[0-9a-f]{64}\.jsonl", name)
    assert not RESERVED.fullmatch(name.partition(".")[0])
    assert len(f"{name}.torn") <= 143


def test_a_name_shows_the_id() -> None:
    """The characters of an id that a name may have are in it."""
    assert log_name("User 42/chat").startswith("user-42-chat~")
    assert log_name("日本").startswith("thread~")


async def test_hostile_ids_stay_in_the_folder(tmp_path: Path) -> None:
    """Every id works as thread, call, tool and key, and nothing appears elsewhere."""
    home = tmp_path / "a" / "b" / "store"

    async with Store(home) as cp:
        for number, word in enumerate(HOSTILE):
            await cp.append(word, [{"n": number}])
            call = ToolCall(word, word, {word: word}, word)
            assert await cp.record_issued(word, call) is None
            await cp.record_result(word, word, word)

        for number, word in enumerate(HOSTILE):
            assert await cp.read(word) == [{"n": number}]
            record = await cp.find_completed(word)
            assert record is not None
            assert (record.thread_id, record.call.call_id) == (word, word)
            assert (record.result, record.call.args) == (word, {word: word})

        listed = await cp.list_threads(limit=1000)
        assert [info.thread_id for info in listed] == sorted(HOSTILE)

        for word in HOSTILE:
            await cp.delete_thread(word, forget_keys=True)

        assert await cp.list_threads() == []

    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["store"]
    found = sorted(path.name for path in home.iterdir())
    assert found == ["README", "cpkit.json", "threads", "used-keys"]
    assert not list((home / "threads").iterdir())
    assert len(list((home / "used-keys").iterdir())) == 256


async def test_a_log_under_the_name_of_another_thread_is_corrupt(
    home: Path, log: Path
) -> None:
    """The id in the first line is compared with the id that was asked for."""
    async with Store(home) as cp:
        await cp.append("other", [{}])
        other = log.with_name(log_name("other"))
        log.write_bytes(other.read_bytes())
        before = log.read_bytes()

        for use in (cp.load("t"), cp.record_issued("t", CALL), cp.list_calls("t")):
            with pytest.raises(CorruptThread, match="log of thread 'other'") as raised:
                await use

            assert raised.value.thread_id == "t"
            assert raised.value.where == f"{log}, line 1"

        assert log.read_bytes() == before
