"""Words that comments, docstrings and messages must not use."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unit.documents import sources
from unit.documents.pages import ROOT

#: Personal pronouns in place of a request, rank, server or caller; amounts without a number; and
#: verbs for which the field has a term: release, pass, check, again.
BANNED = re.compile(
    r"\b(nobody|somebody|anybody|everybody|whoever|so\s+many|so\s+much|anew|let\s+go"
    r"|hand(s|ed)?\s+on|looked\s+at)\b",
    re.IGNORECASE,
)


def banned(source: str) -> Iterator[tuple[int, str]]:
    """Yield the banned words of a Python file with their lines."""
    for first, text in sources.prose(source):
        for match in BANNED.finditer(text):
            yield first + text.count("\n", 0, match.start()), " ".join(match[0].split())


def test_banned_words_are_found() -> None:
    """Guards against a search that misses a kind of text, or reports names in the code."""
    word, line_break = "nobody", "\n"
    source = (
        f'"""First line.\n\nSo{line_break}many."""\n'
        f'{word} = ["{word}", f"{{1}} {word}"]\n'
        f"# looked{line_break}# at\n"
        f"pass  # {word}\n"
    )
    assert sorted(banned(source)) == [
        (3, " ".join(("So", "many"))),
        (5, word),
        (6, " ".join(("looked", "at"))),
        (8, word),
    ]


def test_no_text_uses_banned_words() -> None:
    """Guards against phrases that a maintainer must read twice: name the thing, the number or the
    field's verb instead."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sources.python_files()
        for line, word in sorted(banned(path.read_text()))
    ]
    assert not found, "\n".join(found)
