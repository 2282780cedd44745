"""What of SGLang the package replaces, class by class, for ``docs/upstream.md``.

Rows come from the replacement table, methods from the sources: those that a mixin, or a class that
it is made of, marks with ``override``. Nothing of SGLang is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmark.harness.models import REPOSITORY
from benchmark.harness.report import markdown
from sglang.srt.patchset.table import GROUPS, Replacement

_SOURCES = REPOSITORY / "python"


def table(group: str) -> str:
    """A row for each replaced class of a group."""
    rows = next(each.rows for each in GROUPS if each.name == group)
    return markdown(
        ["class of SGLang", "mixin", "methods changed", "why"],
        [
            [
                f"`{row.target.removeprefix('sglang.srt.')}`",
                f"`{row.mixin.removeprefix('sglang.srt.')}`",
                ", ".join(f"`{name}`" for name in overrides(*_named(row))) or "adds only",
                row.why,
            ]
            for row in rows
        ],
    )


def overrides(module: str, name: str) -> list[str]:
    """Methods of SGLang's class that a mixin replaces or wraps, its bases' after its own."""
    shared = next(group.rows for group in GROUPS if group.name == "delta")  # under the backends'
    ours = {each for row in shared for each, marked in _methods(*_named(row)) if not marked}
    marked = (each for each, marked in _methods(module, name) if marked)
    return [each for each in dict.fromkeys(marked) if each == "__init__" or each not in ours]


def _named(row: Replacement) -> tuple[str, str]:
    module, _, name = row.mixin.partition(":")
    return module, name


def _methods(module: str, name: str) -> Iterator[tuple[str, bool]]:
    """Of a class of ours and its bases: each method, and whether it overrides one."""
    tree = _parsed(module)
    bodies = tree.body if tree else []
    found = next((n for n in bodies if isinstance(n, ast.ClassDef) and n.name == name), None)
    if found is None:
        return
    for each in found.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name, any(ast.unparse(mark) == "override" for mark in each.decorator_list)
    imported = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in bodies
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for base in found.bases:
        if isinstance(base, ast.Name):
            yield from _methods(*imported.get(base.id, (module, base.id)))


@cache
def _parsed(module: str) -> ast.Module | None:
    """The syntax tree of a module of ours; None of others' modules."""
    path: Path = _SOURCES / f"{module.replace('.', '/')}.py"
    return ast.parse(path.read_text()) if path.exists() else None
