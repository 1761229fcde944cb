"""Tool calls of every form are shown as calls, with their results beside them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cpkit.cli.show import in_short
from cpkit.ui.blocks import rows_of
from tests.core.tool_forms import FORMS, UNKNOWN


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_shown_with_its_result(form: str) -> None:
    """On the page, and in one line by ``cpkit show``."""
    history, answer = FORMS[form]
    rows = rows_of([*history, *answer], 0)
    calls = [one for row in rows for one in row.blocks if one.kind == "call"]
    assert [one.name for one in calls] == ["pay"]
    assert json.loads(calls[0].text) == {"amount": 7}
    assert calls[0].result is not None
    assert "paid" in calls[0].result.text
    (row,) = [row for row in rows if calls[0] in row.blocks]
    assert "json" not in [one.kind for one in row.blocks]

    said = [in_short(one)[1] for one in history]
    assert sum('→ pay {"amount": 7}' in one for one in said) == 1
    (told,) = map(in_short, answer)
    assert "paid" in told[1]
    assert "tool_call_id" not in told[1]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_form_is_named(name: str) -> None:
    """What cpkit does not know is not dropped."""
    (row,) = rows_of([UNKNOWN[name]], 0)
    notes = [one.text for one in row.blocks if one.kind == "note"]
    assert f"a tool call or result in an unknown form: {name}" in notes
    assert name in in_short(UNKNOWN[name])[1]


@pytest.mark.parametrize("content", ["", None, []])
def test_an_assistant_without_text_is_not_raw_json(content: Any) -> None:
    """It says so, or shows its calls alone."""
    message = {"role": "assistant", "content": content}
    (row,) = rows_of([message], 0)
    assert [(one.kind, one.text) for one in row.blocks] == [("note", "no text")]
    (row,) = rows_of([{**message, "tool_calls": [{"id": "a", "name": "pay"}]}], 0)
    assert [(one.kind, one.text) for one in row.blocks] == [("call", "{}")]
