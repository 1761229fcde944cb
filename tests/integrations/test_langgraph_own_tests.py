"""LangGraph's own tests, with cpkit's saver in the place of its SQLite savers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.own_tests import install, run, source_of

SAVER_FILES = (
    "test_aiosqlite.py",
    "test_sqlite.py",
    "test_delta_parent_walk.py",
    "test_get_delta_channel_history.py",
    "test_delta_channel_migration.py",
)

# What only a saver with LangGraph's tables can pass, and why.
DIFFERENT = {
    "test_informative_async_errors": "a sync saver is refused on a running loop",
    "test_checkpoint_search_sql_injection_prevention": "there is no SQL in a filter",
    "test_walk_step_looks_up_the_parent_by_primary_key": "it explains a query",
}

# What only a store with vectors can pass.
NEED_VECTORS = {
    "test_async_vector_search_with_filters",
    "test_async_vector_update_with_embedding",
    "test_embed_with_path",
    "test_non_ascii",
    "test_vector_search_with_filters",
    "test_vector_store_initialization",
    "test_vector_update_with_embedding",
}

# Tests of the graph that run with each of LangGraph's savers.
GRAPH_FILES = (
    "test_checkpoint_migration.py",
    "test_delta_channel_fork.py",
    "test_delta_channel_subgraph.py",
    "test_delta_channel_update_state.py",
    "test_interrupt_state.py",
    "test_interruption.py",
    "test_large_cases.py",
    "test_large_cases_async.py",
    "test_pregel.py",
    "test_pregel_async.py",
    "test_subgraph_persistence.py",
    "test_subgraph_persistence_async.py",
    "test_time_travel.py",
    "test_time_travel_async.py",
)
NEEDED = ("pycryptodome", "pytest-mock", "syrupy")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_tests_of_the_sqlite_saver_pass(tmp_path: Path) -> None:
    """All pass that do not look into LangGraph's tables."""
    tests = source_of("langgraph-checkpoint-sqlite", tmp_path) / "tests"
    mode = ("-o", "asyncio_mode=auto")
    own = run(tests, SAVER_FILES, *mode)
    ours = run(tests, SAVER_FILES, *mode, "-p", "langgraph_substitute")
    assert len(own) >= 30
    assert {name for name, passed in own.items() if not passed} == set()
    failed = {name.rpartition(".")[2] for name, passed in ours.items() if not passed}
    assert ours.keys() == own.keys()
    assert failed == DIFFERENT.keys()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_tests_of_the_store_of_items_pass(tmp_path: Path) -> None:
    """All pass that need no vectors."""
    ours = run(
        source_of("langgraph-checkpoint", tmp_path) / "tests",
        ["test_store.py"],
        *("-o", "asyncio_mode=auto", "-p", "langgraph_store_substitute"),
        paths=[install(tmp_path / "needed", "pytest-mock")],
    )
    assert len(ours) >= 110
    failed = {name.rpartition(".")[2] for name, passed in ours.items() if not passed}
    assert failed == NEED_VECTORS


@pytest.mark.long
@pytest.mark.timeout(1900)
def test_the_graphs_tests_pass(tmp_path: Path) -> None:
    """Those that use a SQLite saver, of every kind: sync, async and encrypted."""
    tests = source_of("langgraph", tmp_path / "langgraph") / "tests"
    ours = run(
        tests,
        GRAPH_FILES,
        *("-p", "langgraph_substitute", "-k", "sqlite"),
        paths=[install(tmp_path / "needed", *NEEDED)],
        env={"NO_DOCKER": "true"},
    )
    assert len(ours) >= 800
    assert {name for name, passed in ours.items() if not passed} == set()
