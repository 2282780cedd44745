"""Log lines and errors that the troubleshooting tables quote, against the texts in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from unit.documents import pages
from unit.documents.pages import ROOT

THEIRS = pages.SITE_PACKAGES / "sglang/srt"
#: Placeholders that the code fills in: ``...``, a number, or a single capital letter.
_FILLED_IN = re.compile(r"\s*\.\.\.\s*|\b[A-Z]\b|\b\d+\b")


def quoted(page: Path) -> list[str]:
    """Return the texts that the column "What you see" of the page's tables quotes."""
    quotes = []
    for table in re.findall(
        r"^\| What you see \|.*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE
    ):
        for row in table.splitlines():
            cell = row.split("|")[1]
            quotes += [text for text in re.findall(r"`([^`]+)`", cell) if " " in text]
            quotes += re.findall(r'"([^"]+ [^"]+)"', cell)
    return quotes


def texts(source: str) -> Iterator[str]:
    """Yield every text in a Python file, with a NUL for each filled-in value."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[\d.]*[a-z]", "\0", node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            yield "".join(map(str, parts))


@cache
def logged() -> str:
    """Return all texts of the package and of SGLang's parts that pages quote, one per line."""
    files = [*(ROOT / "python").rglob("*.py"), *(THEIRS / "disaggregation").rglob("*.py")]
    files += (THEIRS / "managers").glob("*.py")
    lines = (text.replace("\n", " ") for path in files for text in texts(path.read_text()))
    return "\n".join(lines)


def known(quote: str) -> bool:
    """True if one text has the parts of ``quote`` in order, or has the first parts followed by a
    placeholder whose value begins with the other parts."""
    parts = [part for part in _FILLED_IN.split(quote) if part]
    return in_order(parts) or any(
        in_order(parts[:split], then=r"\s*\0") and in_order(parts[split:], first=r"^\W*")
        for split in range(1, len(parts))
    )


def in_order(parts: Sequence[str], first: str = "", then: str = "") -> bool:
    """True if a text has all ``parts``, in order, between patterns."""
    pattern = first + ".*".join(map(re.escape, parts)) + then
    return re.search(pattern, logged(), re.MULTILINE) is not None


PAGES = [page for page in pages.pages() if quoted(page)]


def test_there_are_such_tables() -> None:
    """Guards against a page's table that the pattern above does not find."""
    assert sum(len(quoted(page)) for page in PAGES) > 15


@pytest.mark.parametrize(
    ("quote", "is_there"),
    [
        ("KV transfer of room ... failed: ...", True),
        ("KV transfer worker ... has not finished a step for", True),
        # All words are in one text, but not in this order or not in one line.
        ("failed: ... of room", False),
        ("KV transfer worker ... this decode server", False),
        ("KV transfer of room ... has not finished a step for ... KV transfer worker", False),
    ],
)
def test_known_quotes(quote: str, is_there: bool) -> None:
    """Guards against a line with all its words in the code, but in separate texts."""
    assert known(quote) is is_there


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_quoted_lines_are_in_the_code(page) -> None:
    """Guards against a text that an operator searches for in vain."""
    assert [quote for quote in quoted(page) if not known(quote)] == []
