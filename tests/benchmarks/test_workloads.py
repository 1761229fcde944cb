"""The workloads run on every store, and detect a store that loses writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.once import Ours, once_trials
from benchmarks.roster import ROSTER, entry
from cpkit import JsonValue, open_checkpointer
from cpkit.tools.benchmark import (
    ABILITIES,
    FAMILIES,
    Contender,
    Scale,
    Stored,
    interleaved,
    trials,
)
from cpkit.tools.benchmark.messages import SIZE, message, messages
from cpkit.tools.benchmark.workloads import Append, Trial

Pair = tuple[Contender, Contender]

LITTLE = Scale(operations=4, seconds=0.5, appends=16, sizes=(0, 100), tasks=(1, 4))
STORES = ["sqlite", "postgres", "redis", "file"]
FAMILY_NAMES = list(FAMILIES)


def test_messages_are_the_same_every_time_and_about_a_kilobyte() -> None:
    """Assistant and tool messages alternate."""
    for number in range(1000):
        made = message(number)
        assert made == message(number)
        assert 0.9 * SIZE <= len(json.dumps(made, ensure_ascii=False)) <= 1.1 * SIZE
        assert made["role"] == ("tool" if number % 2 else "assistant")

    assert len({json.dumps(made) for made in messages(0, 1000)}) == 1000


@pytest.mark.long
@pytest.mark.parametrize("driver", STORES)
async def test_every_workload_runs_on_floor_and_store(pair: Pair) -> None:
    """Each round has a figure, and the check of the stored data passes."""
    for family in FAMILY_NAMES:
        found = await interleaved(trials(family, pair, LITTLE), rounds=2)

        assert {result.name for result in found} == {"floor", "cpkit"}
        assert [result.error for result in found] == [None] * len(found)
        assert all(len(result.rounds) == 2 for result in found)
        assert all(result.median > 0 for result in found)


async def test_a_contender_runs_only_the_workloads_that_it_supports() -> None:
    """Its abilities select the families."""
    contender = Contender("none", "none")
    contender.abilities = frozenset({"calls"})
    asked = [family for family in FAMILY_NAMES if trials(family, [contender])]
    assert asked == ["calls"]
    assert set(ABILITIES) == set(FAMILY_NAMES)


class Forgetful(Stored):
    """A store that acknowledges every append and drops each third one."""

    appended = 0

    async def append(self, thread: str, message: Any) -> None:
        self.appended += 1

        if self.appended % 3:
            await super().append(thread, message)


async def test_a_lost_append_is_an_error() -> None:
    """The contender has an error in place of a figure; the others go on."""
    async with (
        Stored("memory", "memory://") as sound,
        Forgetful("memory", "memory://", name="forgetful") as forgetful,
    ):
        found = await interleaved(
            trials("append", [sound, forgetful], LITTLE), rounds=1
        )

    for result in found:
        assert (result.error is None) == (result.name == "cpkit"), result


async def test_trials_take_turns_in_another_order_each_round() -> None:
    """A contender is not always first, nor always after the same other one."""
    order: list[tuple[str, str]] = []

    def record(trial: Trial, step: str) -> None:
        order.append((step, trial.contender.name))

    stores = [Stored("memory", "memory://", name=name) for name in "abc"]

    for store in stores:
        await store.open()

    await interleaved([Append(store, 0, LITTLE) for store in stores], 3, record)

    for store in stores:
        await store.close()

    rounds = [
        "".join(name for step, name in order if step == f"round {number} of 3")
        for number in (1, 2, 3)
    ]
    assert rounds == ["abc", "bca", "cab"]


@pytest.mark.long
@pytest.mark.parametrize("driver", ["sqlite"])
async def test_the_threads_of_the_measurement_are_erased(pair: Pair) -> None:
    """A user's store has the same threads and calls afterwards as before."""
    _, ours = pair
    assert isinstance(ours, Stored)

    for family in FAMILY_NAMES:
        await interleaved(trials(family, [ours], LITTLE), rounds=1)

    async with open_checkpointer(ours.url) as cp:
        store: Any = cp
        before = await store.list_threads(limit=10_000)
        assert before
        assert await ours.erase() == 0
        assert await store.list_threads() == []
        assert await cp.find_completed(f"{before[0].thread_id}:finished") is None


async def test_a_function_that_runs_once_is_measured() -> None:
    """Fresh and replayed; a contender without a decorator takes no part."""
    async with Ours("memory", "memory://") as ours:
        found = await interleaved(
            once_trials([ours, Contender("none", "none")], LITTLE), rounds=2
        )

    assert [(one.name, one.workload) for one in found] == [
        ("cpkit", "once-fresh"),
        ("cpkit", "once-replayed"),
    ]
    assert all(one.error is None and one.median > 0 for one in found)


async def test_a_function_that_returns_something_else_is_an_error() -> None:
    """A decorator that answers a replay without its result is not measured."""

    class Forgets(Ours):
        async def once(self, name: str) -> JsonValue:
            await super().once(name)
            return None

    async with Forgets("memory", "memory://") as ours:
        found = await interleaved(once_trials([ours], LITTLE), rounds=1)

    assert all("the function returned None" in str(one.error) for one in found)


def test_every_contender_has_one_entry() -> None:
    """A child process finds a contender by its driver and its name."""
    names = [(one.driver, one.name) for one in ROSTER]
    assert len(set(names)) == len(names)
    assert all(entry(*name) is one for name, one in zip(names, ROSTER, strict=True))
