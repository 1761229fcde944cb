"""The errors: their tree, their pickling, and their messages."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from cpkit import errors
from cpkit.errors import (
    BackendUnavailable,
    CallMismatch,
    CheckpointerError,
    Closed,
    CorruptThread,
    InvalidId,
    InvalidURL,
    KeyMissing,
    KeyTaken,
    PayloadTooLarge,
    SchemaMismatch,
    SerializationError,
    UnknownCall,
    VersionConflict,
    WrongEventLoop,
)

CONTRACT = [
    error
    for error in CheckpointerError.__subclasses__()
    if error.__module__ == errors.__name__
]

# One of each, and what its message must name: what was wrong, and what to do.
EXAMPLES: list[tuple[CheckpointerError, list[str]]] = [
    (InvalidId("thread_id", "must not be empty"), ["thread_id", "empty"]),
    (InvalidURL("no driver for 'x'"), ["no driver for 'x'"]),
    (SerializationError([0, "a"], "JSON has no set"), ["[0]['a']", "set"]),
    (SerializationError([7], "not a message", "t"), ["[7]", "'t'", "not a message"]),
    (PayloadTooLarge(["k"], 11, 10), ["['k']", "11 bytes", "raise max_payload"]),
    (VersionConflict("t", 3, 4), ["'t'", "version 4", "not 3", "load it again"]),
    (VersionConflict("t", 3, 4), ["another writer appended"]),
    (VersionConflict("t", 3, 0), ["version 0", "deleted, or never written"]),
    (VersionConflict("t", 3, 2), ["version 2", "the number is wrong"]),
    (
        PayloadTooLarge(["messages"], 11, 10, "max_append"),
        ["['messages']", "11 bytes", "smaller parts", "raise max_append"],
    ),
    (KeyTaken("k", "t"), ["'k'", "'t'", "nothing was restored"]),
    (CallMismatch("t", "c", ["tool", "args"]), ["'c'", "'t'", "tool and args"]),
    (UnknownCall("t", "c"), ["'c'", "'t'", "record_issued comes first"]),
    (CorruptThread("t", "message 3", "cut short"), ["'t'", "message 3", "cut short"]),
    (CorruptThread("", "s://x", "malformed"), ["s://x is corrupt: malformed"]),
    (KeyMissing("t", "message 3", "k1", "is not in the keyring"), ["'t'", "'k1'"]),
    (SchemaMismatch("s://x", 9, 1), ["s://x", "version 9", "1", "upgrade cpkit"]),
    (SchemaMismatch("s://x", "junk", 1), ["s://x", "junk", "another place"]),
    (BackendUnavailable("s://x", "gone"), ["s://x", "gone", "nothing was written"]),
    (
        BackendUnavailable("s://x", "gone", maybe_applied=True),
        ["s://x", "gone", "may have been applied"],
    ),
    (Closed("s://x"), ["s://x", "async with"]),
    (WrongEventLoop("s://x"), ["s://x", "a handle in each loop"]),
]

examples = pytest.mark.parametrize(
    ("error", "fragments"), EXAMPLES, ids=lambda value: type(value).__name__
)


def drawn_trees() -> tuple[list[str], list[tuple[str, str]]]:
    """Return the drawn errors of the contract, and those of the layers by module."""
    contract, layers = (errors.__doc__ or "").split("The layers add")
    return (
        re.findall(r"[├└]── (\w+)", contract),
        re.findall(r"[├└]── (\w+) +([\w.]+):", layers),
    )


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    """A reader sees every error, and under what to catch it, on one screen."""
    drawn, _ = drawn_trees()

    assert drawn == [error.__name__ for error in CONTRACT]
    assert all(error.__bases__ == (CheckpointerError,) for error in CONTRACT)
    assert {*drawn, "CheckpointerError"} == set(errors.__all__)


def test_there_is_an_example_of_every_error() -> None:
    """The tests of this file cover every error of the contract."""
    assert {type(error) for error, _ in EXAMPLES} == set(CONTRACT)


@examples
def test_an_error_survives_pickling_and_copying(
    error: CheckpointerError, fragments: list[str]
) -> None:
    """An error reaches another process with its type, its facts and its message."""
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert vars(again) == vars(error)
        assert str(again) == str(error)


@examples
def test_a_message_names_the_cause_and_what_to_do(
    error: CheckpointerError, fragments: list[str]
) -> None:
    """An error says what was wrong, where, and what to do."""
    for fragment in fragments:
        assert fragment in str(error)
