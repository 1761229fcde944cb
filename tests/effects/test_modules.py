"""The modules of ``cpkit.effects`` import each other in one direction."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from cpkit import effects

FOLDER = Path(effects.__file__).parent


def imported_by(module: str) -> set[str]:
    """Return the modules of the package that a module imports, in any block."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))
    found = set()

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == "cpkit.effects":
                found |= {name.name for name in node.names}
            elif node.module.startswith("cpkit.effects."):
                found.add(node.module.removeprefix("cpkit.effects."))

    return found


def test_modules_import_only_those_listed_before_them() -> None:
    """The package's docstring lists every module, in an order without cycles."""
    listed = re.findall(r"``(\w+)``", (effects.__doc__ or "").partition("Modules")[2])
    modules = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert sorted(listed) == sorted(modules)

    for place, module in enumerate(listed):
        assert imported_by(module) <= set(listed[:place]), module
