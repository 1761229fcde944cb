"""Texts with lone surrogates, which transcripts have where a text was cut in an emoji.

A high surrogate before a low one is two code points, and not the emoji that the two
stand for in UTF-16.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel
from typing_extensions import TypedDict

from conformance.answers import answers
from conformance.case import Case, raises
from conformance.clause import clause
from conformance.difference import check_equal, shown
from conformance.failure import Failure
from conformance.sample_dumps import made_call, made_dump
from conformance.sample_values import SURROGATES, exactly
from cpkit import (
    KeepsReceipts,
    MovesThreads,
    ReadsRanges,
    SerializationError,
    ToolCall,
)

EXTRA: dict[str, Any] = {
    **{text: name for name, text in SURROGATES.items() if len(text) < 80},
    "\U0001f600": "an emoji",
    "\\ud83d": "an escape",
    "": "nothing",
}
"""Keys of extra, each of which is another one."""


def _object(text: str) -> dict[str, Any]:
    """Return an object with a text in its keys and values, at several depths."""
    return {
        "text": text,
        text: {"in": [text, {text: [[text]], "\U0001f600": "an emoji"}]},
    }


OBJECTS: Any = [_object(text) for text in SURROGATES.values()]


def _check(seen: object, expected: object, where: str) -> None:
    check_equal(seen, expected, where)

    if not exactly(seen, expected):
        raise Failure("the keys in their order", shown(seen), where)


async def _filled(case: Case, thread: str) -> list[ToolCall]:
    """Write texts to all places of a thread; return a completed and an issued call."""
    cp = case.cp
    whole = {"all": OBJECTS}
    done, issued = case.call(args=whole), case.call(args=whole)
    await cp.append(thread, OBJECTS, extra={**EXTRA, "objects": OBJECTS})
    await cp.record_issued(thread, done)
    await cp.record_result(thread, done.call_id, OBJECTS)
    await cp.record_issued(thread, issued)
    return [done, issued]


@clause("text.comes-back")
async def comes_back(case: Case) -> None:
    """Lone surrogates come back in messages, extra, args and results at any depth."""
    for name, text in SURROGATES.items():
        thread, given = case.id(), _object(text)
        done, issued = case.call(args=given), case.call(args={**given, "n": 1})
        await case.cp.append(thread, [{"n": 0}, given], extra={"one": given})
        await case.cp.save_extra(thread, {"other": given, "text": text})
        await case.cp.record_issued(thread, done)
        await case.cp.record_issued(thread, issued)
        answer = await case.cp.record_result(thread, done.call_id, [given, text])
        found = await case.cp.find_completed(done.idempotency_key)
        again = await case.cp.record_issued(thread, issued)
        loaded = await case.cp.load(thread)
        assert loaded is not None
        assert found is not None
        assert again is not None
        extra = {"one": given, "other": given, "text": text}
        _check(loaded.messages, [{"n": 0}, given], f"{name} in messages")

        for key, value in extra.items():
            _check(loaded.extra[key], value, f"{name} in extra")

        for one, where in ((loaded.pending[0], "pending"), (again, "a second claim")):
            _check(one.call.args, issued.args, f"{name} in args of {where}")

        for one, where in ((answer, "record_result"), (found, "find_completed")):
            _check(one.result, [given, text], f"{name} in the result of {where}")
            _check(one.call.args, given, f"{name} in args of {where}")


@clause("text.keys-of-extra")
async def keys_of_extra(case: Case) -> None:
    """Keys of extra with lone surrogates are compared exactly, by code points."""
    merged, appended = case.id(), case.id()

    for n in range(2):
        for key in EXTRA:
            await case.cp.save_extra(merged, {key: [n, EXTRA[key]]})

    await case.cp.append(appended, [], extra=EXTRA)

    for thread, expected in (
        (merged, {key: [1, value] for key, value in EXTRA.items()}),
        (appended, EXTRA),
    ):
        loaded = await case.cp.load(thread)
        assert loaded is not None
        _check(sorted(loaded.extra), sorted(expected), "the keys of extra")
        assert loaded.extra == expected


@clause("text.in-ranges", ReadsRanges)
async def in_ranges(case: Case) -> None:
    """read and load_range return lone surrogates as load does."""
    thread = case.id()
    await _filled(case, thread)
    loaded = await case.cp.load(thread)
    part = await case.cp.load_range(thread, -3)
    assert loaded is not None
    assert part is not None
    _check(await case.cp.read(thread, 1, 5), OBJECTS[1:5], "read")
    _check(part.messages, OBJECTS[-3:], "load_range")
    assert part.extra == loaded.extra == {**EXTRA, "objects": OBJECTS}
    assert part.pending == loaded.pending


@clause("text.in-receipts", KeepsReceipts)
async def in_receipts(case: Case) -> None:
    """list_calls and find_call return lone surrogates in args and results."""
    thread = case.id()
    done, issued = await _filled(case, thread)
    first, second = await case.cp.list_calls(thread)
    held = await case.cp.find_call(done.idempotency_key)
    assert held == first
    _check(first.result, OBJECTS, "the result in list_calls")
    _check(first.call.args, {"all": OBJECTS}, "args in list_calls")
    assert second.call == issued


@clause("text.is-moved", MovesThreads)
async def is_moved(case: Case) -> None:
    """A dump has lone surrogates, and a restore brings them back in every place."""
    thread = case.id()
    given = made_dump(
        thread,
        made_call(thread, "completed", args={"all": OBJECTS}, result=OBJECTS),
        made_call(thread, "issued", args={"all": OBJECTS}),
        messages=OBJECTS,
        extra={**EXTRA, "objects": OBJECTS},
    )
    await case.cp.restore_thread(given)
    seen = await case.cp.dump_thread(thread)
    assert seen is not None
    _check(list(seen.messages), OBJECTS, "messages of a dump")
    assert seen.extra == given.extra
    assert list(seen.calls) == list(given.calls)

    written = case.id()
    done, _ = await _filled(case, written)
    dump = await case.cp.dump_thread(written)
    assert dump is not None
    _check(list(dump.messages), OBJECTS, "messages of a dump of a written thread")
    assert dump.extra == {**EXTRA, "objects": OBJECTS}
    _check(dump.calls[0].result, OBJECTS, "a result of a dump of a written thread")


@clause("text.for-other-handles", "handles")
async def for_other_handles(case: Case) -> None:
    """Another handle sees lone surrogates in every answer as the writer does."""
    thread = case.id()
    keys = [call.idempotency_key for call in await _filled(case, thread)]
    mine = await answers(case.cp, thread, keys)

    async with case.open() as other:
        assert await answers(other, thread, keys) == mine
        loaded = await other.load(thread)

    assert loaded is not None
    _check(loaded.messages, OBJECTS, "messages that another handle loads")


class _Line(TypedDict):
    text: str
    more: dict[str, list[str]]


def _storable(text: str) -> str:
    text.encode()
    return text


class _Utf8(BaseModel):
    """Takes texts that UTF-8 can hold only."""

    text: Annotated[str, AfterValidator(_storable)]


@clause("text.in-typed-messages", "message_type")
async def in_typed_messages(case: Case) -> None:
    """A typed message keeps lone surrogates, or its type refuses them with the path."""
    async with case.open(message_type=_Line) as cp:
        for text in SURROGATES.values():
            thread, refused = case.id(), None
            messages = [_Line(text="a", more={}), _Line(text=text, more={"b": [text]})]

            try:
                await cp.append(thread, messages)
            except SerializationError as exc:
                refused = exc.path

            loaded = await cp.load(thread)
            stored = None if loaded is None else loaded.messages
            assert stored == (None if refused else messages)
            assert refused is None or refused[0] == 1, "the path to what is refused"

    async with case.open(message_type=_Utf8) as cp:
        thread = case.id()
        wrong = _Utf8.model_construct(text="a\ud83d")

        with raises(SerializationError, "a text that the type refuses") as caught:
            await cp.append(thread, [_Utf8(text="a"), wrong])

        assert caught.error.path[:2] == (1, "text")
        assert await cp.load(thread) is None
