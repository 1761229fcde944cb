"""The list of clauses: ids, sentences, and the version that names them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance import SUITE_VERSION, Level, all_clauses, select

LISTED = Path(__file__).parent / f"clauses-{SUITE_VERSION}.txt"


def test_ids_are_subject_and_words() -> None:
    """An id is a subject, a dot and a few words with hyphens."""
    for clause in all_clauses():
        assert re.fullmatch(r"[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*", clause.id)


def test_a_sentence_is_one_sentence() -> None:
    """The docstring of a clause is one sentence, on one line of a report."""
    for clause in all_clauses():
        assert clause.sentence.endswith("."), clause.id
        assert ". " not in clause.sentence, clause.id


def test_clauses_come_with_a_version() -> None:
    """The clauses of a released version of the suite never change.

    After adding a clause: increase SUITE_VERSION if it was released, rename the list
    and add the id.
    """
    ids = sorted(clause.id for clause in all_clauses())
    assert ids == LISTED.read_text().split()


def test_clauses_are_selected_by_level_and_id() -> None:
    """A level, an id or a subject selects clauses; an unknown name is an error."""
    assert {clause.level for clause in select(["core"])} == {Level.CORE}
    assert {clause.subject for clause in select(ids=["erase"])} == {"erase"}
    assert [one.id for one in select(ids=["append.keeps-order"])] == [
        "append.keeps-order"
    ]

    for levels, ids in ((["cor"], []), ([], ["append.x"]), (["core"], ["erase"])):
        with pytest.raises(ValueError, match="unknown|no clause matches"):
            select(levels, ids)
