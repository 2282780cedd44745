"""Sample small changes of the package (mutants), and find the tests that notice (kill) each.

    python scripts/mutants.py run --seed 1 --count 60 --out old.csv \\
        --of disaggregation/delta/nixl disaggregation/delta/mooncake --tests test/srt/unit/delta
    python scripts/mutants.py compare old.csv new.csv

``run`` draws statements below ``python/sglang/srt`` with the seed, and changes each in one way. It
changes only bodies of functions: comparisons, operators, integers and booleans, conditions and
``not``; ``return x`` becomes ``return None``, ``break`` and ``continue`` are exchanged, and calls,
``del``, ``raise`` and assignments to attributes or items are removed. Texts, log lines,
``assert``, annotations, defaults, local names and coroutines are not changed.

Tests are imported once. They first run unchanged, to find which functions of the package each test
file reaches; tests that fail then are reported and left out. Then each mutant runs in a separate
process, against the files that reach it, until a test fails (with ``--matrix``: all tests), or for
``--limit`` seconds. A file that starts programs counts as reaching every function. No tracked file
is written: a function's code is replaced in memory, and programs find the changed module in a copy.
Two of these scripts may therefore run at the same time, beside other work.

The table has one row a mutant: file, line, change, and the tests that failed; ``no answer`` if it
took too long or crashed (counted as killed); nothing if it survived. ``run --again TABLE`` takes
only those mutants of its sample that a table killed. ``compare`` counts the killed mutants by file,
of those in the second table, and names those that only one of two tables killed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import gc
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python/sglang/srt"
#: A changed node of the syntax tree is replaced by one of these.
OPERATORS: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_LOGS = re.compile(r"\b(logger|logging|warnings)\b")
#: Fields without behaviour of the function itself, or with texts only.
_SKIPPED = {"annotation", "returns", "decorator_list", "args", "exc", "cause", "msg"}


class Mutant(NamedTuple):
    """One change: its file, its number in the file's list of changes, and its description."""

    file: Path
    number: int
    line: int
    change: str
    function: tuple[str, int]


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the possible replacements of ``node``."""
    if isinstance(node, ast.boolop | ast.cmpop | ast.operator) and type(node) in OPERATORS:
        yield OPERATORS[type(node)]()
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        yield ast.Constant(not node.value if type(node.value) is bool else node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.If | ast.While):
        kept = {field: value for field, value in ast.iter_fields(node) if field != "test"}
        yield type(node)(test=ast.UnaryOp(ast.Not(), node.test), **kept)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if not any(isinstance(target, ast.Name | ast.Tuple) for target in targets):
            yield ast.Pass()
    elif (
        isinstance(node, ast.Raise | ast.Delete)
        or isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()
    elif isinstance(node, ast.Break | ast.Continue):
        yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()


def changes(
    node: ast.AST, function: ast.AST | None = None, line: int = 0
) -> Iterator[tuple[ast.AST, int, str, Callable[[], None]]]:
    """Yield all changes of functions' bodies below ``node``: the outermost function, the
    statement's line, a description, and a call that makes the change."""
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or field in _SKIPPED and function is not None:
                continue
            if isinstance(child, ast.JoinedStr | ast.Assert) or (
                isinstance(child, ast.Expr) and _LOGS.search(ast.unparse(child).split("(")[0])
            ):
                continue
            here = child.lineno if isinstance(child, ast.stmt) else line
            for new in variants(child) if function is not None else ():

                def make(
                    new: ast.AST = new, index: int = index, field: str = field, value: Any = value
                ) -> None:
                    if isinstance(value, list):
                        value[index] = new
                    else:
                        setattr(node, field, new)

                shown = node if isinstance(node, ast.expr) else child
                reads = " ".join(ast.unparse(shown).split())[:70]
                yield function, here, f"{reads} => {type(new).__name__}", make
            is_function = isinstance(child, ast.FunctionDef) and function is None
            yield from changes(child, child if is_function else function, here)


def mutants_of(file: Path) -> list[Mutant]:
    """Return all mutants of a file."""
    mutants = []
    for number, (function, line, change, _) in enumerate(changes(ast.parse(file.read_text()))):
        assert isinstance(function, ast.FunctionDef)
        first = min([function.lineno, *(mark.lineno for mark in function.decorator_list)])
        mutants.append(Mutant(file, number, line, change, (function.name, first)))
    return mutants


def drawn(folders: list[str], seed: int, count: int) -> list[Mutant]:
    """Return ``count`` statements below ``folders``, each with one change, by file and line."""
    statements: dict[tuple[Path, int], list[Mutant]] = {}
    for folder in folders:
        path = PACKAGE / folder
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for mutant in mutants_of(file):
                statements.setdefault((file, mutant.line), []).append(mutant)
    rng = random.Random(seed)
    places = rng.sample(sorted(statements), min(count, len(statements)))
    return sorted(rng.choice(statements[place]) for place in places)


def apply(mutant: Mutant, copy: Path) -> None:
    """Replace the code of the function in this process, and the module's file in ``copy``."""
    tree = ast.parse(mutant.file.read_text())
    function, *_, make = list(changes(tree))[mutant.number]
    if any(isinstance(n, ast.Name) and n.id == "super" for n in ast.walk(function)):
        # Keep a use of ``__class__``, because code with its cell needs a replacement with the cell.
        function.body.append(ast.parse("if 0: __class__").body[0])  # type: ignore[attr-defined]
    make()
    (copy / mutant.file.relative_to(PACKAGE)).write_text(
        ast.unparse(ast.fix_missing_locations(tree))
    )

    def codes(code: CodeType) -> Iterator[CodeType]:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield constant
                yield from codes(constant)

    for new in codes(compile(tree, str(mutant.file), "exec")):
        if (new.co_name, new.co_firstlineno) == mutant.function:
            break
    gc.unfreeze()
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and thing.__code__.co_filename == str(mutant.file):
            code = thing.__code__
            if (code.co_name, code.co_firstlineno) == mutant.function:
                thing.__code__ = new


class Runs:
    """Replaces pytest's loop over the tests by one loop for each mutant, in a fork."""

    def __init__(self, options: argparse.Namespace, copy: Path) -> None:
        self._options, self._copy = options, copy
        self._again = read(options.again) if options.again else None
        self.failed: list[str] = []
        self.reached: set[str] = set()
        self.status = 0

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Skip the search for the smallest failing example, which is not needed."""
        settings.register_profile(
            "mutants", settings.default, phases=[Phase.explicit, Phase.generate]
        )
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("tests that cannot be imported")
        files: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            files.setdefault(str(item.path), []).append(item)
        reach: dict[str, set[str]] = {}
        for file, items in files.items():
            answer = self._fork(lambda items=items: self._learn(items), 10 * self._options.limit)
            assert answer is not None, f"{file} takes too long"
            reach[file] = set(answer["reached"])
            files[file] = [item for item in items if item.nodeid not in answer["failed"]]
            for nodeid in answer["failed"]:
                print("fails unchanged:", nodeid, file=sys.stderr)
        with open(self._options.out, "w", newline="") as out:
            table = csv.writer(out, lineterminator="\n")
            table.writerow(("file", "line", "change", "killed by"))
            for mutant in drawn(self._options.of, self._options.seed, self._options.count):
                name = str(mutant.file.relative_to(PACKAGE))
                if (
                    self._again is not None
                    and not self._again[name, str(mutant.line), mutant.change]
                ):
                    continue
                key = f"{mutant.file}:{mutant.function[1]}"
                tests = [i for file in files if {key, ""} & reach[file] for i in files[file]]
                # Run tests that start programs last, because most mutants are killed before.
                tests.sort(key=lambda item: "" in reach[str(item.path)])
                answer = self._fork(lambda m=mutant, t=tests: self._try(m, t), self._options.limit)
                killed = "no answer" if answer is None else " ".join(answer["failed"])
                table.writerow((name, mutant.line, mutant.change, killed))
                out.flush()
        return True

    def _fork(self, work: Callable[[], None], limit_s: float) -> dict[str, Any] | None:
        """Return the result of ``work`` in a child; None if it took too long or crashed."""
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.setsid()
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            os.environ["PYTHONPATH"] = f"{self._copy.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            try:
                work()
            except BaseException as error:
                self.failed.append(f"({type(error).__name__}: {error})")
            result = {"failed": self.failed, "reached": sorted(self.reached)}
            with os.fdopen(writing, "w") as pipe:
                json.dump(result, pipe)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read() if select.select([pipe], [], [], limit_s)[0] else ""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return json.loads(text) if text else None

    def _learn(self, items: list[pytest.Item]) -> None:
        def called(frame: FrameType, event: str, _: object) -> None:
            if frame.f_code.co_filename.startswith(str(PACKAGE)):
                self.reached.add(f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno}")

        def heard(event: str, _: object) -> None:
            if event == "subprocess.Popen":
                self.reached.add("")

        sys.addaudithook(heard)
        threading.settrace(called)
        sys.settrace(called)
        self._run(items)

    def _try(self, mutant: Mutant, items: list[pytest.Item]) -> None:
        apply(mutant, self._copy)
        try:
            self._run(items, until_one_fails=not self._options.matrix)
        finally:
            kept = mutant.file.relative_to(PACKAGE)
            shutil.copyfile(mutant.file, self._copy / kept)

    def _run(self, items: list[pytest.Item], until_one_fails: bool = False) -> None:
        for item, following in zip(items, [*items[1:], None], strict=False):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if until_one_fails and self.failed:
                return

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)


def read(table: str) -> dict[tuple[str, str, str], str]:
    """Return what killed each mutant, by file, line and change."""
    with open(table) as lines:
        rows = list(csv.DictReader(lines))
    return {(row["file"], row["line"], row["change"]): row["killed by"] for row in rows}


def run(options: argparse.Namespace) -> int:
    """Write the table. Return pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "python/sglang/srt"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE.parents[1], copy.parents[1], ignore=ignored)
        arguments = ["-q", "-s", "-p", "no:cacheprovider", *options.tests, *options.others]
        return int(pytest.main(arguments, plugins=[Runs(options, copy)]))


def compare(options: argparse.Namespace) -> int:
    """Print a line a file, and the mutants that only one table killed. Return 1 if any is lost."""
    old, new = map(read, options.tables)
    old = {key: old[key] for key in new}
    count = Counter(file for file, *_ in old)
    before = Counter(key[0] for key in old if old[key])
    after = Counter(key[0] for key in new if new[key])
    print("| file | mutants | old | new |\n|---|---|---|---|")
    for file in sorted(count):
        print(f"| {file} | {count[file]} | {before[file]} | {after[file]} |")
    lost = [key for key in old if old[key] and not new[key]]
    for title, keys in (("lost", lost), ("won", [k for k in old if new[k] and not old[k]])):
        for key in keys:
            print(f"{title}: {':'.join(key)}: {old[key] or new[key]}")
    return int(bool(lost))


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.epilog = "other options: pytest's"
    runs.add_argument("--seed", type=int, default=1)
    runs.add_argument("--count", type=int, default=60)
    runs.add_argument("--of", nargs="+", default=["."], help="below python/sglang/srt")
    runs.add_argument("--tests", nargs="+", required=True, help="files and folders, as for pytest")
    runs.add_argument("--limit", type=float, default=120.0, help="seconds a mutant")
    runs.add_argument("--matrix", action="store_true", help="name all tests that fail")
    runs.add_argument("--again", metavar="TABLE", help="only mutants that this table killed")
    runs.add_argument("--out", required=True)
    runs.set_defaults(call=run)
    compares = commands.add_parser("compare")
    compares.add_argument("tables", nargs=2)
    compares.set_defaults(call=compare)
    options, others = parser.parse_known_args()
    options.others = others
    return int(options.call(options))


if __name__ == "__main__":
    sys.exit(main())
