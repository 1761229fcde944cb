"""Warns of arguments that make each run of an effect another effect."""

from __future__ import annotations

import re
from collections import OrderedDict

from cpkit.effects.effect import EffectPlan
from cpkit.effects.tracing import log
from cpkit.records import JsonValue

__all__ = ["Similar"]

_REMEMBERED = 1_000

_PASSING = re.compile(
    r"[0-9a-fA-F]{8}-?([0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}"  # a UUID
    r"|[0-9a-fA-F]{16,}"  # a random number in hex
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d.*"  # a time
)


class Similar:
    """Remembers the last effect of each tool in each thread.

    An effect is named by its arguments. If one of them is the current time or a random
    value, a repetition is not recognized: the next run does it again.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], EffectPlan] = OrderedDict()

    def note(self, plan: EffectPlan) -> None:
        """Warn if only times and random values tell an effect from the one before."""
        if plan.kind != "arguments":
            return

        place = plan.effect.thread_id, plan.effect.tool
        last = self._last.pop(place, plan)
        self._last[place] = plan

        if len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)

        args = last.effect.args, plan.effect.args
        names = [n for n in {**args[0], **args[1]} if args[0].get(n) != args[1].get(n)]

        if names and all(_is_passing(one.get(n)) for n in names for one in args):
            log.warning(
                "%s ran twice in thread %r with arguments that differ only in %s: a "
                "time or a random value makes each run another effect; name the effect "
                "with key_fields=",
                plan.effect.tool,
                plan.effect.thread_id,
                ", ".join(names),
            )


def _is_passing(value: JsonValue) -> bool:
    if isinstance(value, str):
        return _PASSING.fullmatch(value) is not None

    # Seconds, or milliseconds, since 1970: from 2001 to 2286.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (1e9 < value < 1e10 or 1e12 < value < 1e13)  # type: ignore[operator]
