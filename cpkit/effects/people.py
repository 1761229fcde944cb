"""What people say about effects: decisions, withdrawals, landed or not, reopened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypedDict, Unpack

from cpkit.driver.ids import check_id
from cpkit.effects.attempts import Attempts
from cpkit.effects.effect import Verdict, reopen_key, reopened_key
from cpkit.effects.records import REOPEN, Outcome, effect_of, failure_of, fresh_call_id
from cpkit.effects.requests import ApprovalRequest, Requests
from cpkit.lease import this_process
from cpkit.protocol import Checkpointer
from cpkit.records import CallRecord, JsonValue, ToolCall
from cpkit.runs.threads import RunList, read_all

__all__ = ["DecisionOptions", "ForPeople", "Signature"]


class Signature(TypedDict, total=False):
    """Who decides, why, and from where: by default this host and process."""

    by: str | None
    reason: str | None
    origin: str | None


class DecisionOptions(Signature, total=False):
    """The keywords of `EffectLedger.approve`, ``deny`` and ``withdraw``.

    ``args`` selects the newest request with these arguments. Leaving it out is a
    ``ValueError`` if requests with different arguments are open.
    """

    args: Mapping[str, JsonValue] | None


class ForPeople:
    """The methods of `EffectLedger` with which people decide. The first word counts."""

    def __init__(self, cp: Checkpointer[Any]) -> None:
        self.cp = cp
        self._attempts = Attempts(cp)
        self._requests = Requests(cp)
        self._runs: RunList | None = None

    # Approvals

    async def requests(self) -> list[ApprovalRequest]:
        """Return the undecided requests that runs of the store wait for, oldest first.

        A damaged request is logged and left out. A store that cannot list its threads
        is a ``TypeError``.
        """
        self._runs = self._runs or RunList(self.cp)
        await self._runs.refresh()
        states = self._runs.states.values()
        asks = {name: ask for state in states for name, ask in state.asks.items()}
        found = await read_all(self._requests.of_ask, list(asks.values()))
        requests = [one for one in found if isinstance(one, ApprovalRequest)]
        is_open = [one for one in requests if one.decision is None]
        return sorted(
            is_open, key=lambda one: (one.requested_at, one.record.call.call_id)
        )

    async def pending(self, thread_id: str) -> list[ApprovalRequest]:
        """Return the thread's undecided approval requests, oldest first."""
        return await self._requests.of_thread(thread_id)

    async def request(
        self, key: str, *, args: Mapping[str, JsonValue] | None = None
    ) -> ApprovalRequest | None:
        """Return an effect's newest request with these arguments, decided or not.

        Without ``args`` they are those of the effect's first request; then another
        undecided request raises ``ValueError``.
        """
        return _selected(key, await self._requests.all_of(check_id("key", key)), args)

    async def approve(
        self, key: str, *, value: JsonValue = None, **options: Unpack[DecisionOptions]
    ) -> bool:
        """Approve the request of the effect with this key.

        Returns whether an approval that counts is on record: ``False`` if the request
        was denied, expired or erased before, or does not exist. ``value`` reaches the
        handler as ``effect.decision.value``, and changes the arguments that it names;
        a ``ValueError`` if the policy does not let people change one of them.
        """
        given = {} if value is None else {"value": value}
        said: dict[str, JsonValue] = {"approved": True, **given}
        return await self._decide(key, "approved", said, options)

    async def deny(self, key: str, **options: Unpack[DecisionOptions]) -> bool:
        """Deny a request, as `approve`; return whether a denial is on record.

        Then every run of the effect raises ``EffectDenied``, until `ask_again`.
        """
        return await self._decide(key, "denied", {"approved": False}, options)

    async def withdraw(self, key: str, **options: Unpack[DecisionOptions]) -> bool:
        """End a request without a decision; return whether it is gone, undecided.

        The run that waits raises ``ApprovalWithdrawn``, and no worker runs the thread.
        A new run of the effect makes a new request.
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
        request = await self.request(key, args=options.get("args"))

        if request is None or request.record.erased:
            return False

        value = said.get("value")
        fixed = request.args.keys() - {*request.editable}

        if isinstance(value, dict) and (changed := sorted(fixed & value.keys())):
            raise ValueError(
                f"the policy does not let people change "
                f"{', '.join(map(repr, changed))} of {request.tool!r}; it can answer "
                "Approval(editable=[…])"
            )

        if request.decision is None:
            request = await self._requests.resolve(
                request, {**said, **_signed(options)}
            )

        if request is not None and request.verdict == verdict == "withdrawn":
            await self._requests.settle(request.run_thread, request)

        return request is not None and request.verdict == verdict

    async def ask_again(
        self, key: str, *, args: Mapping[str, JsonValue] | None = None
    ) -> ApprovalRequest:
        """Record a new request, with the next number, for one denied or expired.

        An undecided request is returned as it is. Raises ``ValueError`` if there is no
        request, if it is approved, or if the effect has run.
        """
        while True:
            found = await self._requests.all_of(key)
            request = _selected(key, found, args)

            if request is None or request.record.erased:
                raise ValueError(f"there is no approval request for {key!r}")

            if await self._attempts.find(key) is not None:
                raise ValueError(f"{key!r} runs or has run, so there is nothing to ask")

            # Whether an approval was not used in time, only the store's clock knows. If
            # this process's clock is ahead of it, a person is asked twice.
            if request.verdict == "approved" and not request.is_late(datetime.now(UTC)):
                raise ValueError(f"{key!r} is approved already")

            place, asked = (request.thread_id, key), request.record.call.args

            if request.decision is not None:
                request = await self._requests.create(*place, len(found) + 1, asked)

            if request is not None:
                return request

    # Doubt and failure

    async def landed(
        self, key: str, result: JsonValue = None, **signature: Unpack[Signature]
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
            raise ValueError(f"{key!r} has no final failure to reopen")

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


def _selected(
    key: str, requests: list[ApprovalRequest], args: Mapping[str, JsonValue] | None
) -> ApprovalRequest | None:
    """Return the newest of an effect's requests with these arguments, or ``None``."""
    requests = [one for one in requests if not one.record.erased] or requests
    wanted = requests[0].args if args is None and requests else args or {}
    others = [one for one in requests if not one.same_args(wanted)]

    # This is an error even if one later request alone is undecided: the person may mean
    # the first request, and another person just decided that one.
    if args is None and any(one.decision is None for one in others):
        raise ValueError(
            f"{key!r} was requested with several sets of arguments; say with args= "
            "which request is meant"
        )

    return next((one for one in reversed(requests) if one not in others), None)
