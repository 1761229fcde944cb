"""The wheel and the source archive, installed without extras and with each extra."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution, distributions
from importlib.util import cache_from_source
from pathlib import Path
from uuid import uuid4

import pytest
from packaging.requirements import Requirement

from tests.servers.postgres import shared_postgres
from tests.servers.redis import shared_redis

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
THIS = f"3.{sys.version_info.minor}"
OLDEST = "3.11"

USE_STORE = """
import asyncio, sys
from cpkit import open_checkpointer

async def main():
    for version in (1, 2):
        async with open_checkpointer(sys.argv[1]) as cp:
            assert await cp.append("t", [{"n": version}]) == version
            assert (await cp.load("t")).version == version

asyncio.run(main())
"""

PRIVACY = """
import asyncio, sys
from pathlib import Path
from cpkit import open_checkpointer
from cpkit.keyring import add_key

async def main():
    async with open_checkpointer(sys.argv[1], keyring="ring.json") as cp:
        assert await cp.append("t", [{"n": 1}]) == 1
        assert await cp.read("t") == [{"n": 1}]

add_key(Path("ring.json"))
asyncio.run(main())
"""

NO_EXTRA = """
import asyncio, subprocess, sys
import cpkit

async def main():
    for url in ("memory://", "sqlite:///:memory:"):
        async with cpkit.open_checkpointer(url) as cp:
            assert await cp.append("t", [{}]) == 1

asyncio.run(main())
assert cpkit.__version__

for url, extra in [("redis://x", "redis"), ("postgresql://x", "postgres"),
                   ("file:x", "file")]:
    try:
        cpkit.open_checkpointer(url)
    except cpkit.CheckpointerError as exc:
        assert f"pip install 'cpkit[{extra}]'" in str(exc), exc
    else:
        raise AssertionError(f"{url} was opened without {extra}")

done = subprocess.run([sys.executable, "-m", "cpkit"], stderr=subprocess.PIPE)
assert done.returncode == 2
assert b"pip install 'cpkit[cli]'" in done.stderr
"""

CLI = """
import subprocess, sys
listed = subprocess.check_output([sys.executable, "-m", "cpkit", "drivers"], text=True)
assert "pip install 'cpkit[redis]'" in " ".join(listed.split()), listed
"""

UI = """
import asyncio
from cpkit import MemoryCheckpointer
from cpkit.ui import app

async def main():
    async with MemoryCheckpointer() as cp:
        sent = []

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(event):
            sent.append(event)

        page = app(cp, authorize=lambda request: "anna", secret=b"x")
        scope = {"type": "http", "method": "GET", "path": "/threads", "headers": [],
                 "query_string": b"", "raw_path": b"/threads", "scheme": "http",
                 "http_version": "1.1", "server": ("page", 80), "root_path": ""}
        await page(scope, receive, send)
        assert sent[0]["status"] == 200, sent

asyncio.run(main())
"""

CONFORMANCE = """
import asyncio
from conformance import certify

report = asyncio.run(certify("memory://", clauses=["append", "model"]))
assert report.ok, report
"""

LANGGRAPH = """
import asyncio
from cpkit import MemoryCheckpointer
from cpkit.integrations.langgraph import CheckpointSaver

async def main():
    async with MemoryCheckpointer() as cp:
        config = {"configurable": {"thread_id": "t"}}
        assert await CheckpointSaver(cp).aget_tuple(config) is None

asyncio.run(main())
"""

OPENAI_AGENTS = """
import asyncio
from cpkit import MemoryCheckpointer
from cpkit.integrations.openai_agents import Session

async def main():
    async with MemoryCheckpointer() as cp:
        session = Session("s", cp)
        await session.add_items([{"role": "user", "content": "hi"}])
        assert len(await session.get_items()) == 1

asyncio.run(main())
"""

CLAUDE_AGENT_SDK = """
import asyncio
from cpkit import MemoryCheckpointer
from cpkit.integrations.claude_agent_sdk import ClaudeSessionStore

async def main():
    async with MemoryCheckpointer() as cp:
        key = {"project_key": "p", "session_id": "s"}
        store = ClaudeSessionStore(cp)
        await store.append(key, [{"type": "user", "uuid": "1"}])
        assert len(await store.load(key)) == 1

asyncio.run(main())
"""

GOOGLE_ADK = """
import asyncio
from cpkit import MemoryCheckpointer
from cpkit.integrations.google_adk import SessionService

async def main():
    async with MemoryCheckpointer() as cp:
        service = SessionService(cp)
        session = await service.create_session(app_name="a", user_id="u")
        assert session.events == []

asyncio.run(main())
"""

PYDANTIC_AI = """
import asyncio
from cpkit import MemoryCheckpointer
from cpkit.integrations.pydantic_ai import ConversationStore

async def main():
    async with MemoryCheckpointer() as cp:
        assert await ConversationStore(cp).load("c") is None

asyncio.run(main())
"""

MCP = """
import asyncio
from cpkit import MemoryCheckpointer
from cpkit.integrations.mcp import EventStore

async def main():
    async with MemoryCheckpointer() as cp:
        assert await EventStore(cp, "s").store_event("1", None) == "1"

asyncio.run(main())
"""

PROGRAMS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "sqlite": (USE_STORE, lambda folder: f"sqlite:///{folder}/agent.db"),
    "file": (USE_STORE, lambda folder: f"file://{folder}/threads"),
    "postgres": (USE_STORE, lambda _: shared_postgres(schema=f"p{uuid4().hex}")),
    "redis": (USE_STORE, lambda _: shared_redis(prefix=uuid4().hex)),
    "privacy": (PRIVACY, lambda folder: f"sqlite:///{folder}/agent.db"),
    "cli": (CLI, str),
    "ui": (UI, str),
    "conformance": (CONFORMANCE, str),
    "langgraph": (LANGGRAPH, str),
    "openai-agents": (OPENAI_AGENTS, str),
    "claude-agent-sdk": (CLAUDE_AGENT_SDK, str),
    "google-adk": (GOOGLE_ADK, str),
    "pydantic-ai": (PYDANTIC_AI, str),
    "mcp": (MCP, str),
}


@dataclass
class Built:
    """The two distributions; the wheel is built from the source archive."""

    wheel: Path
    source: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, source)


def run(*command: object, cwd: Path | None = None) -> None:
    """Run a command; its output is the reason of a failure."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def interpreter(version: str) -> str | None:
    """Return a Python of this version, from the search path or from pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [*versions.glob(f"{version}.*/bin/python3")]
    return str(found[0]) if found else shutil.which(f"python{version}")


def install(folder: Path, version: str, package: str) -> Path:
    """Install the package alone into a new environment; return its Python."""
    command = interpreter(version)

    if command is None:
        pytest.skip(f"there is no Python {version} here")

    run(command, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--quiet", "--no-compile", package)
    return python


def needed(package: Distribution, extra: str) -> Iterator[Distribution]:
    """Yield what pip installs with a package and an extra.

    All of it is in this environment, into which pip has installed every extra.
    """
    waiting = [(package.name, extra)]
    seen: set[tuple[str, str]] = set()

    while waiting:
        name, its_extra = waiting.pop()

        if (name, its_extra) in seen:
            continue

        seen.add((name, its_extra))
        one = package if name == package.name else distribution(name)

        if one is not package:
            yield one

        for wanted in map(Requirement, one.requires or []):
            if wanted.marker is None or wanted.marker.evaluate({"extra": its_extra}):
                here = distribution(wanted.name).version
                assert wanted.specifier.contains(here, prereleases=True), wanted
                waiting += [(wanted.name, its) for its in ("", *wanted.extras)]


def link(package: Distribution, folder: Path) -> None:
    """Link the files of an installed package, compiled ones too, into a folder."""
    home = str(package.locate_file(""))

    for name in map(str, package.files or []):
        compiled = [cache_from_source(name)] if name.endswith(".py") else []

        for one in [name, *compiled] if not name.startswith("..") else []:
            source, place = os.path.join(home, one), os.path.join(folder, one)

            if os.path.exists(source) and not os.path.lexists(place):
                os.makedirs(os.path.dirname(place), exist_ok=True)
                os.symlink(source, place)


def test_the_archives_have_what_they_need(built: Built) -> None:
    """Queries, scripts and pages are in the wheel; tests and docs in the source."""
    wheel = {*zipfile.ZipFile(built.wheel).namelist()}
    packages = {name.partition("/")[0] for name in wheel}
    assert {"cpkit", "cpkit_sqlite", "cpkit_redis", "conformance"} <= packages
    assert "tests" not in packages

    with tarfile.open(built.source) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}

    assert {"Makefile", "scripts/venv.sh", "tests/conftest.py", "LICENSE"} <= source

    # All that is in the packages of the checkout, queries, scripts and pages included.
    for package in packages - {one for one in packages if one.endswith("-info")}:
        here = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert here <= wheel
        assert here <= source


@pytest.mark.parametrize("version", [OLDEST, THIS])
def test_the_wheel_can_be_installed(built: Built, tmp_path: Path, version: str) -> None:
    """Without extras, the parts that need one say what to install."""
    python = install(tmp_path, version, str(built.wheel))
    run(python, "-I", "-c", NO_EXTRA, cwd=tmp_path)


@pytest.mark.parametrize("extra", PROGRAMS)
def test_an_extra_is_all_that_its_part_needs(
    built: Built, tmp_path: Path, extra: str
) -> None:
    """An environment has the wheel and what the extra needs, and nothing else."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    packages = tmp_path / f"venv/lib/python{THIS}/site-packages"
    zipfile.ZipFile(built.wheel).extractall(packages)
    [wheel] = distributions(name="cpkit", path=[str(packages)])

    for package in needed(wheel, extra):
        link(package, packages)

    program, argument = PROGRAMS[extra]
    folder = tmp_path / "empty"
    folder.mkdir()
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-I", "-c", program, argument(folder), cwd=folder)


@pytest.mark.parametrize("version", [OLDEST, THIS])
def test_the_source_archive_can_be_installed(
    built: Built, tmp_path: Path, version: str
) -> None:
    """pip builds a wheel from it."""
    python = install(tmp_path, version, str(built.source))
    run(python, "-I", "-c", "import cpkit, conformance", cwd=tmp_path)
