"""SGLang's classes that the package replaces, with the changed methods, for ``docs/upstream.md``.

Rows come from the replacement table, methods from the sources: those that a mixin, or a base class
of it, marks with ``override``. SGLang is not imported.
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
    """Return a row for each replaced class of a group."""
    rows = next(g.rows for g in GROUPS if g.name == group)
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
    """Return the methods of SGLang's class that a mixin replaces or wraps, those of bases last."""
    shared = next(g.rows for g in GROUPS if g.name == "delta")  # the backends' mixins build on it
    ours = {method for row in shared for method, marked in _methods(*_named(row)) if not marked}
    marked = (method for method, marked in _methods(module, name) if marked)
    return [m for m in dict.fromkeys(marked) if m == "__init__" or m not in ours]


def _named(row: Replacement) -> tuple[str, str]:
    module, _, name = row.mixin.partition(":")
    return module, name


def _methods(module: str, name: str) -> Iterator[tuple[str, bool]]:
    """Yield each method of one of our classes and its bases; True if it overrides one."""
    tree = _parsed(module)
    bodies = tree.body if tree else []
    class_def = next((n for n in bodies if isinstance(n, ast.ClassDef) and n.name == name), None)
    if class_def is None:
        return
    for method in class_def.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (
                method.name,
                any(ast.unparse(mark) == "override" for mark in method.decorator_list),
            )
    imported = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in bodies
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for base in class_def.bases:
        if isinstance(base, ast.Name):
            yield from _methods(*imported.get(base.id, (module, base.id)))


@cache
def _parsed(module: str) -> ast.Module | None:
    """Return the syntax tree of one of our modules, or None for any other module."""
    path: Path = _SOURCES / f"{module.replace('.', '/')}.py"
    return ast.parse(path.read_text()) if path.exists() else None
