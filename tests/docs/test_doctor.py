"""Each finding of ``docs/operations.md#doctor`` is produced by a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import DOCS

# What a test of this name, on a real server or mount, makes doctor or an opening say.
PRODUCED = {
    "cli/test_doctor.py": {
        "test_the_check_follows_every_key": ["has lost its key"],
        "test_the_check_of_the_engine_finds_damage": ["damaged"],
        "test_advice_is_given": ["`durability=normal`", "other users can read"],
        "test_a_replica_is_named_as_one": ["is a replica of …"],
        "test_a_place_that_is_weak_and_nearly_full_is_a_finding": [
            "a full disk refuses every write"
        ],
        "test_the_longest_threads_are_named": ["which each load reads"],
        "test_the_largest_threads_are_named": [
            "has about … of args and results",
            "has about … of messages",
        ],
        "test_free_space_is_told": ["bytes of the file, which are used again"],
        "test_what_a_killed_trim_left_is_told": [
            "bytes of writes that a crash cut short"
        ],
        "test_memory_that_a_server_does_not_use_is_told": [
            "bytes that the server holds beyond what it uses"
        ],
        "test_dead_space_of_a_server_is_told": ["bytes since its last rewrite"],
        "test_keys_without_calls_and_calls_without_keys_are_counted": [
            "calls, such as …, have no key in `used-keys/`",
            "lines of `used-keys/` without a call",
        ],
    },
    "driver/test_file_systems.py": {
        "test_what_is_in_memory_does_not_survive_the_machine": ["is in memory"],
        "test_what_is_not_a_local_disk_is_named": ["is not known to be a local disk"],
        "test_an_overlay_promises_what_its_upper_layer_does": [
            "so that a sync does not reach the disk",
            "is an overlay file system",
        ],
        "test_a_file_that_is_mounted_alone_is_refused": ["is mounted alone"],
        "test_a_file_with_two_names_is_refused": ["has 2 names (hard links)"],
    },
    "file/test_inotify.py": {
        "test_a_watch_polls_where_inotify_is_exhausted": [
            "the system does not report changes (a warning)"
        ],
    },
    "postgres/test_doctor.py": {
        "test_what_is_around_the_tables": [
            "a crash of the server empties UNLOGGED tables",
            "other programs' triggers; other programs' rules",
        ],
        "test_a_weaker_promise_is_a_finding": ["a crash can take the last commits"],
        "test_a_pooler_in_between": ["a pooler is in between"],
        "test_the_limits_of_the_role": [
            "the role, the database or the server has limits of time"
        ],
        "test_row_level_security_is_named": [
            "row-level security hides rows of … from this role"
        ],
        "test_sessions_that_are_read_only": ["sessions are read-only"],
        "test_a_standby": [
            "the server is a standby",
            "None of the hosts match the target attribute",
        ],
        "test_a_page_that_is_damaged_on_disk": ["the server has met N damaged pages"],
        "test_the_check_of_the_engine_reads_the_indexes": [
            "not checked: CREATE EXTENSION amcheck (indexes, `--check`)"
        ],
    },
    "postgres/test_local.py": {
        "test_a_file_that_cannot_be_read": [
            "cannot read …; TLS failed; sslmode asks for TLS; no user to log in as"
        ],
    },
    "postgres/test_pgbouncer.py": {
        "test_a_setting_that_a_pooler_refuses": ["a pooler takes no settings"],
        "test_a_callers_pool_behind_a_pooler": [
            "a pooler is in between, and would run statements of other programs"
        ],
    },
    "postgres/test_surroundings.py": {
        "test_row_level_security_behind_a_pooler": [
            "Postgres would hide rows in silence"
        ],
    },
    "postgres/test_schema.py": {
        "test_durability_without_syncs": [
            "a power loss can take everything; a power loss can tear pages"
        ],
    },
    "redis/test_durability.py": {
        "test_durability_follows_the_settings": [
            "a restart of the server loses everything",
            "can lose about the last second",
            "can lose the last half minute",
            "it does not sync that file",
            "may keep half of a transaction",
            "evicts any key when its memory is full",
        ],
        "test_a_file_that_was_just_switched_on_is_not_there_yet": [
            "the server rewrites its append-only file"
        ],
        "test_evicted_keys_are_mentioned": ["has evicted N keys"],
        "test_little_memory_is_mentioned": ["uses N of its M bytes"],
        "test_a_replica_that_does_not_follow_is_mentioned": [
            "the replica … does not follow"
        ],
        "test_replicas_are_mentioned": ["a failover … can lose acknowledged writes"],
        "test_unreadable_settings_are_mentioned": ["could not be read"],
    },
    "redis/test_faults.py": {"test_fault": ["`MISCONF`; `OOM`; `NOREPLICAS`"]},
    "redis/test_outages.py": {
        "test_a_cluster_is_refused_and_nothing_is_written": ["part of a cluster"],
    },
    "redis/test_vanished.py": {
        "test_a_store_without_its_schema_is_not_taken_for_a_new_one": ["`LOST`"],
        "test_an_emptied_store_is_not_used_further": ["`VANISHED` (an open handle)"],
    },
    "sqlite/test_files.py": {
        "test_what_may_only_be_read_is_read": ["the file may only be read"],
        "test_a_restored_file_beside_an_older_log_is_refused": [
            "its `-wal` file belongs to another state"
        ],
        "test_a_snapshot_that_may_only_be_read_says_how_to_read_its_log": [
            "SQLite cannot read the `-wal` file where it cannot create a file"
        ],
    },
}


PRINTED_BY_OTHERS = {"None of the hosts match the target attribute"}


def findings() -> list[str]:
    """Return the first column of the tables of the page."""
    page = (DOCS / "operations.md").read_text(encoding="utf-8")
    section = page.partition("\n## Doctor\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
    return [one for one in cells if not re.match("Finding|Error$", one)]


def texts(path: Path) -> Iterator[str]:
    """Yield the texts of a module; what is put into them is a NUL."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = [getattr(one, "value", None) for one in node.values]
            yield "".join(one if isinstance(one, str) else "\0" for one in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_each_finding_has_a_test() -> None:
    """So that no line of the page says what never happens."""
    tests = [(file, *pair) for file, some in PRODUCED.items() for pair in some.items()]
    assert sorted(findings()) == sorted(line for *_, lines in tests for line in lines)

    for file, name, _ in tests:
        text = (DOCS.parent / "tests" / file).read_text(encoding="utf-8")
        assert f"def {name}(" in text, f"{file} has no {name}"


def test_the_page_has_the_words_that_are_printed() -> None:
    """So that an operator finds what doctor says: "…", N and M are what differs."""
    folders = "cpkit_*", "cpkit/cli", "cpkit/driver"
    modules = [path for one in folders for path in DOCS.parent.glob(f"{one}/*.py")]
    printed = "\n".join(text for path in modules for text in texts(path))

    for finding in findings():
        for words in re.sub(r" \(.*\)|`", "", finding).split("; "):
            pattern = re.sub(r"\b[NM2]\b|…", ".{0,60}", re.escape(words))
            assert re.search(pattern, printed) or words in PRINTED_BY_OTHERS, words
