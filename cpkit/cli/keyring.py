"""``cpkit keyring``: create the keyring of an encrypted store, and add keys to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cpkit.cli.output import printable, write
from cpkit.cli.running import Exit, fail
from cpkit.errors import CheckpointerError
from cpkit.keyring import add_key
from cpkit.registry import needs_extra

__all__ = ["keyring"]

File = Annotated[Path, typer.Argument(help="The keyring; a missing one is created.")]
Name = Annotated[
    str,
    typer.Option(help="Which store a new keyring is for; values are bound to it."),
]
HashKeys = Annotated[
    bool,
    typer.Option("--hash-keys", help="A new keyring also encrypts idempotency keys."),
]


def keyring(file: File, name: Name = "", hash_keys: HashKeys = False) -> None:
    """Add a new key to a keyring, or create the keyring.

    A store that is opened with CPKIT_KEYRING=FILE, or keyring=, encrypts its values.
    What is written from now on uses the new key; the older keys stay, and open what
    they have wrapped. cpkit rewrap puts all threads under the new key.
    """
    try:
        with needs_extra("a keyring", "privacy"):
            key_id = add_key(file, name=name, hash_keys=hash_keys)
    except (CheckpointerError, ModuleNotFoundError, ValueError) as exc:
        fail(Exit.BAD_USE, str(exc))
    except OSError as exc:
        fail(Exit.BAD_USE, f"{file}: {exc.strerror}")

    write(f"{printable(str(file))} has the new key {key_id}\n")
