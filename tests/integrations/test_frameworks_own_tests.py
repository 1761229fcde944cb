"""The tests of the SDKs' own packages, with cpkit's store in the place of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.own_tests import bare, install, run, source_of

OPENAI_FILES = (
    "memory/test_session.py",
    "memory/test_session_limit.py",
    "memory/test_openai_responses_compaction_session.py",
    "extensions/memory/test_encrypt_session.py",
)
# What only the SDK's own SQLiteSession can pass. The SDK treats it apart from all other
# sessions: it has private methods for a pop that verifies a decryption first. The rest
# look into tables, connections and locks, or expect a closed session to refuse calls.
OPENAI_DIFFERENT = {
    "test_encrypted_pop_authentication_is_atomic_with_concurrent_mutations",
    "test_encrypted_pop_cancellation_waits_for_authentication_rollback",
    "test_encrypted_pop_rechecks_authentication_after_expired_tail",
    "test_encrypted_pop_wrong_key_preserves_recoverable_history",
    "test_encrypted_pop_wrong_key_preserves_row_identity",
    "test_settled_clear_failure_invalidates_response_chain",
    "test_settled_pop_failure_invalidates_response_chain",
    "test_sqlite_session_close_closes_worker_thread_connections",
    "test_sqlite_session_close_retries_quarantined_connection",
    "test_sqlite_session_closed_rejects_empty_add_items",
    "test_sqlite_session_failed_add_items_releases_write_lock",
    "test_sqlite_session_failed_clear_session_rolls_back",
    "test_sqlite_session_failed_pop_item_releases_write_lock",
    "test_sqlite_session_file_lock_is_shared_across_instances",
    "test_sqlite_session_get_items_limit_skips_corrupt_newest_rows",
    "test_sqlite_session_get_items_session_settings_limit_skips_corrupt_rows",
    "test_sqlite_session_keeps_connections_of_live_worker_threads",
    "test_sqlite_session_pop_item_returns_none_after_dropping_only_corrupt_rows",
    "test_sqlite_session_pop_item_skips_corrupt_most_recent",
    "test_sqlite_session_post_commit_cancellation_propagates_after_known_outcome",
    "test_sqlite_session_reaps_connections_from_exited_worker_threads",
    "test_sqlite_session_rollback_failure_evicts_connection",
    "test_sqlite_session_closes_retired_connections_before_the_next_allocation",
}

CLAUDE_FILES = (
    "test_session_helpers_store.py",
    "test_session_import.py",
    "test_session_resume.py",
    "test_session_store_conformance.py",
    "test_session_summary.py",
    "test_transcript_mirror.py",
)

# What only the Claude Agent SDK's store in memory can pass, and why.
CLAUDE_DIFFERENT = {
    "test_clear_helper": "a method for tests",
    "test_size_helper_counts_main_transcripts_only": "a method for tests",
    "test_removes_session": "it calls `size`, a method for tests",
    "test_continue_picks_most_recent": "it sets the private `_mtimes`",
    "test_continue_skips_sidechain_sessions": "it sets the private `_mtimes`",
    "test_continue_tie_break_is_deterministic": "it sets the private `_mtimes`",
}
MCP_FILES = (
    "interaction/transports/test_hosting_resume.py",
    "shared/test_streamable_http.py",
)
MCP_DIFFERENT = {
    "test_a_pre_2025_11_25_reconnect_replays_without_minting_a_priming_event",
    "test_initialize_with_unknown_protocol_version_gets_no_priming_event",
    "test_the_priming_row_is_stored_before_any_handler_output_for_that_stream",
}
MCP_NEEDS = ("inline-snapshot", "asttokens", "executing")

# These expect that a store answers within a few turns of the event loop, or that two
# appends within a millisecond have different times.
CLAUDE_IN_MEMORY = {
    "test_load_concurrency_is_bounded",
    "test_gap_fill_bounded_concurrency",
    "test_cancelled_after_mkdtemp_cleans_temp_dir",
    "test_eager_flush_mode_appends_per_frame_before_result",
    "test_fast_path_skips_load",
    "test_fast_path_limit_offset",
    "test_mixed_sessions_gap_filled",
    "test_sidechain_summary_does_not_consume_page_slot",
}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_tests_of_the_claude_agent_sdk_pass(tmp_path: Path) -> None:
    """All pass that use the public methods of its store."""
    tests = source_of("claude-agent-sdk", tmp_path) / "tests"
    options = ("-p", "claude_substitute", "-k", "not trio")
    ours = run(tests, CLAUDE_FILES, *options, different=CLAUDE_DIFFERENT)
    failed = _failed(ours)
    assert len(ours) >= 200
    assert failed >= CLAUDE_DIFFERENT.keys()
    assert failed <= CLAUDE_DIFFERENT.keys() | CLAUDE_IN_MEMORY


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_tests_of_the_openai_agents_sdk_pass(tmp_path: Path) -> None:
    """All pass that also pass with a session that is not the SDK's."""
    tests = source_of("openai-agents", tmp_path) / "tests"
    mode = ("asyncio_mode=auto", "asyncio_default_fixture_loop_scope=session")
    options = [part for one in mode for part in ("-o", one)]
    options += ["-p", "openai_substitute"]
    ours = run(tests, OPENAI_FILES, *options, different=OPENAI_DIFFERENT)
    assert len(ours) >= 220
    assert _failed(ours) == OPENAI_DIFFERENT


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_tests_of_the_mcp_sdk_pass(tmp_path: Path) -> None:
    """All but those that look into the list of the tests' own store."""
    tests = source_of("mcp", tmp_path) / "tests"
    (tests / "conftest.py").unlink()
    paths = [install(tmp_path / "needed", *MCP_NEEDS)]
    plugins = ("-p", "mcp_substitute", "-p", "anyio")
    ours = run(tests, MCP_FILES, *plugins, different=MCP_DIFFERENT, paths=paths)
    assert len(ours) >= 80
    assert _failed(ours) == MCP_DIFFERENT


@pytest.mark.long
def test_google_adk_has_tests_in_its_source(tmp_path: Path) -> None:
    """`test_google_adk` makes the same calls to both services meanwhile."""
    source = source_of("google-adk", tmp_path)

    if not (source / "tests").exists():
        pytest.skip("the source package of google-adk carries no tests")

    pytest.fail("run the tests of its session service with cpkit's in their place")


def _failed(results: dict[str, bool]) -> set[str]:
    """Return the names of the tests that failed, without parameters."""
    return {bare(name) for name, passed in results.items() if not passed}
