"""Extra: a shallow merge that is atomic for all of its keys."""

from __future__ import annotations

from collections import ChainMap
from types import MappingProxyType
from typing import Any

from conformance.case import Case, raises
from conformance.clause import clause
from conformance.sample_dumps import made_dump
from cpkit import JsonValue, MovesThreads, SerializationError


async def _extra(case: Case, thread: str) -> dict[str, Any]:
    loaded = await case.cp.load(thread)
    assert loaded is not None
    return loaded.extra


@clause("extra.merges")
async def merges(case: Case) -> None:
    """A merge sets the given keys and keeps all other keys."""
    thread = case.id()
    await case.cp.save_extra(thread, {"a": 1, "b": 2})
    await case.cp.save_extra(thread, {"b": 3, "c": 4})
    await case.cp.save_extra(thread, {"d": 5})
    extra = await _extra(case, thread)
    assert extra == {"a": 1, "b": 3, "c": 4, "d": 5}


@clause("extra.is-shallow")
async def is_shallow(case: Case) -> None:
    """A merge replaces a whole value; it does not merge nested objects."""
    thread = case.id()
    await case.cp.save_extra(thread, {"plan": {"a": 1, "b": [1, 2]}, "list": [1, 2]})
    await case.cp.save_extra(thread, {"plan": {"c": 3}, "list": [3]})
    extra = await _extra(case, thread)
    assert extra == {"plan": {"c": 3}, "list": [3]}


@clause("extra.stores-none")
async def stores_none(case: Case) -> None:
    """None is stored as a value; it does not delete the key."""
    thread = case.id()
    await case.cp.save_extra(thread, {"a": 1, "b": None})
    await case.cp.save_extra(thread, {"a": None})
    extra = await _extra(case, thread)
    assert extra == {"a": None, "b": None}


@clause("extra.nothing-changes-nothing")
async def nothing_changes_nothing(case: Case) -> None:
    """An empty mapping changes nothing and creates no thread."""
    thread = case.id()
    await case.cp.save_extra(thread, {})
    assert await case.cp.load(thread) is None
    await case.cp.save_extra(thread, {"a": 1})
    before = await case.cp.load(thread)
    await case.cp.save_extra(thread, {})
    after = await case.cp.load(thread)
    assert after == before


@clause("extra.all-or-none")
async def all_or_none(case: Case) -> None:
    """A merge with one value that cannot be stored writes no key."""
    thread = case.id()
    await case.cp.save_extra(thread, {"a": 1})
    wrong: Any = {"a": 2, "b": object(), "c": 3}

    with raises(SerializationError) as caught:
        await case.cp.save_extra(thread, wrong)

    extra = await _extra(case, thread)
    assert extra == {"a": 1}
    assert caught.error.path[0] == "b"


@clause("extra.any-key")
async def any_key(case: Case) -> None:
    """Any text of up to 512 bytes of JSON is a key: empty, with NUL, in any case."""
    thread = case.id()
    keys = [
        "",
        "a",
        "A",
        "a.b",
        "$set",
        "a\0b",
        "a\0",
        "é",
        "e\u0301",
        " ",
        "__proto__",
    ]
    keys += [
        "'; --",
        "%",
        "*",
        "x" * 512,
        "x" * 511 + "y",
        "é" * 256,
        "é" * 255 + "è",
        "\n" * 256,
        "😀",
        "\n",
        "constructor",
        "0",
        "00",
    ]
    expected: dict[str, JsonValue] = {key: n for n, key in enumerate(keys)}

    for key, n in expected.items():
        await case.cp.save_extra(thread, {key: n})

    extra = await _extra(case, thread)
    assert extra == expected


@clause("extra.long-key-is-refused")
async def long_key_is_refused(case: Case) -> None:
    """A key of more than 512 bytes of JSON is refused, and nothing is written."""
    thread = case.id()

    for key in ("x" * 513, "é" * 256 + "x", "\n" * 257, "\x01" * 86, "x" * 100_000):
        with raises(SerializationError, f"a merge of {len(key)} characters") as caught:
            await case.cp.save_extra(thread, {"a": 1, key: 2})

        (start,) = caught.error.path
        assert start
        assert key.startswith(start), "the path is the key, which may be cut"

        with raises(SerializationError, f"an append of {len(key)} characters"):
            await case.cp.append(thread, [{"n": 1}], extra={"a": 1, key: 2})

        if isinstance(case.cp, MovesThreads):
            with raises(SerializationError, f"a dump of {len(key)} characters"):
                await case.cp.restore_thread(made_dump(thread, extra={key: 2}))

    assert await case.cp.load(thread) is None


@clause("extra.copies-its-input")
async def copies_its_input(case: Case) -> None:
    """Changing a mapping after it was saved does not change the stored values."""
    thread = case.id()
    given: dict[str, Any] = {"plan": {"steps": ["a"]}}
    await case.cp.save_extra(thread, given)
    given["plan"]["steps"].append("b")
    given["new"] = 1
    extra = await _extra(case, thread)
    assert extra == {"plan": {"steps": ["a"]}}


@clause("extra.leaves-the-rest")
async def leaves_the_rest(case: Case) -> None:
    """A merge does not change messages, calls or the version."""
    thread = case.id()
    await case.cp.append(thread, [{"n": 1}])
    await case.cp.record_issued(thread, case.call())
    before = await case.cp.load(thread)
    await case.cp.save_extra(thread, {"a": 1})
    after = await case.cp.load(thread)
    assert before is not None
    assert after is not None
    assert after.messages == before.messages
    assert after.pending == before.pending


@clause("extra.takes-a-mapping-only")
async def takes_a_mapping_only(case: Case) -> None:
    """Extra is any mapping; anything else is a TypeError, and writes nothing."""
    thread = case.id()
    wrong: list[Any] = [None, [("a", 1)], "a", 1]

    for value in wrong:
        with raises(TypeError, repr(value)):
            await case.cp.save_extra(thread, value)

    assert await case.cp.load(thread) is None
    await case.cp.save_extra(thread, MappingProxyType({"a": 1}))
    await case.cp.append(thread, [], extra=ChainMap({"b": 2}, {"b": 3, "c": 3}))
    assert await _extra(case, thread) == {"a": 1, "b": 2, "c": 3}
