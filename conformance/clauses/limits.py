"""Limits in bytes of JSON: ``max_payload`` of a value, ``max_append`` of an append."""

from __future__ import annotations

from typing import Any

from conformance.case import Case, Store, raises
from conformance.clause import clause
from conformance.sample_dumps import made_call, made_dump
from cpkit import MovesThreads, PayloadTooLarge

LIMIT = 1000


def _of_size(size: int, letter: str = "x") -> dict[str, str]:
    """Return an object whose compact JSON has ``size`` bytes of UTF-8."""
    room = size - len('{"t":""}')
    wide = len(letter.encode())
    return {"t": letter * (room // wide) + "x" * (room % wide)}


async def _issued(case: Case, cp: Store) -> tuple[str, str]:
    thread, call = case.id(), case.call()
    await cp.record_issued(thread, call)
    return thread, call.call_id


@clause("limits.payload-is-inclusive", "max_payload")
async def payload_is_inclusive(case: Case) -> None:
    """A message, extra value, args or result of exactly max_payload bytes is stored."""
    value: Any

    async with case.open(max_payload=LIMIT) as cp:
        for letter in "xé€😀":
            value = _of_size(LIMIT, letter)
            thread, call_id = await _issued(case, cp)
            await cp.append(thread, [value])
            await cp.save_extra(thread, {"k": value})
            await cp.record_issued(thread, case.call(args=value))
            done = await cp.record_result(thread, call_id, value)
            loaded = await cp.load(thread)
            assert loaded is not None
            assert loaded.messages == [value]
            assert loaded.extra == {"k": value}
            assert loaded.pending[0].call.args == value
            assert done.result == value


@clause("limits.too-large-is-refused", "max_payload")
async def too_large_is_refused(case: Case) -> None:
    """One byte more than max_payload raises PayloadTooLarge, and nothing is written."""
    async with case.open(max_payload=LIMIT) as cp:
        thread, call_id = await _issued(case, cp)
        before = await cp.load(thread)

        for letter in "xé€😀":
            value: Any = _of_size(LIMIT + 1, letter)

            with raises(PayloadTooLarge, "a message"):
                await cp.append(thread, [{"n": 0}, value])

            with raises(PayloadTooLarge, "an extra value"):
                await cp.save_extra(thread, {"a": 1, "k": value})

            with raises(PayloadTooLarge, "an extra value beside a message"):
                await cp.append(thread, [{"n": 0}], extra={"a": 1, "k": value})

            with raises(PayloadTooLarge, "args"):
                await cp.record_issued(thread, case.call(args=value))

            with raises(PayloadTooLarge, "a result"):
                await cp.record_result(thread, call_id, value)

        after = await cp.load(thread)
        assert after == before

        if isinstance(cp, MovesThreads):
            moved = case.id()
            value = _of_size(LIMIT + 1)
            done = made_call(moved, "completed", result=value)

            for dump in (
                made_dump(moved, messages=[value]),
                made_dump(moved, extra={"k": value}),
                made_dump(moved, made_call(moved, args=value)),
                made_dump(moved, done),
            ):
                with raises(PayloadTooLarge, "a dump"):
                    await cp.restore_thread(dump)

            assert await cp.load(moved) is None


@clause("limits.too-large-tells-the-facts", "max_payload")
async def too_large_has_the_facts(case: Case) -> None:
    """PayloadTooLarge has the path, the size and the limit as fields."""
    async with case.open(max_payload=LIMIT) as cp:
        with raises(PayloadTooLarge) as caught:
            await cp.append(case.id(), [{"n": 0}, _of_size(LIMIT + 7)])

        error = caught.error
        assert (error.path, error.size, error.limit) == ((1,), LIMIT + 7, LIMIT)


@clause("limits.payload-is-of-one", "max_payload")
async def payload_is_of_one(case: Case) -> None:
    """max_payload limits each message and each extra value, not their sum."""
    thread = case.id()

    async with case.open(max_payload=LIMIT) as cp:
        version = await cp.append(thread, [_of_size(LIMIT)] * 20)
        await cp.save_extra(thread, {f"k{n}": "x" * (LIMIT - 2) for n in range(20)})
        loaded = await cp.load(thread)
        assert version == 20
        assert loaded is not None
        assert len(loaded.extra) == 20


@clause("limits.append-is-inclusive", "max_append")
async def append_is_inclusive(case: Case) -> None:
    """An append, or a merge, of exactly max_append bytes is stored."""
    thread, other = case.id(), case.id()
    value: Any = "x" * (LIMIT // 4 - len('"k"') - len('""'))

    async with case.open(max_append=LIMIT) as cp:
        version = await cp.append(thread, [_of_size(LIMIT // 4)] * 4)
        assert version == 4
        version = await cp.append(
            thread, [_of_size(LIMIT // 4, "é")] * 3, extra={"k": value}
        )
        await cp.save_extra(other, dict.fromkeys("abcd", value))
        loaded = await cp.load(thread)
        merged = await cp.load(other)
        assert version == 7
        assert loaded is not None
        assert loaded.version == 7
        assert loaded.extra == {"k": value}
        assert merged is not None
        assert merged.extra == dict.fromkeys("abcd", value)


@clause("limits.append-too-large", "max_append")
async def append_too_large(case: Case) -> None:
    """More than max_append bytes raise PayloadTooLarge, and nothing is written."""
    thread = case.id()
    quarter: Any = _of_size(LIMIT // 4, "€")
    long_keys = {letter * (LIMIT // 4): 1 for letter in "abcd"}

    async with case.open(max_append=LIMIT) as cp:
        with raises(PayloadTooLarge, "messages"):
            await cp.append(thread, [*[quarter] * 4, {}])

        with raises(PayloadTooLarge, "one message"):
            await cp.append(thread, [_of_size(LIMIT + 1)])

        with raises(PayloadTooLarge, "messages with extra") as caught:
            await cp.append(thread, [quarter] * 4, extra={"k": 1})

        with raises(PayloadTooLarge, "extra without messages"):
            await cp.append(thread, [], extra=dict.fromkeys("abcde", quarter))

        with raises(PayloadTooLarge, "a merge"):
            await cp.save_extra(thread, dict.fromkeys("abcde", quarter))

        with raises(PayloadTooLarge, "long keys"):
            await cp.save_extra(thread, long_keys)

        with raises(PayloadTooLarge, "long keys beside a message"):
            await cp.append(thread, [{"n": 0}], extra=long_keys)

        assert caught.error.limit == LIMIT
        assert caught.error.size > LIMIT
        assert await cp.load(thread) is None
