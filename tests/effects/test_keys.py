"""What names an effect: nothing forged, nothing confused."""

from __future__ import annotations

import itertools
import json
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkit import InvalidId, JsonValue, MemoryCheckpointer
from cpkit.canonical import canonical_json
from cpkit.effects import EffectLedger, records

LEDGER = EffectLedger(MemoryCheckpointer())
ARGS: dict[str, JsonValue] = {"a": "x|y", "b": [1, 2], "c": None}


def key(thread: str, tool: str, args: Any, **options: Any) -> str:
    return LEDGER.key(thread, tool, args, **options)


def test_the_key_is_the_digest_of_a_canonical_array() -> None:
    """A stored format: another version of this code must find what this one paid."""
    text = '[["thread","t"],"charge","arguments",{"a":1,"b":"é"}]'
    assert key("t", "charge", {"b": "é", "a": 1.0}) == sha256(text.encode()).hexdigest()
    text = '[["global"],"charge","fields",{"a":1}]'
    made = key("t", "charge", {"a": 1, "b": 2}, key_fields=["a"], scope="global")
    assert made == sha256(text.encode()).hexdigest()


def test_no_two_effects_share_a_key() -> None:
    """Thread, tool, kind and chosen values are told apart, whatever is in them."""
    effects: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("t", "charge", ARGS, {}),
        ("t|charge", "", ARGS, {}),
        ("t", "charge", ARGS, {"scope": "global"}),
        ("global", "charge", ARGS, {}),
        ("t", "charge", ARGS, {"key_fields": ["a"]}),
        ("t", "charge", ARGS, {"key_fields": ["a", "c"]}),
        ("t", "charge", {"a": "x|y"}, {}),
        ("t", "charge", {"a": "x", "y": ""}, {}),
        ("t", "charge", ARGS, {"resource": "x|y"}),
        ("t", "charge", ARGS, {"idempotency_key": "x|y"}),
        ("t", "charge", ARGS, {"resource": {"a": "x|y"}}),
        ("t", "charge", ARGS, {"resource": json.dumps(ARGS)}),
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


def test_order_of_names_and_form_of_numbers_do_not_count() -> None:
    """What is the same JSON is the same effect."""
    assert key("t", "x", {"a": 1, "b": 2}) == key("t", "x", {"b": 2.0, "a": 1})
    fields = [["a", "b"], ["b", "a"], ["a", "b", "a"]]
    made = {key("t", "x", {"a": 1, "b": 2, "c": 3}, key_fields=f) for f in fields}
    assert len(made) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"key_fields": ["nowhere"]}, ValueError),
        ({"key_fields": []}, ValueError),
        ({"key_fields": "a"}, TypeError),
        ({"key_fields": ["a"], "resource": "r"}, ValueError),
        ({"idempotency_key": "k", "resource": "r"}, ValueError),
        ({"scope": "world"}, ValueError),
    ],
)
def test_what_names_no_effect_is_refused(
    options: dict[str, Any], error: type[Exception]
) -> None:
    """A slip is told before anything runs under a key that nobody meant."""
    with pytest.raises(error):
        key("t", "charge", ARGS, **options)


@pytest.mark.parametrize("tool", ["", "cpkit:approval", "a\0b"])
def test_tool_names_obey_the_rules_of_ids(tool: str) -> None:
    """Those that start with ``cpkit:`` are the layer's own."""
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


@given(value=JSON)
def test_the_quick_encoder_writes_what_the_canonical_one_does(value: JsonValue) -> None:
    """Whichever made it, a key is the digest of the canonical text."""
    plain_value = records.copy_json(value, "value")
    made = records.effect_key("thread", "t", "x", "resource", plain_value)
    text = canonical_json([["thread", "t"], "x", "resource", plain_value])
    assert made == sha256(text.encode()).hexdigest()
