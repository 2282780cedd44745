"""Texts in the repository's Python files, for the tests in this folder."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from unit.documents.pages import ROOT

FOLDERS = ("python", "test", "benchmark", "scripts")


def python_files() -> list[Path]:
    """Return the Python files of the repository."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield all comments, docstrings and messages of a Python file, with their first lines.

    A string counts as a docstring or message if it contains a blank.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    yield from comments(source)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a Python file, with consecutive lines joined."""
    first, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        number = token.start[0]
        if number != first + len(lines):
            yield first, "\n".join(lines)
            first, lines = number, []
        lines.append(token.string.lstrip("#: "))
    yield first, "\n".join(lines)
