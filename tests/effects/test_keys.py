"""The keys of effects: stable, and different for different effects."""

from __future__ import annotations

import itertools
import json
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import strategies as st

from cpkit import InvalidId, JsonValue, MemoryCheckpointer
from cpkit.effects import EffectLedger

LEDGER = EffectLedger(MemoryCheckpointer())
ARGS: dict[str, JsonValue] = {"a": "x|y", "b": [1, 2], "c": None}


def key(thread: str, tool: str, args: Any, **options: Any) -> str:
    return LEDGER.key(thread, tool, args, **options)


def test_the_key_is_the_digest_of_a_canonical_array() -> None:
    """This is a stored format: a later version must find these records."""
    text = '[["thread","t"],"charge","arguments",{"a":1,"b":"é"}]'
    assert key("t", "charge", {"b": "é", "a": 1.0}) == sha256(text.encode()).hexdigest()
    text = '[["thread","t"],"charge","fields",{"a":1}]'
    made = key("t", "charge", {"a": 1, "b": 2}, key_fields=["a"])
    assert made == sha256(text.encode()).hexdigest()


def test_no_two_effects_share_a_key() -> None:
    """Thread, tool, kind and chosen values matter, whatever these contain."""
    effects: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("t", "charge", ARGS, {}),
        ("t|charge", "", ARGS, {}),
        ("t", "charge", ARGS, {"key_fields": ["a"]}),
        ("t", "charge", ARGS, {"key_fields": ["a", "c"]}),
        ("t", "charge", {"a": "x|y"}, {}),
        ("t", "charge", {"a": "x", "y": ""}, {}),
        ("t", "charge", ARGS, {"key": "call", "tool_call_id": "x|y"}),
        ("t", "charge", ARGS, {"key": "call", "tool_call_id": "x"}),
        ("t", "charge", ARGS, {"idempotency_key": "x|y"}),
        ("t", "charge", ARGS, {"idempotency_key": json.dumps(ARGS)}),
        ("t", "charge", {"a": True}, {}),
        ("t", "charge", {"a": 1}, {}),
        ("t", "charge", {"a": "1"}, {}),
        ("t", "Charge", {"a": "1"}, {}),
        ("t", "charge", {"a": "e\u0301"}, {}),
        ("t", "charge", {"a": "\u00e9"}, {}),
    ]
    named = [e for e in effects if e[1]]
    keys = [key(t, tool, args, **options) for t, tool, args, options in named]

    for one, two in itertools.combinations(range(len(keys)), 2):
        assert keys[one] != keys[two], (named[one], named[two])


def test_equal_json_gives_the_same_key() -> None:
    """The order of names and the spelling of numbers do not matter."""
    assert key("t", "x", {"a": 1, "b": 2}) == key("t", "x", {"b": 2.0, "a": 1})
    fields = [["a", "b"], ["b", "a"], ["a", "b", "a"]]
    made = {key("t", "x", {"a": 1, "b": 2, "c": 3}, key_fields=f) for f in fields}
    assert len(made) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"key_fields": ["unknown"]}, ValueError),
        ({"key_fields": []}, ValueError),
        ({"key_fields": "a"}, TypeError),
        ({"key_fields": ["a"], "idempotency_key": "k"}, ValueError),
        ({"idempotency_key": "k", "key": "call"}, ValueError),
        ({"key": "call"}, ValueError),
        ({"key": "argument"}, ValueError),
        ({"scope": "global"}, TypeError),
        ({"resource": "r"}, TypeError),
    ],
)
def test_options_that_name_no_effect_are_refused(
    options: dict[str, Any], error: type[Exception]
) -> None:
    """A mistake raises before the handler runs under an unintended key."""
    with pytest.raises(error):
        key("t", "charge", ARGS, **options)


@pytest.mark.parametrize("tool", ["", "cpkit:approval", "a\0b"])
def test_tool_names_follow_the_rules_of_ids(tool: str) -> None:
    """Names that start with ``cpkit:`` are reserved."""
    with pytest.raises(InvalidId):
        key("t", tool, ARGS)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4
        )
    ),
    max_leaves=12,
)


def test_a_name_of_any_text_has_a_key() -> None:
    """JSON holds half of a surrogate pair, and UTF-8 does not."""
    halves = [key("t", "x", {"a": text}) for text in ("\ud800", "\udc00", "?")]
    assert len({*halves}) == 3
