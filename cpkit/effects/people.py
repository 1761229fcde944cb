"""What people say about effects: decisions, withdrawals, landed or not, reopened."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TypedDict

from cpkit.effects.attempts import Attempts, find_silent
from cpkit.effects.effect import Effect, copy_json, reopen_key, reopened_key
from cpkit.effects.records import (
    REOPEN,
    effect_of,
    error_type_of,
    fresh_call_id,
)
from cpkit.effects.requests import ApprovalRequest, Requests
from cpkit.lease import WaitHook, this_process
from cpkit.records import CallRecord, JsonValue, ToolCall

__all__ = ["DecisionOptions", "People", "Signature"]


class Signature(TypedDict, total=False):
    """Who decides, why, and from where; all three are recorded.

    The origin is by default this host and process.
    """

    by: str | None
    reason: str | None
    origin: str | None


class DecisionOptions(Signature, total=False):
    """The keywords of `EffectLedger.approve`, ``deny`` and ``withdraw``.

    ``number`` selects one request of the effect, and ``args`` the newest request with
    these arguments. Leaving both out is a ``ValueError`` if requests with different
    arguments are open.
    """

    args: Mapping[str, JsonValue] | None
    number: int | None


class People:
    """Records what people decide. What is on record first, counts."""

    def __init__(self, attempts: Attempts, requests: Requests) -> None:
        self._attempts = attempts
        self._requests = requests

    async def decide(
        self,
        key: str,
        thread_id: str | None,
        approved: bool,
        value: JsonValue,
        options: DecisionOptions,
    ) -> bool:
        """Record a decision; return whether the request is decided so now."""
        request = await self._find(key, thread_id, options)

        if request is None:
            return False

        if value is not None:
            _check_value(request, value)

        if request.decision is None:
            result = {"approved": approved, **_signed(options)}

            if value is not None:
                result["value"] = copy_json(value, "value")

            request = await self._requests.resolve(request, result)

        made = None if request is None else request.decision
        wanted = "approved" if approved else "denied"
        return made is not None and made.verdict == wanted

    async def withdraw(
        self, key: str, thread_id: str | None, options: DecisionOptions
    ) -> bool:
        """End a request without a decision; return whether that is on record."""
        request = await self._find(key, thread_id, options)

        if request is None:
            return False

        result = {"withdrawn": True, **_signed(options)}
        ended = await self._requests.resolve(request, result, success=False)
        made = None if ended is None else ended.decision

        if made is not None and made.verdict != "withdrawn":
            return False

        await self._requests.settle(request.run_thread or request.thread_id, request)
        return True

    async def ask_again(
        self, key: str, args: Mapping[str, JsonValue] | None
    ) -> ApprovalRequest:
        """Record a new request in place of one that was closed without an approval."""
        request = await self._requests.find(key, None, args)

        if request is None or request.record.erased:
            raise ValueError(f"there is no approval request for {key!r} to ask again")

        if await self._attempts.find(key) is not None:
            raise ValueError(f"{key!r} runs or has run, so there is nothing to ask")

        # Whether an approval was not used in time, only the store's clock knows. If
        # this process's clock is ahead of it, a person is asked twice.
        if request.is_approved and not request.is_late(datetime.now(UTC)):
            raise ValueError(f"{key!r} is approved already, so there is nothing to ask")

        effect = Effect(key, request.thread_id, request.tool, request.args)

        while True:
            found = await self._requests.all_of(key)

            # Another process may have asked again, or for other arguments, meanwhile.
            for one in found:
                if one.decision is None and one.same_args(request.args):
                    return one

            await self._requests.create(
                effect,
                found[-1].number + 1,
                request.run_thread or request.thread_id,
                request.expires_after,
                request.editable,
            )

    async def say(
        self,
        key: str,
        result: dict[str, JsonValue],
        success: bool,
        stale_after: float | None,
        on_wait: WaitHook | None,
        options: Signature,
    ) -> CallRecord:
        """Record how an attempt in doubt ended, and return the record that stands.

        Raises ``ValueError`` if no attempt of the key is in doubt.
        """
        key, record = await self._attempts.newest(key)

        is_open = record is not None and record.status == "issued"

        if record is None or not is_open or effect_of(record) is None:
            raise ValueError(f"no attempt of an effect {key!r} is without an outcome")

        silent = await find_silent(
            self._attempts, record.thread_id, [record], stale_after, on_wait
        )

        if record.call.call_id not in silent:
            raise ValueError(
                f"attempt {record.attempt} of {record.call.tool_name!r} is not in "
                "doubt: a run is executing it, or has ended it"
            )

        said = {**result, "said": _signed(options)}
        stored, _ = await self._attempts.close_orphan(record, said, success)
        return stored

    async def reopen(self, key: str, options: Signature) -> str:
        """Allow a new attempt after a final failure; return the key that it gets."""
        key, record = await self._attempts.newest(key)

        if record is None or error_type_of(record) is None:
            raise ValueError(
                f"{key!r} has no final failure, so there is nothing to reopen"
            )

        call = ToolCall(fresh_call_id("reopen"), REOPEN, {"key": key}, reopen_key(key))
        # Another person's record holds the key: then it is completed here.
        held = await self._attempts.claim(record.thread_id, call)
        call_id = call.call_id if held is None else held.call.call_id
        await self._attempts.resolve(
            record.thread_id, call_id, _signed(options), success=True
        )
        return reopened_key(key)

    async def _find(
        self, key: str, thread_id: str | None, options: DecisionOptions
    ) -> ApprovalRequest | None:
        request = await self._requests.find(
            key, thread_id, options.get("args"), options.get("number")
        )
        return None if request is None or request.record.erased else request


def _signed(options: Signature) -> dict[str, JsonValue]:
    origin = options.get("origin")
    return {
        "by": options.get("by"),
        "reason": options.get("reason"),
        "origin": this_process() if origin is None else origin,
    }


def _check_value(request: ApprovalRequest, value: JsonValue) -> None:
    """Raise if a value names an argument that the policy does not let people change."""
    if not isinstance(value, dict):
        return

    fixed = [n for n in value if n in request.args and n not in request.editable]

    if fixed:
        raise ValueError(
            f"the policy does not let people change {', '.join(map(repr, fixed))} of "
            f"{request.tool!r}; it can answer Approval(editable=[…])"
        )
