"""``cpkit heal``."""

from __future__ import annotations

import pytest

from cpkit.cli.stores import Store
from tests.cli.command import in_store, invoke
from tests.stores import quick_on

CALLS = [
    {"id": one, "type": "function", "function": {"name": "pay"}} for one in ("a", "b")
]


async def asked(cp: Store) -> None:
    await cp.append("t", [{"role": "assistant", "content": None, "tool_calls": CALLS}])
    await cp.append("late", [{"role": "assistant", "tool_calls": CALLS}, {"role": "x"}])


@pytest.mark.parametrize("url", quick_on("sqlite"), indirect=True)
def test_open_calls_get_results(url: str) -> None:
    """It exits with 0, and with 1 if a call is left or the thread is missing."""
    in_store(url, asked)
    first = invoke("heal", url, "t", "--json").json
    assert [one["call_id"] for one in first["closed"]] == ["a", "b"]
    assert invoke("heal", url, "t").out == "thread 't': every call has a result\n"
    late = invoke("heal", url, "late")
    assert late.code == 1
    assert "other messages follow it" in late.out
    assert invoke("heal", url, "missing").code == 1
