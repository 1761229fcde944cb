"""Values: JSON values come back unchanged, and any other value is refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from conformance.case import Case, raises
from conformance.clause import clause
from conformance.difference import check_equal, shown
from conformance.failure import Failure
from conformance.sample_values import JSON_VALUES, NOT_JSON, SUBCLASSES, exactly, nested
from cpkit import SerializationError


async def _round_trip(case: Case, place: str, value: Any) -> Any:
    """Store a value in a place, and return the loaded value."""
    thread = case.id()

    if place == "message":
        await case.cp.append(thread, [{"v": value}])
    elif place == "extra":
        await case.cp.save_extra(thread, {"v": value})
    elif place == "args":
        await case.cp.record_issued(thread, case.call(args={"v": value}))
    else:
        call = case.call()
        await case.cp.record_issued(thread, call)
        await case.cp.record_result(thread, call.call_id, value)
        found = await case.cp.find_completed(call.idempotency_key)
        assert found is not None
        return found.result

    loaded = await case.cp.load(thread)
    assert loaded is not None

    if place == "message":
        return loaded.messages[0]["v"]

    if place == "extra":
        return loaded.extra["v"]

    return loaded.pending[0].call.args["v"]


def _check_same(seen: object, expected: object, where: str) -> None:
    check_equal(seen, expected, where)

    if not exactly(seen, expected):
        raise Failure("the keys in their order", shown(seen), where)


async def _all_come_back(case: Case, place: str) -> None:
    for name, value in JSON_VALUES.items():
        seen = await _round_trip(case, place, value)
        _check_same(seen, value, f"{name} in {place}")


@clause("values.messages-come-back")
async def messages_come_back(case: Case) -> None:
    """A message comes back unchanged: Unicode, integers, float bits, key order."""
    thread = case.id()
    sent = [{"name": name, "v": value} for name, value in JSON_VALUES.items()]
    await case.cp.append(thread, sent)
    loaded = await case.cp.load(thread)
    assert loaded is not None

    for seen, expected in zip(loaded.messages, sent, strict=True):
        _check_same(seen, expected, f"{expected['name']} in message")


@clause("values.extra-comes-back")
async def extra_comes_back(case: Case) -> None:
    """A value in extra comes back unchanged."""
    await _all_come_back(case, "extra")


@clause("values.args-come-back")
async def args_come_back(case: Case) -> None:
    """A call's args come back unchanged."""
    await _all_come_back(case, "args")


@clause("values.results-come-back")
async def results_come_back(case: Case) -> None:
    """A result comes back unchanged."""
    await _all_come_back(case, "result")


@clause("values.any-object-is-a-message")
async def any_object_is_a_message(case: Case) -> None:
    """Any JSON object can be a message: an empty one, or one with unusual keys."""
    thread = case.id()
    sent: list[dict[str, Any]] = [
        {},
        {"": ""},
        {"id": 1, "thread_id": "x", "version": 9, "role": None},
        {"__class__": "os.system", "py/object": "x", "$ref": "#", "a\0": 1},
    ]
    await case.cp.append(thread, sent)
    loaded = await case.cp.load(thread)
    assert loaded is not None
    assert exactly(loaded.messages, sent)


@clause("values.message-is-an-object")
async def message_is_an_object(case: Case) -> None:
    """A message that is not a JSON object is refused, with its index as the path."""
    thread = case.id()
    wrong: list[Any] = [None, 1, "x", ["a"], (1,), b"x"]

    for value in wrong:
        with raises(SerializationError, repr(value)) as caught:
            await case.cp.append(thread, [{"n": 0}, value])

        assert caught.error.path == (1,)

    assert await case.cp.load(thread) is None


@clause("values.deep-nesting")
async def deep_nesting(case: Case) -> None:
    """200 nested arrays come back unchanged, in every place."""
    for place in ("message", "extra", "args", "result"):
        value = nested(200 if place in ("extra", "result") else 199)
        seen = await _round_trip(case, place, value)
        assert exactly(seen, value), f"nesting of 200 levels in {place}"


@clause("values.beyond-all-limits")
async def beyond_all_limits(case: Case) -> None:
    """Deeper nesting and longer integers come back unchanged or are refused."""
    beyond: dict[str, Any] = {
        "201 levels": nested(201),
        "100,000 levels": nested(100_000),
        "4,301 digits": 10**4300,
        "20,000 digits": 10**20_000,
    }

    for name, value in beyond.items():
        for place in ("message", "extra", "args", "result"):
            try:
                seen = await _round_trip(case, place, value)
            except SerializationError:
                continue

            assert _same_depth(seen, value), f"{name} in {place}"


def _same_depth(seen: Any, value: Any) -> bool:
    """Compare nested lists without recursion, and other values with ``==``."""
    while isinstance(value, list) and value:
        if not isinstance(seen, list) or len(seen) != 1:
            return False

        seen, value = seen[0], value[0]

    return bool(seen == value)


async def _refused(
    case: Case,
    store: Callable[[Any], Awaitable[object]],
    place: tuple[str | int, ...],
) -> None:
    for name, (value, inner) in NOT_JSON.items():
        with raises(SerializationError, f"{name} at {place}") as caught:
            await store(value)

        path = caught.error.path
        assert path[: len(place)] == place, f"the path to {name}"

        if name != "a cycle":
            assert path == (*place, *inner), f"the path to {name}"


@clause("values.refused-in-messages")
async def refused_in_messages(case: Case) -> None:
    """A non-JSON value in a message is refused with its path; nothing is written."""
    thread = case.id()
    await _refused(
        case,
        lambda value: case.cp.append(thread, [{"n": 0}, {"v": value}]),
        (1, "v"),
    )
    assert await case.cp.load(thread) is None


@clause("values.refused-in-extra")
async def refused_in_extra(case: Case) -> None:
    """A non-JSON value in extra is refused with its path; nothing is written."""
    thread = case.id()
    await _refused(
        case, lambda value: case.cp.save_extra(thread, {"a": 1, "v": value}), ("v",)
    )
    keys: list[Any] = [1, None, True, b"k", ("a",)]

    for key in keys:
        with raises(SerializationError, f"the key {key!r}"):
            await case.cp.save_extra(thread, {"a": 1, key: 2})

    assert await case.cp.load(thread) is None


@clause("values.refused-in-args")
async def refused_in_args(case: Case) -> None:
    """A non-JSON value in args is refused with its path; nothing is claimed."""
    thread, key = case.id(), case.id("key")
    await _refused(
        case,
        lambda value: case.cp.record_issued(thread, case.call(key, args={"v": value})),
        ("args", "v"),
    )
    assert await case.cp.load(thread) is None
    assert await case.cp.record_issued(thread, case.call(key)) is None


@clause("values.refused-in-results")
async def refused_in_results(case: Case) -> None:
    """A non-JSON value in a result is refused with its path; nothing is written."""
    thread, call = case.id(), case.call()
    await case.cp.record_issued(thread, call)
    before = await case.cp.load(thread)
    await _refused(
        case,
        lambda value: case.cp.record_result(thread, call.call_id, {"v": value}),
        ("result", "v"),
    )
    assert await case.cp.load(thread) == before


@clause("values.survive-opening", "handles")
async def survive_opening(case: Case) -> None:
    """Opening the store again changes no value, in any place."""
    thread = case.id()
    everything: dict[str, Any] = {"all": JSON_VALUES}
    done, issued = case.call(args=everything), case.call(args=everything)
    await case.cp.append(thread, [everything], extra=JSON_VALUES)
    await case.cp.record_issued(thread, done)
    await case.cp.record_result(thread, done.call_id, everything)
    await case.cp.record_issued(thread, issued)

    async with case.open() as opened:
        for cp in (case.cp, opened):
            loaded = await cp.load(thread)
            found = await cp.find_completed(done.idempotency_key)
            assert loaded is not None
            assert found is not None
            _check_same(loaded.messages, [everything], "a message")
            _check_same(found.result, everything, "a result")
            _check_same(found.call.args, everything, "args of a completed call")
            _check_same(loaded.pending[0].call.args, everything, "args")

            for name, value in JSON_VALUES.items():
                _check_same(loaded.extra[name], value, f"{name} in extra")


@clause("values.tuples-are-arrays")
async def tuples_are_arrays(case: Case) -> None:
    """A tuple is stored as an array and comes back as a list."""
    for place in ("message", "extra", "args", "result"):
        seen = await _round_trip(case, place, (1, ("a", ()), {"b": (2,)}))
        assert exactly(seen, [1, ["a", []], {"b": [2]}]), f"a tuple in {place}"
        others: tuple[Any, ...] = ("é\0", 0.1, -1.5e300, 2**70, True, None, [], {})
        seen = await _round_trip(case, place, others)
        assert exactly(seen, [*others]), f"a tuple of every type in {place}"


@clause("values.subclasses-are-their-base")
async def subclasses_are_their_base(case: Case) -> None:
    """Subclasses of JSON types are stored as their base value."""
    for place in ("message", "extra", "args", "result"):
        for name, (value, expected) in SUBCLASSES.items():
            seen = await _round_trip(case, place, value)
            assert exactly(seen, expected), f"a subclass of {name} in {place}"

    for name, (value, expected) in SUBCLASSES.items():
        if isinstance(value, dict):
            thread = case.id()
            await case.cp.append(thread, [value])
            loaded = await case.cp.load(thread)
            assert loaded is not None
            assert exactly(loaded.messages, [expected]), f"a {name} as a message"
