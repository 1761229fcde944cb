"""An optional part of cpkit without its extra says what to install."""

from __future__ import annotations

import pickle
import sys
from importlib import import_module

import pytest

from cpkit.registry import MissingExtra, needs_extra


@pytest.mark.parametrize(
    ("part", "package", "extra"),
    [
        ("cpkit_postgres", "asyncpg", "postgres"),
        ("cpkit_redis", "redis", "redis"),
        ("cpkit_file", "aiofiles", "file"),
        ("conformance", "hypothesis", "conformance"),
        ("cpkit.integrations.langgraph", "langchain_core", "langgraph"),
        ("cpkit.integrations.openai_agents", "agents", "openai-agents"),
        (
            "cpkit.integrations.claude_agent_sdk",
            "claude_agent_sdk",
            "claude-agent-sdk",
        ),
        ("cpkit.integrations.google_adk", "google", "google-adk"),
    ],
)
def test_an_import_without_the_extra_has_the_pip_line(
    part: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error also names the package that is missing."""
    for module in list(sys.modules):
        if module.startswith((part, f"{package}.")):
            monkeypatch.delitem(sys.modules, module)

    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(MissingExtra) as raised:
        # The suite imports its parts on first use.
        getattr(import_module(part), "certify", None)

    assert str(raised.value) == f"{part} needs {package}: pip install 'cpkit[{extra}]'"
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_broken_installation_is_not_a_missing_extra() -> None:
    """No extra brings a module of cpkit that is missing."""
    with (
        pytest.raises(ModuleNotFoundError, match="No module named 'cpkit.nothing'"),
        needs_extra("this test", "all"),
    ):
        import_module("cpkit.nothing")
