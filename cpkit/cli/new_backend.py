"""``cpkit new-backend``: create the package of a store, which certifies at once."""

from __future__ import annotations

from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from cpkit.cli.output import write
from cpkit.cli.running import Exit, fail

__all__ = ["Kind", "new_backend"]


class Kind(StrEnum):
    SERVER = "server"
    EMBEDDED = "embedded"
    KEY_VALUE = "key-value"


Name = Annotated[
    str, typer.Argument(help="The engine's name, such as mariadb; the scheme of URLs.")
]
KindOption = Annotated[
    Kind,
    typer.Option(
        "--kind",
        help="A server, an embedded engine with tables, or one with ordered keys.",
        show_default=False,
    ),
]


def new_backend(name: Name, kind: KindOption) -> None:
    """Create the package of a store, which certifies.

    It has a store over a dict, an entry point and a test file.

    It certifies at level core when it is created. Numbered comments in its store.py say
    what to replace by the engine, in which order. It is a new folder in the current
    one, and an existing folder is refused.
    """
    module = name.replace("-", "_")

    if not (module.isidentifier() and module.isascii() and module == module.lower()):
        fail(Exit.BAD_USE, f"{name}: a name has lower case letters, digits and '-'")

    folder = Path(f"cpkit-{name}")

    if folder.exists():
        fail(Exit.BAD_USE, f"{folder} exists")

    url = f"{name}://localhost/db" if kind is Kind.SERVER else f"{name}:state"
    words = {
        "@name@": name,
        "@scheme@": name,
        "@module@": module,
        "@Class@": "".join(part.capitalize() for part in module.split("_")),
        "@url@": url,
    }
    is_server = kind is Kind.SERVER
    package = folder / f"cpkit_{module}"
    made = {
        folder / "pyproject.toml": _template("pyproject.toml"),
        folder / "README.md": _template("README.md"),
        package / "__init__.py": _template("init.py"),
        package / "py.typed": "",
        package / "store.py": _store(kind),
        folder / "tests" / "test_certificate.py": _template(
            "test_certificate_server.py" if is_server else "test_certificate.py"
        ),
    }

    for path, text in made.items():
        for word, value in words.items():
            text = text.replace(word, value)

        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        write(f"{path}\n")

    write(
        f"\nNext:\n  pip install -e '{folder}[test]'\n"
        f"  cpkit certify {url} --level core -x\n"
        f"  then the numbered comments of {package / 'store.py'}, in their order\n"
    )


def _store(kind: Kind) -> str:
    head = _template(f"{kind}.py")

    if kind is Kind.KEY_VALUE:
        return head

    rows = _template("rows.py")

    if kind is Kind.EMBEDDED:  # the same queries and writes, in a thread
        rows = rows.replace("async def", "def").replace("await ", "")

    return head + rows


def _template(name: str) -> str:
    return (files("cpkit.tools") / "backend" / f"{name}.txt").read_text("utf-8")
