"""Log lines and errors that the troubleshooting tables quote, against the texts in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from unit.documents import pages
from unit.documents.pages import ROOT

THEIRS = pages.SITE_PACKAGES / "sglang/srt"
#: What the code fills in: ``...``, a number, or one capital letter that stands for one.
_FILLED_IN = re.compile(r"\s*\.\.\.\s*|\b[A-Z]\b|\b\d+\b")


def quoted(page: Path) -> list[str]:
    """The first column of the tables that begin with "What you see", where it quotes a text."""
    found = []
    for table in re.findall(
        r"^\| What you see \|.*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE
    ):
        for row in table.splitlines():
            cell = row.split("|")[1]
            found += [text for text in re.findall(r"`([^`]+)`", cell) if " " in text]
            found += re.findall(r'"([^"]+ [^"]+)"', cell)
    return found


def texts(source: str) -> Iterator[str]:
    """Every text in a Python file, with a blank for each thing that is filled in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[\d.]*[a-z]", "\0", node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            yield "".join(map(str, parts))


@cache
def logged() -> str:
    """All texts of ours, and of the parts of SGLang that pages quote, a line each."""
    files = [*(ROOT / "python").rglob("*.py"), *(THEIRS / "disaggregation").rglob("*.py")]
    files += (THEIRS / "managers").glob("*.py")
    lines = (text.replace("\n", " ") for path in files for text in texts(path.read_text()))
    return "\n".join(lines)


def known(quote: str) -> bool:
    """Whether each part of ``quote`` is in some text: a line may be put together from several."""
    return all(part in logged() for part in _FILLED_IN.split(quote))


PAGES = [page for page in pages.pages() if quoted(page)]


def test_there_are_such_tables() -> None:
    """Guards against a page's table that the pattern above does not find."""
    assert sum(len(quoted(page)) for page in PAGES) > 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_quoted_lines_are_in_the_code(page) -> None:
    """Guards against a text that an operator searches for and never finds."""
    assert [quote for quote in quoted(page) if not known(quote)] == []
