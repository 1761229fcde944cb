"""Write the documentation's Python blocks as modules, for type checkers.

``python -m tests.docs.typed_blocks FOLDER`` writes one file for each block of the
README and of docs/, and a configuration for pyright. `make lint` checks the folder with
mypy and pyright, both strict. A block that is a change of another one is applied to it.
The blocks of write-a-backend.md are quoted from the example, which is checked itself.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import DOCS, blocks_of

__all__ = ["main", "programs"]

QUOTED = {"write-a-backend.md"}


PYRIGHT = {"typeCheckingMode": "strict", "pythonVersion": "3.11"}

# The types of these frameworks are incomplete: pyright's strict mode reports each that
# is used. Only mypy checks CubeLoop's page: its protocol asks for more than it uses.
BASIC = "integrations_langgraph_"
UNCHECKED = "integrations_cubeloop_*"


def programs() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each program in the documentation."""
    for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        name = str(page.relative_to(DOCS)) if DOCS in page.parents else "../README.md"

        if name not in QUOTED:
            stem = re.sub(r"\W+", "_", name.removesuffix(".md").removeprefix("../"))

            for number, block in enumerate(_whole(name, blocks_of(name))):
                yield f"{stem}_{number}", block


def _whole(name: str, blocks: list[str]) -> list[str]:
    """Return whole programs: the changes of a page are made to the block before."""
    if name == "tutorial.md":
        hello, program, approval, crashing, resume = blocks
        approved = program.replace("        ledger = EffectLedger(cp)\n", approval)
        crashes = crashing + approved[approved.index("\n\ndef model(") :]
        [line] = re.findall(r"^ +tools = .*\n", crashes, flags=re.MULTILINE)
        return [hello, program, approved, crashes.replace(line, line + resume)]

    if name == "integrations/openai-agents.md":
        return ["\n".join(blocks)]

    return blocks


def main(folder: Path) -> None:
    """Write the programs into the folder, in place of those of an earlier call."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        f"{name}.py": "# pyright: basic\n" * name.startswith(BASIC) + text
        for name, text in programs()
    }
    root = os.path.relpath(DOCS.parent, folder)
    texts["pyrightconfig.json"] = json.dumps(
        {**PYRIGHT, "extraPaths": [root], "exclude": [UNCHECKED]}
    )

    for old in folder.glob("*.py"):
        if old.name not in texts:
            old.unlink()

    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
