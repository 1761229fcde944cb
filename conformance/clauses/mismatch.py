"""Claims of a stored call id: the same call is accepted, another one is refused."""

from __future__ import annotations

from typing import Any

from conformance.case import Case, raises
from conformance.clause import clause
from cpkit import CallMismatch, JsonValue, ToolCall


async def _check_mismatch(
    case: Case, call: ToolCall, other: ToolCall, field: str
) -> None:
    """Claim a call, and check that the other call with its id is refused."""
    thread = case.id()
    await case.cp.record_issued(thread, call)

    for status in ("issued", "failed"):
        before = await case.cp.load(thread)

        with raises(CallMismatch, f"another {field} for a call that is {status}"):
            await case.cp.record_issued(thread, other)

        after = await case.cp.load(thread)
        assert after == before
        await case.cp.record_result(thread, call.call_id, 0, success=False)


@clause("claim.mismatch-of-key")
async def mismatch_of_key(case: Case) -> None:
    """A claim of a stored call id with another key raises CallMismatch."""
    call = case.call()
    other = case.call(call_id=call.call_id)
    await _check_mismatch(case, call, other, "key")
    seen = await case.cp.record_issued(case.id(), case.call(other.idempotency_key))
    assert seen is None, "the key of the refused call is free"


@clause("claim.mismatch-of-tool")
async def mismatch_of_tool(case: Case) -> None:
    """A claim of a stored call id with another tool raises CallMismatch."""
    call = case.call(tool="pay")
    other = case.call(call.idempotency_key, call_id=call.call_id, tool="Pay")
    await _check_mismatch(case, call, other, "tool")


@clause("claim.mismatch-of-args")
async def mismatch_of_args(case: Case) -> None:
    """A claim of a stored call id with other args raises CallMismatch."""
    pairs: list[tuple[dict[str, JsonValue], dict[str, JsonValue]]] = [
        ({"n": 1}, {"n": 2}),
        ({"n": 1}, {"n": True}),
        ({"n": 0}, {"n": False}),
        ({"n": 1}, {"n": "1"}),
        ({"n": None}, {}),
        ({"n": [1, 2]}, {"n": [2, 1]}),
        ({"n": []}, {"n": {}}),
        ({"n": 2**53}, {"n": 2**53 + 1}),
        ({"n": "é"}, {"n": "e\u0301"}),
        ({"n": {"a": {"b": 1}}}, {"n": {"a": {"b": 2}}}),
        ({"n": 0.3}, {"n": 0.1 + 0.2}),
        ({"n": 1e300}, {"n": 10**300}),
        ({"n": "a"}, {"n": "A"}),
        ({"n": "a"}, {"n": "a "}),
        ({"n": "a\0b"}, {"n": "a\0c"}),
        ({"n": "\ud83d"}, {"n": "\ude00"}),
        ({"n": "\ud83d\ude00"}, {"n": "\U0001f600"}),
        ({"n": 1}, {"N": 1}),
        ({"n": "x" * 100_000 + "a"}, {"n": "x" * 100_000 + "b"}),
    ]

    for args, others in pairs:
        call = case.call(args=args)
        other = ToolCall(call.call_id, call.tool_name, others, call.idempotency_key)
        await _check_mismatch(
            case, call, other, f"args ({others!s:.200} for {args!s:.200})"
        )


@clause("claim.mismatch-tells-the-facts")
async def mismatch_has_the_facts(case: Case) -> None:
    """A mismatch has the thread id and the call id as fields."""
    thread, call = case.id(), case.call()
    await case.cp.record_issued(thread, call)

    with raises(CallMismatch) as caught:
        await case.cp.record_issued(thread, case.call(call_id=call.call_id))

    assert (caught.error.thread_id, caught.error.call_id) == (thread, call.call_id)


@clause("claim.same-args-by-canonical-json")
async def same_args_by_canonical_json(case: Case) -> None:
    """Args are equal if their canonical JSON is: 1 and 1.0, keys in any order."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"n": 1}, {"n": 1.0}),
        ({"n": 0}, {"n": -0.0}),
        ({"n": 10**20}, {"n": 1e20}),
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3.0, "c": 2}, "a": 1}),
        ({"n": [1, 2]}, {"n": (1, 2)}),
        ({"\ud83d": "\ude00"}, {"\ud83d": "\ude00"}),
    ]

    for args, same in pairs:
        thread, call = case.id(), case.call(args=args)
        await case.cp.record_issued(thread, call)
        again = ToolCall(call.call_id, call.tool_name, same, call.idempotency_key)
        seen = await case.cp.record_issued(thread, again)
        assert seen is not None, f"{same} is the same as {args}"
