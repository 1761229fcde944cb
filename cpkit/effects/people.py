"""What people say about effects: decisions, withdrawals, landed or not, reopened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypedDict, Unpack

from cpkit.driver.ids import check_id
from cpkit.effects.attempts import Attempts
from cpkit.effects.effect import (
    Effect,
    Verdict,
    copy_json,
    reopen_key,
    reopened_key,
)
from cpkit.effects.records import (
    REOPEN,
    Outcome,
    effect_of,
    failure_of,
    fresh_call_id,
)
from cpkit.effects.requests import ApprovalRequest, Requests
from cpkit.lease import this_process
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, JsonValue, ToolCall

__all__ = ["DecisionOptions", "ForPeople", "Signature"]


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


class ForPeople:
    """The methods of `EffectLedger` with which people decide. The first word counts."""

    def __init__(self, cp: Checkpointer[Any], ui: str | None = None) -> None:
        self.cp = cp
        self._attempts = Attempts(cp)
        self._requests = Requests(cp, ui)

    # Approvals

    async def requests(
        self, *, after: str = "", limit: int = 100
    ) -> list[ApprovalRequest]:
        """Return a page of all undecided requests that runs wait for, oldest first.

        The next page comes ``after`` the last request's ``cursor``; the last one is
        empty. A store that cannot list its threads is a ``TypeError``.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit!r}")

        found = await self._requests.undecided()
        return [one for one in found if one.cursor > after][:limit]

    async def pending(self, thread_id: str) -> list[ApprovalRequest]:
        """Return the thread's undecided approval requests, oldest first."""
        return await self._requests.of_thread(thread_id)

    async def request(
        self,
        key: str,
        *,
        args: Mapping[str, JsonValue] | None = None,
        number: int | None = None,
    ) -> ApprovalRequest | None:
        """Return an effect's request, decided or not; selected as in `approve`."""
        return await self._requests.find(check_id("key", key), args, number)

    async def approve(
        self,
        key: str,
        *,
        value: JsonValue = None,
        **options: Unpack[DecisionOptions],
    ) -> bool:
        """Approve the request of the effect with this key.

        Returns whether the decision on record is an approval that counts: ``False`` if
        the request was denied or has expired before, or does not exist. ``value`` is
        recorded, and reaches the handler as ``effect.decision.value``; it changes the
        arguments that it names, if the policy lets people change them, and else is a
        ``ValueError``. `DecisionOptions` has the other keywords.
        """
        said: dict[str, JsonValue] = {"approved": True}

        if value is not None:
            said["value"] = copy_json(value, "value")

        return await self._decide(key, "approved", said, options)

    async def deny(self, key: str, **options: Unpack[DecisionOptions]) -> bool:
        """Deny a request, as `approve`; return whether a denial is on record.

        Then every run of the effect raises ``EffectDenied``, until `ask_again`.
        """
        return await self._decide(key, "denied", {"approved": False}, options)

    async def withdraw(self, key: str, **options: Unpack[DecisionOptions]) -> bool:
        """End a request without a decision; return whether it is gone now.

        The run that waits raises ``ApprovalWithdrawn``, and no worker runs the thread.
        A new run of the effect makes a new request. ``False`` if it was decided before,
        or does not exist.
        """
        return await self._decide(key, "withdrawn", {"withdrawn": True}, options)

    async def _decide(
        self,
        key: str,
        verdict: Verdict,
        said: dict[str, JsonValue],
        options: DecisionOptions,
    ) -> bool:
        """Record how a request ends; return whether it has ended so."""
        args, number = options.get("args"), options.get("number")
        request = await self.request(key, args=args, number=number)

        if request is None or request.record.erased:
            return False

        _check_value(request, said.get("value"))

        if request.decision is None:
            request = await self._requests.resolve(
                request, {**said, **_signed(options)}
            )

        if request is None or request.verdict != verdict:
            return False

        if verdict == "withdrawn":
            run_thread = request.run_thread or request.thread_id
            await self._requests.settle(run_thread, request)

        return True

    async def ask_again(
        self, key: str, *, args: Mapping[str, JsonValue] | None = None
    ) -> ApprovalRequest:
        """Record a new request, with the next number, for one denied or expired.

        An undecided request is returned as it is. Raises ``ValueError`` if there is no
        request, if it is approved, or if the effect has run.
        """
        request = await self._requests.find(key, args)

        if request is None or request.record.erased:
            raise ValueError(f"there is no approval request for {key!r} to ask again")

        if await self._attempts.find(key) is not None:
            raise ValueError(f"{key!r} runs or has run, so there is nothing to ask")

        # Whether an approval was not used in time, only the store's clock knows. If
        # this process's clock is ahead of it, a person is asked twice.
        if request.verdict == "approved" and not request.is_late(datetime.now(UTC)):
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

    # Doubt and failure

    async def landed(
        self,
        key: str,
        result: JsonValue = None,
        **signature: Unpack[Signature],
    ) -> CallRecord:
        """Record a person's word that an effect in doubt happened, with its result.

        First this watches the attempt, as `resume` does. Raises ``ValueError`` if a run
        is executing it, or if the key has no attempt without an outcome.
        """
        return await self._say(key, Outcome.result(result), signature)

    async def not_landed(self, key: str, **signature: Unpack[Signature]) -> CallRecord:
        """Record a person's word that an effect in doubt did not and will not happen.

        Its key is free: the next run runs the effect. Otherwise as `landed`.
        """
        said = Outcome.release("a person says that it did not land")
        return await self._say(key, said, signature)

    async def _say(
        self, key: str, outcome: Outcome, signature: Signature
    ) -> CallRecord:
        key, record = await self._attempts.newest(key)
        is_open = record is not None and record.status == "issued"

        if record is None or not is_open or effect_of(record) is None:
            raise ValueError(f"no attempt of an effect {key!r} is without an outcome")

        if await self._attempts.watch(record) is None:
            raise ValueError(
                f"attempt {record.attempt} of {record.call.tool_name!r} is not in "
                "doubt: a run is executing it, or has ended it"
            )

        said = {**outcome.stored, "said": _signed(signature)}
        return await self._attempts.close_orphan(record, replace(outcome, stored=said))

    async def reopen(self, key: str, **signature: Unpack[Signature]) -> str:
        """Let an effect run again whose final failure is known to be without effect.

        Returns the key under which it runs then: a service that remembers the failed
        request by key takes it for a new one. Raises ``ValueError`` without a failure.
        """
        key, record = await self._attempts.newest(check_id("key", key))

        if record is None or failure_of(record) is None:
            raise ValueError(
                f"{key!r} has no final failure, so there is nothing to reopen"
            )

        call = ToolCall(fresh_call_id("reopen"), REOPEN, {"key": key}, reopen_key(key))
        # Another person's record may hold the key: then it is completed here.
        held = await self._attempts.claim(record.thread_id, call)
        call = call if held is None else held.call
        said = Outcome(_signed(signature))
        await self._attempts.resolve(record.thread_id, call, said)
        return reopened_key(key)


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
