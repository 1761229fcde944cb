"""Pictures of a session's branches, and the command that draws them."""

from __future__ import annotations

import asyncio
import re
import sys
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from cpkit import open_checkpointer
from cpkit.sessions import SessionLog
from cpkit.sessions.pictures import draw_mermaid, draw_svg, draw_terminal
from tests.cli.command import invoke
from tests.sessions.conftest import Store
from tests.sessions.talk import assistant, result, user

HOSTILE = 'a "quoted" <b>\n[red]\x1b[31m\x00\u202eend; --> `x` & #quot; ]]>'


async def talk(cp: Store, session_id: str) -> SessionLog:
    """Make a session with three branches; the last one is active."""
    log = await SessionLog.open(cp, session_id)
    await log.append_message(user("fly me"))
    await log.append_message(assistant("looking", "search"))
    await log.append_message(result("search"))
    await log.append_model_change("lab", "large")
    fork = await log.append_message(assistant("where to?"))
    await log.append_message(user("Rome"))
    left = await log.append_message(assistant("too hot"))
    await log.label(left, "hot")
    await log.move_to(fork, "Rome was too hot")
    await log.append_message(user("Oslo"))
    await log.move_to(fork)
    await log.append_message(user("Bonn"))
    await log.append_state(plan=[], spent=1)
    await log.set_name("A trip")
    return log


def drawn(log: SessionLog, *, everything: bool = False) -> str:
    """Return the output in a terminal of 100 columns."""
    out = StringIO()
    console = Console(file=out, width=100, legacy_windows=False)
    console.print(draw_terminal(log, everything=everything))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


async def test_the_terminal_shows_the_branches(cp: Store, session_id: str) -> None:
    """A branch is indented below its fork; long runs are folded."""
    assert drawn(await talk(cp, session_id)) == (
        "A trip\n"
        "├── user: fly me\n"
        "├── … 3 entries\n"
        "└── assistant: where to?\n"
        "    ├── user: Rome\n"
        "    │   ├── assistant: too hot  [hot]\n"
        "    │   └── label: hot\n"
        "    ├── left a branch: Rome was too hot\n"
        "    │   └── user: Oslo\n"
        "    └── the leaf moves here\n"
        "        ├── user: Bonn\n"
        "        ├── state: plan, spent\n"
        "        └── name: A trip  ◀"
    )


async def test_everything_can_be_shown(cp: Store, session_id: str) -> None:
    """No entry is folded then."""
    shown = drawn(await talk(cp, session_id), everything=True)
    assert "entries" not in shown
    assert "├── assistant: looking → search" in shown
    assert "├── search: done" in shown
    assert "├── model: lab/large" in shown


async def test_each_root_is_a_branch(cp: Store, session_id: str) -> None:
    """A session with two roots shows both."""
    log = await SessionLog.open(cp, session_id)
    await log.append_message(user("one"))
    await log.append_message(assistant("two"))
    await log.move_to(None)
    await log.append_message(user("three"))
    assert drawn(log).splitlines()[1:] == [
        "├── user: one",
        "│   └── assistant: two",
        "└── the leaf moves here",
        "    └── user: three  ◀",
    ]


async def test_mermaid_has_the_same_branches(cp: Store, session_id: str) -> None:
    """Arrows follow parents: solid on the active branch, dotted elsewhere."""
    text = draw_mermaid(await talk(cp, session_id))
    assert text.startswith("flowchart TD\n")
    assert '    n0["user: fly me"]:::user\n' in text
    assert '    n4["assistant: where to#63;"]:::assistant\n    n1 --> n4\n' in text
    edges = re.findall(r"^    n(\d+) (-->|-\.->) n(\d+)$", text, re.MULTILINE)
    assert edges == [
        ("0", "-->", "1"),
        ("1", "-->", "4"),
        ("4", "-.->", "5"),
        ("5", "-.->", "6"),
        ("6", "-.->", "7"),
        ("4", "-.->", "8"),
        ("8", "-.->", "9"),
        ("4", "-->", "10"),
        ("10", "-->", "11"),
        ("11", "-->", "12"),
        ("12", "-->", "13"),
    ]


async def test_svg_has_a_lane_for_each_branch(cp: Store, session_id: str) -> None:
    """Rows are in the order of the log, and the leaf has a border."""
    root = ElementTree.fromstring(draw_svg(await talk(cp, session_id)))
    space = {"svg": "http://www.w3.org/2000/svg"}
    dots = root.findall(".//svg:circle", space)
    words = [text.text for text in root.findall(".//svg:text", space)]
    assert root.findtext("svg:title", namespaces=space) == "A trip"
    assert words[0] == "user: fly me"
    assert words[-1] == "name: A trip  ◀"
    assert len({dot.get("cx") for dot in dots}) == 3
    rows = {float(dot.get("cy", "")) for dot in dots}
    assert len(rows) == len(words)
    assert len([dot for dot in dots if dot.get("stroke")]) == 1
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    assert max(rows) < height
    assert max(float(dot.get("cx", "")) for dot in dots) < width


@pytest.mark.parametrize("everything", [False, True])
async def test_hostile_text_stays_text(
    cp: Store, session_id: str, everything: bool
) -> None:
    """It cannot become markup, an escape sequence or a statement."""
    log = await SessionLog.open(cp, session_id)
    first = await log.append_message(user(HOSTILE))
    await log.append_message({"role": HOSTILE, "content": HOSTILE * 100})
    await log.append_entry({"type": HOSTILE})
    await log.append_model_change(HOSTILE, HOSTILE)
    await log.append_custom(HOSTILE)
    await log.append_custom_message(HOSTILE, HOSTILE)
    await log.append_state(**{HOSTILE: 1})
    await log.label(first, HOSTILE)
    await log.move_to(first, HOSTILE)
    await log.set_name(HOSTILE)

    shown = drawn(log, everything=everything)
    assert "\x1b" not in shown
    assert "\x00" not in shown
    assert "\u202e" not in shown
    assert "[red]" in shown
    assert max(map(len, shown.splitlines())) <= 100
    ElementTree.fromstring(draw_svg(log, everything=everything))

    for line in draw_mermaid(log, everything=everything).splitlines()[1:]:
        assert re.fullmatch(
            r'    (n\d+\["[^"<>`&;\[\]]*(#\d+;[^"<>`&;\[\]]*)*"\]:::\w+'
            r"|n\d+ (-->|-\.->) n\d+"
            r"|classDef .*)",
            line,
        )


async def test_an_empty_session_can_be_drawn(cp: Store, session_id: str) -> None:
    """The picture has only a title."""
    log = await SessionLog.open(cp, session_id)
    assert drawn(log) == session_id
    assert draw_mermaid(log).startswith("flowchart TD\n    classDef")
    ElementTree.fromstring(draw_svg(log))


async def test_a_deep_session_can_be_drawn(cp: Store, session_id: str) -> None:
    """Drawing does not recurse."""
    header: dict[str, Any] = {"type": "session", "id": session_id, "version": 3}
    depth = sys.getrecursionlimit() + 500
    entries: list[dict[str, Any]] = []

    for number in range(depth):
        parent = f"a{number - 1}" if number else None
        entries.append({"type": "x", "id": f"a{number}", "parentId": parent})
        entries.append({"type": "x", "id": f"b{number}", "parentId": parent})

    await cp.append(session_id, [header, *entries])
    log = await SessionLog.open(cp, session_id)
    assert draw_mermaid(log).count("-->") == depth - 1
    assert draw_svg(log).count("<text") == 2 * depth
    draw_terminal(log)


# The command


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with one session and one plain thread."""
    url = f"sqlite:///{tmp_path}/agent.db"

    async def fill() -> None:
        async with open_checkpointer(url) as cp:
            await talk(cp, "trip")
            await cp.append("plain", [user("hello")])

    asyncio.run(fill())
    return url


def test_the_command_draws_a_session(url: str) -> None:
    """It draws in the terminal, as Mermaid and as SVG."""
    shown = invoke("tree", url, "trip")
    assert shown.code == 0
    assert "└── assistant: where to?" in shown.out
    assert "… 3 entries" in shown.out

    every = invoke("tree", url, "trip", "--all")
    assert "search: done" in every.out

    mermaid = invoke("tree", url, "trip", "--mermaid")
    assert mermaid.out.startswith("flowchart TD\n")

    svg = invoke("tree", url, "trip", "--svg", "--all")
    assert ElementTree.fromstring(svg.out).tag.endswith("svg")


def test_the_command_prints_json(url: str) -> None:
    """One object has every entry in the order of the log."""
    found = invoke("tree", url, "trip", "--json").json
    assert (found["session_id"], found["name"], found["version"]) == (
        "trip",
        "A trip",
        15,
    )
    assert found["entries"][-1]["id"] == found["leaf_id"]
    assert found["entries"][0] == {
        "id": found["entries"][1]["parent_id"],
        "parent_id": None,
        "type": "message",
        "timestamp": found["entries"][0]["timestamp"],
        "label": None,
        "text": "user: fly me",
        "is_active": True,
    }
    assert [e["text"] for e in found["entries"] if e["label"] == "hot"] == [
        "assistant: too hot"
    ]
    assert len(found["leaves"]) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{url}", "missing"], 1, "no thread 'missing'"),
        (["{url}", "plain"], 2, "is a plain thread"),
        (["{url}", "trip", "--svg", "--json"], 2, "exclude each other"),
        (["nowhere:x", "trip"], 2, "no driver"),
        (["sqlite:////proc/none/agent.db", "trip"], 3, "sqlite"),
    ],
)
def test_the_command_reports_errors(
    url: str, arguments: list[str], code: int, words: str
) -> None:
    """The exit code gives the kind, and one line the reason."""
    filled = [argument.format(url=url) for argument in arguments]
    ended = invoke("tree", *filled)
    assert ended.code == code
    assert words in " ".join(ended.err.split())
    assert ended.out == ""
