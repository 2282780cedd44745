"""The table of docs/design.md that maps what goes wrong to the tests that guard against it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_that_the_table_names_exists() -> None:
    """Guards against a table that promises tests which were renamed or removed."""
    text = (ROOT / "docs" / "design.md").read_text()
    named = re.findall(r"`((?:unit|component|e2e)/[\w/]+\.py)::(test_\w+)`", text)
    assert len(named) > 50
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"^def {name}\(", (ROOT / "test/srt" / path).read_text(), re.MULTILINE)
    ]
    assert missing == []
