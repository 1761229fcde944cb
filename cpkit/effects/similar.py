"""Warns of arguments that make each run of an effect another effect."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping

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
        last = self._last.pop(place, None)
        self._last[place] = plan

        if len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)

        if last is None or last.effect.key == plan.effect.key:
            return

        names = _passing(last.effect.args, plan.effect.args)

        if names:
            log.warning(
                "%s ran twice in thread %r with arguments that differ only in %s: a "
                "time or a random value makes each run another effect; name the effect "
                "with key_fields=",
                plan.effect.tool,
                plan.effect.thread_id,
                ", ".join(names),
            )


def _passing(one: Mapping[str, JsonValue], other: Mapping[str, JsonValue]) -> list[str]:
    """Return the differing arguments, if all of them look like times or random."""
    if one.keys() != other.keys():
        return []

    names = [name for name in one if one[name] != other[name]]
    found = all(_is_passing(one[name]) and _is_passing(other[name]) for name in names)
    return names if found else []


def _is_passing(value: JsonValue) -> bool:
    if isinstance(value, str):
        return _PASSING.fullmatch(value) is not None

    # Seconds, or milliseconds, since 1970: from 2001 to 2286.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (1e9 < value < 1e10 or 1e12 < value < 1e13)  # type: ignore[operator]
