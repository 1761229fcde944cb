"""Fail on phrases that readers stumble over: ``python tests/core/plain_words.py``.

Checks the tracked files of this repository: comments, strings and the names of
functions and classes in Python, and the whole text of Markdown, SQL, Lua, TOML, YAML
and make files. Prints file and line, the phrase, and what to write instead.

A line with ``plain-words: ignore REASON`` is not checked, nor is the line after it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import NamedTuple

__all__ = ["Finding", "check", "main"]

ROOT = Path(__file__).parents[2]

# A space stands for any white space, line ends included. Letter case is ignored,
# except in (?-i:...).
PHRASES = {
    r"(?<!there\s)(is|are|was|were) no (?!longer|more)\w+": '"is not a", or "has no"',
    r"(is|are|was|were) (?-i:none)": '"unknown", or "is not a"',
    r"none of ours": '"unknown"',
    r"(whoever|whomever|whosoever)": "name the actor: the caller, the process",
    r"(somebody|someone)": "name the actor: another writer, another process",
    r"(nobody|everybody)": 'name the actor: "no process", "every reader"',
    r"(one|ones|those|all|any|that) who": "name the actor: a caller that",
    r"let(s|ting)?( \w+)? go": '"release", "close" or "free"',
    r"mend(s|ed|ing)?": '"fix"',
    r"(anew|once more)": '"again"',
    r"(at|to|until) (its|their) end": '"when it ends", or "at the end of" and a noun',
    r"(comes?|came|coming) to": '"waits for", "reaches" or "adds up to"',
    r"what (is|was|stands) there": 'name the thing: "the stored rows"',
    r"(of (its|their) own accord|by and by)": '"by itself", "gradually"',
    r"in words": '"as text"',
    r"nor (where|what|when|that|does|is)": 'a sentence of its own with "not"',
    r"(is|are|was) (not )?so(?=[.,;:])": "say what is true",
    r"it is not so": "say what is wrong",
    r"as (it|they) comes?": '"unchanged"',
    r"(can|is|are) (to )?be had": '"is available"',
    r"(is|are|not) ours": '"belongs to cpkit"',
    r"(became|becomes?) of": '"the outcome of"',
}

_CHECKS = [
    # Not beside a hyphen: options and file names may contain these words.
    (
        re.compile(r"(?<![\w-])" + phrase.replace(" ", r"\s+") + r"(?![\w-])", re.I),
        advice,
    )
    for phrase, advice in PHRASES.items()
]
_IGNORE = re.compile(r"plain-words: ignore\s+\w")
_WHOLE = {".lua", ".md", ".sql", ".toml", ".yml"}
_STRING_PARTS = {
    tokenize.STRING,
    getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),  # Python 3.12
}
_BETWEEN_STRINGS = _STRING_PARTS | {
    tokenize.NL,
    getattr(tokenize, "FSTRING_START", tokenize.NL),
    getattr(tokenize, "FSTRING_END", tokenize.NL),
}

Passage = list[tuple[int, str]]
"""Lines that belong together, with their numbers: a phrase may go over a line end."""


class Finding(NamedTuple):
    """A phrase in a file, and what to write instead."""

    path: str
    line: int
    phrase: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.phrase!r}: write {self.advice}"


def check(path: str, text: str) -> list[Finding]:
    """Return the phrases of one file that need other words."""
    lines = text.split("\n")
    ignored = {number for number, line in enumerate(lines, 1) if _IGNORE.search(line)}
    ignored |= {number + 1 for number in ignored}
    passages = (
        _python_passages(text) if path.endswith(".py") else [[*enumerate(lines, 1)]]
    )
    found = set()

    for passage in passages:
        joined = "\n".join(line for _, line in passage)

        for pattern, advice in _CHECKS:
            for match in pattern.finditer(joined):
                number = passage[joined.count("\n", 0, match.start())][0]
                phrase = " ".join(match[0].split())

                if number not in ignored:
                    found.add(Finding(path, number, phrase, advice))

    return sorted(found)


def _python_passages(text: str) -> Iterator[Passage]:
    """Yield comments, strings, and the names of functions and classes.

    Comments on consecutive lines are one passage, and so are adjacent strings.
    """
    comments: Passage = []
    strings: Passage = []
    before = ""

    for token in tokenize.generate_tokens(StringIO(text).readline):
        number = token.start[0]

        if token.type == tokenize.COMMENT:
            if comments and number > comments[-1][0] + 1:
                yield comments
                comments = []

            comments.append((number, token.string.lstrip("# ")))
        elif token.type in _STRING_PARTS:
            strings += enumerate(token.string.strip("\"'").split("\n"), number)
        elif token.type not in _BETWEEN_STRINGS and strings:
            yield strings
            strings = []

        if token.type == tokenize.NAME and before in ("def", "class"):
            yield [(number, token.string.replace("_", " "))]

        before = token.string

    yield comments
    yield strings


def main() -> int:
    """Check every tracked file, print the findings, and return the exit code."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    findings: list[Finding] = []
    for name in filter(None, names.split("\0")):
        path = ROOT / name

        if not (path.suffix in _WHOLE | {".py"} or path.name == "Makefile"):
            continue

        if path == Path(__file__) or not path.exists():
            continue

        findings += check(name, path.read_text(encoding="utf-8"))

    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
