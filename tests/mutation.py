"""Make small changes to the stores' code, and list those that the suite misses.

Run by hand; it is not a part of the test run::

    nice -n 19 python -m tests.mutation results.jsonl                 # all stores
    nice -n 19 python -m tests.mutation results.jsonl --slow
    nice -n 19 python -m tests.mutation results.jsonl sqlite --count 40 --seed 1

The changes are chosen by the seed, evenly among the operators. Each one is made in a
copy of the packages. The clauses that execute the changed statement are run on it, the
quickest first, until one fails. Clauses with processes, kills and faults are slow: a
second run with ``--slow`` gives them what the others missed. Each result is one line of
the file; a run goes on where the last one ended. Needs Python 3.12 or newer.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import importlib
import io
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import tokenize
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, zip_longest
from pathlib import Path
from random import Random
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

if TYPE_CHECKING:
    from conformance import Harness

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "cpkit cpkit_file cpkit_postgres cpkit_redis cpkit_sqlite conformance tests".split()
)

FILES = {
    "memory": ["cpkit/memory.py"],
    "driver": ["cpkit/driver/*.py"],
    "sqlite": ["cpkit_sqlite/*.py", "cpkit_sqlite/*.sql"],
    "file": ["cpkit_file/*.py"],
    "postgresql": ["cpkit_postgres/*.py", "cpkit_postgres/*.sql"],
    "redis": ["cpkit_redis/*.py", "cpkit_redis/*.lua"],
}
"""The driver kit is judged with the SQLite store."""

LEFT_OUT = {"__init__.py", "metrics.py"}

PATIENCE = 900
"""Seconds for the clauses on one change, at the lowest priority."""

ROUNDS = 0.25


class Change(NamedTuple):
    """Replace the text from ``start`` to ``stop`` of a file."""

    operator: str
    file: str
    line: int
    start: int
    stop: int
    new: str


# --- Operators on Python -------------------------------------------------------------

COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip


def python_changes(file: str, text: str) -> Iterator[Change]:
    """Yield the changes of a module: of its code, and of the SQL in its strings."""
    lines = [0]

    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def offset(line: int, column: int) -> int:
        start = lines[line - 1]
        return start + len(text[start : lines[line]].encode()[:column].decode())

    def span(node: Any) -> tuple[int, int]:
        start = offset(node.lineno, node.col_offset)
        return start, offset(node.end_lineno, node.end_col_offset)

    def made(operator: str, node: Any, start: int, stop: int, new: str) -> Change:
        return Change(operator, file, node.lineno, start, stop, new)

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            start, stop = span(node.left)[1], span(node.comparators[0])[0]
            sign = text[start:stop].strip()

            if sign in COMPARISONS:
                yield made("comparison", node, start, stop, f" {COMPARISONS[sign]} ")

        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                start, stop = span(left)[1], span(right)[0]
                words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                new = re.sub(rf"\b{words[0]}\b", words[1], text[start:stop])
                yield made("and/or", right, start, stop, new)

        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            start, stop = span(node.test)
            new = f"not ({text[start:stop]})"
            yield made("negated condition", node.test, start, stop, new)

        elif isinstance(node, ast.comprehension) and node.ifs:
            start, stop = span(node.ifs[0])
            yield made("no filter", node.ifs[0], start, stop, "True")

        elif (
            isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))
        ) or isinstance(node, (ast.AugAssign, ast.Raise)):
            start, stop = span(node)
            is_sync = re.search(r"fsync|sync_names|_synced|\.sync", text[start:stop])
            kind = "raise" if isinstance(node, ast.Raise) else "statement"
            name = "no sync" if is_sync else f"no {kind}"
            yield made(name, node, start, stop, "pass")

        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield made("true/false", node, *span(node), str(not node.value))

        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield made("number + 1", node, *span(node), str(node.value + 1))

        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            start, stop = span(node.left)[1], span(node.right)[0]
            new = text[start:stop].translate({ord("+"): "-", ord("-"): "+"})
            yield made("plus/minus", node, start, stop, new)

        elif isinstance(node, ast.Slice):
            for edge in filter(None, (node.lower, node.upper)):
                start, stop = span(edge)
                new = f"({text[start:stop]}) + 1"
                yield made("slice + 1", edge, start, stop, new)

    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE"):
            if re.search(r"\b(SELECT|INSERT|UPDATE|DELETE|PRAGMA|BEGIN|WHERE|JOIN)\b",
                         token.string):  # fmt: skip
                row, column = token.start
                at = lines[row - 1] + column
                # A brace in the middle of an f-string is there twice in the text.
                end = lines[token.end[0] - 1] + token.end[1]
                yield from query_changes(file, text, at, end)


# --- Operators on queries and scripts ------------------------------------------------

_CONDITION = r"(?:[^()'\n;]|'[^'\n]*'|\((?:[^()]|\([^()]*\))*\)|\n(?!\n))+?"
_NEXT = "AND|OR|ORDER|GROUP|LIMIT|FOR|RETURNING|ON|UNION"
_END = rf"(?=\s+(?:{_NEXT})\b|\s*[\"');]|\s*$)"

QUERIES: list[tuple[str, str, str]] = [
    ("sql: no condition", rf"\bAND\s+{_CONDITION}{_END}", ""),
    ("sql: no condition", rf"(?<=\bWHERE\s){_CONDITION}\s+AND\b", ""),
    ("sql: conflict", r"\bON CONFLICT(?: \([^)]*\))? DO NOTHING", ""),
    ("sql: update", r"\bDO UPDATE\s+SET\b[^\";]+", "DO NOTHING"),
    ("sql: order", r"\sDESC\b", " ASC"),
    ("sql: order", r"(?<=\bORDER BY )\w+(?:\.\w+)?(?! DESC)(?=\s|$)", "1"),
    ("sql: lock", r"\bFOR (?:(?:NO )?KEY )?(?:UPDATE|SHARE)\b|\bIMMEDIATE\b", ""),
    ("sql: comparison", r"(?<= )<(?= )", "<="),
    ("sql: comparison", r"(?<= )<=(?= )", "<"),
    ("sql: comparison", r"(?<= )>(?= )", ">="),
    ("sql: comparison", r"(?<= )>=(?= )", ">"),
    ("sql: comparison", r"(?<= )=(?= )", "<>"),
    ("sql: keyword", r"\bNOT EXISTS\b", "EXISTS"),
    ("sql: keyword", r"\bNOT NULL\b|\bUNIQUE\b", ""),
    ("sql: keyword", r"\bAND NOT\b", "AND"),
    ("sql: keyword", r"\bLEFT JOIN\b", "JOIN"),
    ("sql: keyword", r"\bmax\(", "min("),
    ("sql: keyword", r"\bmin\(", "max("),
    ("sql: keyword", r"\bgreatest\(", "least("),
    ("sql: number", r" \+ 1\b", ""),
    ("sql: number", r" - 1\b", ""),
]  # fmt: skip
SCRIPTS: list[tuple[str, str, str]] = [
    ("lua: comparison", r" == ", " ~= "),
    ("lua: comparison", r" ~= ", " == "),
    ("lua: comparison", r" < ", " <= "),
    ("lua: comparison", r" > ", " >= "),
    ("lua: condition", r"(?<=\bif )not ", ""),
    ("lua: condition", r"(?<=\bif )(?!not )", "not "),
    ("lua: and/or", r" and ", " or "),
    ("lua: and/or", r" or ", " and "),
    ("lua: number", r" \+ 1\b", ""),
    ("lua: number", r" - 1\b", ""),
    ("lua: no statement", r"(?m)(?<=^)[ ]+(?:call|corrupt|table\.\w+)\([^\n]*\)$", ""),
]


def query_changes(file: str, text: str, start: int, stop: int) -> Iterator[Change]:
    return _by_patterns(QUERIES, file, text, start, stop)


def script_changes(file: str, text: str) -> Iterator[Change]:
    return _by_patterns(SCRIPTS, file, text, 0, len(text))


def _by_patterns(
    patterns: list[tuple[str, str, str]], file: str, text: str, start: int, stop: int
) -> Iterator[Change]:
    for operator, pattern, new in patterns:
        for found in re.finditer(pattern, text[start:stop]):
            at = start + found.start()
            line = text.count("\n", 0, at) + 1
            whole = text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0]

            if not whole.lstrip().startswith(("--", "#")):
                end = start + found.end()
                yield Change(operator, file, line, at, end, new)


# --- The campaign --------------------------------------------------------------------


def changes(store: str, root: Path = ROOT) -> Iterator[Change]:
    """Yield every change of a store's files that still compiles."""
    for pattern in FILES[store]:
        for path in sorted(root.glob(pattern)):
            if path.name in LEFT_OUT:
                continue

            text, file = path.read_text(encoding="utf-8"), str(path.relative_to(root))

            match path.suffix:
                case ".py":
                    found = python_changes(file, text)
                case ".sql":
                    found = query_changes(file, text, 0, len(text))
                case _:
                    found = script_changes(file, text)

            for change in found:
                if path.suffix != ".py" or _compiles(applied(text, change)):
                    yield change


def _compiles(text: str) -> bool:
    try:
        compile(text, "changed", "exec")
    except (SyntaxError, ValueError):
        return False

    return True


def applied(text: str, change: Change) -> str:
    return text[: change.start] + change.new + text[change.stop :]


def chosen(found: list[Change], count: int, seed: str) -> list[Change]:
    """Return some of the changes: by turns one of each operator."""
    by_operator: defaultdict[str, list[Change]] = defaultdict(list)
    random = Random(seed)
    random.shuffle(found)

    for change in found:
        by_operator[change.operator].append(change)

    turns = zip_longest(*by_operator.values())
    return [change for turn in turns for change in turn if change][:count]


class Reach(NamedTuple):
    """What each clause executes, and how long it takes."""

    lines: dict[str, list[str]]
    seconds: dict[str, float]

    def clauses(self, tree: Path, change: Change) -> list[str]:
        """Return the clauses that execute the changed statement, the quickest first."""
        quickest = sorted(self.seconds, key=self.seconds.__getitem__)
        statement = _statement(tree / change.file, change.line)

        if statement is None:
            return quickest

        places = {f"{change.file}:{line}" for line in statement}

        if not places.isdisjoint(self.lines[IMPORT]):
            return quickest

        return [
            one for one in quickest if not places.isdisjoint(self.lines.get(one, []))
        ]


IMPORT = "import"
"""What is executed before the first clause."""

TRACE, SLOW = "trace", "slow"
"""The quick clauses, and what they execute; those with processes, kills and faults."""


def _statement(path: Path, line: int) -> range | None:
    """Return the lines of the innermost statement, without the body of a block."""
    if path.suffix != ".py":
        return None

    found = range(line, line + 1)

    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            stop = body[0].lineno if body else (node.end_lineno or 0) + 1

            # An inner statement is found after the one that it is in.
            if line < stop:
                found = range(node.lineno, stop)

    return found


def prepare(tree: Path) -> None:
    """Import from the copy what does not change, for the processes that are forked."""
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)
    compileall.compile_dir(tree, quiet=2)
    # Two changes of a file in one second would share their bytecode.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    _forget("cpkit", "conformance", "tests")
    importlib.import_module("hypothesis.stateful")
    importlib.import_module("conformance").all_clauses()
    importlib.import_module("tests.certificates")


def _forget(*packages: str) -> None:
    """Let packages be imported again."""
    for name in list(sys.modules):
        if name.startswith(packages):
            del sys.modules[name]


def judged(tree: Path, store: str, clauses: str | list[str]) -> tuple[int | None, str]:
    """Judge in a forked process; return its exit code and what it printed.

    The code is ``None`` after `PATIENCE` seconds.
    """
    url = url_of(store)

    with tempfile.TemporaryFile() as output:
        child = os.fork()

        if child == 0:
            try:
                os.setsid()
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.chdir(tempfile.mkdtemp(dir=tree))
                kit = store in ("memory", "driver")
                _forget(*(("cpkit", "conformance", "tests") if kit else ("cpkit_",)))
                judge(tree, store, url, clauses)
                sys.stdout.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(1)

        ended = os.pidfd_open(child)

        if not select.select([ended], [], [], PATIENCE)[0]:
            os.killpg(child, signal.SIGKILL)

        os.close(ended)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        printed = output.read().decode(errors="replace").strip()
        return None if code == -signal.SIGKILL else code, printed


def url_of(store: str) -> str:
    """Return the URL of an empty store on the shared server, if it needs one."""
    from tests.servers.postgres import shared_postgres
    from tests.servers.redis import shared_redis

    fresh = f"m{uuid4().hex[:12]}"

    if store == "postgresql":
        return shared_postgres(schema=fresh)

    return shared_redis(prefix=fresh) if store == "redis" else ""


def reach(tree: Path, store: str) -> Reach:
    """Run the quick clauses on the unchanged store, and return what they execute."""
    code, printed = judged(tree, store, TRACE)
    assert code == 0, f"{store} fails unchanged: {printed}"
    return Reach(**json.loads(printed.splitlines()[-1]))


def verdict(tree: Path, store: str, clauses: str | list[str]) -> str:
    """Return the clause that caught the change, or nothing."""
    code, printed = judged(tree, store, clauses)

    if code is None:
        return "the time limit"

    return "" if code == 0 else printed.rpartition("\n")[2] or "the end of the process"


def judge(tree: Path, store: str, url: str, asked: str | list[str]) -> None:
    """Run clauses in this process; print the first one that fails, or what they do."""
    place = IMPORT
    lines: defaultdict[str, list[str]] = defaultdict(list)
    seconds = {}
    packages = f"{tree}/cpkit"

    def executes(code: CodeType, number: int) -> object:
        if code.co_filename.startswith(packages):
            file = os.path.relpath(code.co_filename, tree)
            lines[place].append(f"{file}:{number}")

        return sys.monitoring.DISABLE

    if asked == TRACE:
        sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "cpkit")
        event = sys.monitoring.events.LINE
        sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, event, executes)
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, event)

    from conformance import URLHarness, all_clauses, run_clause
    from tests.certificates import harness_of

    clauses = {clause.id: clause for clause in all_clauses()}
    slow = [
        clause.id
        for clause in clauses.values()
        if {"processes", "server", "pause", "proxy"} & {*clause.abilities}
        or clause.level in ("durable", "powerloss")
    ]

    if asked == SLOW:
        asked = slow
    elif asked == TRACE:
        asked = [one for one in clauses if one not in slow]

    with ExitStack() as stack:
        if url and asked != slow:
            harness: Harness = URLHarness(url)
        else:
            # The slow clauses kill and pause a server of their own.
            kind = "sqlite" if store == "driver" else store
            harness = stack.enter_context(harness_of(kind))

        for place in asked:  # ``executes`` uses it
            sys.monitoring.restart_events()
            outcome = run_clause(clauses[place], harness, seed=1, rounds=ROUNDS)

            if outcome.status == "failed":
                os.write(1, f"{place}\n".encode())
                os._exit(1)

            if outcome.status == "passed":
                seconds[place] = outcome.seconds

    print(json.dumps({"lines": lines, "seconds": seconds}))  # noqa: T201  # for `reach`


def run(results: Path, stores: list[str], count: int, seed: str, *, slow: bool) -> None:
    """Judge changes of the stores, and add each result to the file."""
    earlier: dict[str, dict[str, Any]] = {}

    for line in results.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        earlier[json.dumps(found["change"])] = found

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tree = Path(folder)

        for package in PACKAGES:
            shutil.copytree(ROOT / package, tree / package)

        prepare(tree)
        reached: dict[str, Reach] = {}
        plans = [
            [(store, one) for one in chosen([*changes(store, tree)], count, seed)]
            for store in stores
        ]

        for store, change in filter(None, chain(*zip_longest(*plans))):
            before = earlier.get(json.dumps(change))
            start = time.monotonic()
            clauses: str | list[str] = SLOW

            if slow and (before is None or before["caught"] or before["slow"]):
                continue

            if not slow:
                if before is not None:
                    continue

                if store not in reached:
                    reached[store] = reach(tree, store)

                clauses = reached[store].clauses(tree, change)

            path = tree / change.file
            text = path.read_text(encoding="utf-8")
            path.write_text(applied(text, change), encoding="utf-8")
            caught = verdict(tree, store, clauses) if clauses else ""
            path.write_text(text, encoding="utf-8")
            result = {
                "store": store,
                "change": change,
                "old": text[change.start : change.stop],
                "near": text.splitlines()[change.line - 1].strip(),
                "caught": caught,
                "slow": slow,
                "reached": slow or len(clauses),
                "seconds": round(time.monotonic() - start),
            }

            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Change the stores; list the missed.")
    parser.add_argument("results", help="the file of results, one line of JSON each")
    parser.add_argument("stores", nargs="*", metavar="store", help=", ".join(FILES))
    parser.add_argument("--count", type=int, default=40, help="changes of each store")
    parser.add_argument("--seed", default="1")
    parser.add_argument(
        "--slow", action="store_true", help="the slow clauses, on what the others miss"
    )
    given = parser.parse_args()
    results = Path(given.results)
    results.touch()
    stores = given.stores or list(FILES)
    run(results, stores, given.count, given.seed, slow=given.slow)


if __name__ == "__main__":
    main()
