"""The harness: its names, its abilities, and how another process builds it again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance import (
    FactoryHarness,
    Harness,
    URLHarness,
    harness_for,
    run_clause,
    select,
)
from conformance.harness import address, rebuild
from cpkit import InvalidURL, MemoryCheckpointer


@dataclass
class Mine(Harness):
    """The five lines that an author writes."""

    path: str

    def open(self, **options: Any) -> MemoryCheckpointer[Any]:
        return MemoryCheckpointer(self.path, **options)


MINE = Mine("mine")


def make_mine() -> Harness:
    return MINE


def open_plain(max_payload: int = 100) -> MemoryCheckpointer[Any]:
    return MemoryCheckpointer("plain", max_payload=max_payload)


def test_a_url_names_a_harness(tmp_path: Path) -> None:
    """Every form of URL names a harness, even if it looks like module:name."""
    for url in ("memory://x", f"sqlite:///{tmp_path}/x.db", "file:folder"):
        assert harness_for(url) == URLHarness(url)


def test_a_dotted_name_names_a_harness() -> None:
    """The name of a harness, of a function that returns one, or of a factory."""
    assert harness_for(f"{__name__}:MINE") is MINE
    assert harness_for(f"{__name__}:make_mine") is MINE
    assert harness_for(f"{__name__}:open_plain") == FactoryHarness(
        f"{__name__}:open_plain"
    )


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("tests.test_conformance:TestMemory", "is a pytest class"),
        (f"{__name__}:Mine", "missing a required argument: 'path'"),
        ("json:JSONDecoder", "returned a JSONDecoder"),
    ],
)
def test_a_target_that_opens_no_handle_is_an_error(target: str, problem: str) -> None:
    """The error says what the target is, and what to give in its place."""
    with pytest.raises(ValueError, match=problem):
        harness_for(target)


@pytest.mark.parametrize(
    "target", ["no.such:thing", f"{__name__}:nothing", "json:codecs"]
)
def test_an_unknown_target_is_an_error(target: str) -> None:
    """The error is a ValueError, which the command prints without a traceback."""
    with pytest.raises(ValueError, match=target.partition(":")[0]):
        harness_for(target)


@pytest.mark.parametrize("url", ["nope://x", "x", "sqlite:///x?colour=red"])
def test_a_bad_url_is_an_error(url: str) -> None:
    """The registry's error is raised unchanged."""
    with pytest.raises(InvalidURL):
        harness_for(url)


def test_a_harness_is_built_again_from_its_address() -> None:
    """Only a dataclass of JSON values can be built again in another process."""
    assert rebuild(address(Mine("somewhere"))) == Mine("somewhere")
    assert rebuild(address(URLHarness("memory://x"))) == URLHarness("memory://x")

    class Local(Harness):
        pass

    with pytest.raises(TypeError):
        address(Local())

    with pytest.raises(TypeError):
        rebuild('["json:JSONDecoder", {}]')


def test_a_harness_without_address_lacks_processes() -> None:
    """The clause is skipped with the reason; it does not fail."""

    @dataclass
    class Local(Harness):
        path: str

    assert Mine("x").lacks("processes") is None
    assert "Local" in (Local("x").lacks("processes") or "")
    assert URLHarness("memory://x").lacks("processes")
    assert URLHarness("memory://").lacks("handles")


def test_a_harness_lacks_what_it_does_not_define() -> None:
    """Killing and pausing a server are optional; an unknown ability is an error."""

    class Served(Mine):
        async def pause(self) -> None:
            raise NotImplementedError

    assert "kill" in (Mine("x").lacks("server") or "")
    assert "pause" in (Mine("x").lacks("pause") or "")
    assert Served("x").lacks("pause") is None
    assert Mine("x").lacks("max_append") is None

    with pytest.raises(ValueError, match="'flying'"):
        Mine("x").lacks("flying")


def test_a_factory_takes_the_options_of_its_signature() -> None:
    """A clause that needs another option is skipped."""
    harness = FactoryHarness(f"{__name__}:open_plain")
    assert harness.lacks("max_payload") is None
    assert "message_type" in (harness.lacks("message_type") or "")


@pytest.mark.parametrize(
    "clause",
    ["handle.shares-calls", "concurrent.one-claims-a-key", "kill.claims-survive"],
)
def test_a_factory_of_private_stores_is_named_as_the_cause(clause: str) -> None:
    """The first line of the failure says it, whatever the clause is about."""
    [only] = select([], [clause])
    outcome = run_clause(only, FactoryHarness("cpkit:MemoryCheckpointer"))
    first, *rest = outcome.reason.split("\n")
    assert first == (
        "expected handles that share one store, seen a store of its own for each "
        "handle of cpkit:MemoryCheckpointer"
    )
    assert "the same path, URL or name" in rest[-1]


def test_a_password_stays_out_of_the_name() -> None:
    """Reports and commands show the URL without its password."""
    harness = URLHarness("redis://user:s3cret@localhost:6379/0")
    assert "s3cret" not in harness.name
    assert "s3cret" not in repr(harness)


def test_a_relay_needs_one_server() -> None:
    """The suite relays to the server of a URL, unless the URL names several."""
    one = URLHarness("postgresql://u@127.0.0.1:5433/d")
    assert one.lacks("proxy") is None
    assert one.server_address() == ("127.0.0.1", 5433)
    several = URLHarness("postgresql://u@127.0.0.1:5433,127.0.0.1:5434/d")
    assert several.lacks("proxy") == "the harness does not say where its server listens"
    assert several.lacks("nodes") == "the harness has no nodes that can fail"


@pytest.mark.parametrize("url", ["memory://", "sqlite:///:memory:"])
def test_a_store_of_one_handle_is_not_shared(url: str) -> None:
    """Also with options in its URL."""
    assert URLHarness(url).lacks("handles") == "each handle has its own store"
    with_options = URLHarness(f"{url}?max_payload=1000000")
    assert with_options.lacks("handles") == "each handle has its own store"
