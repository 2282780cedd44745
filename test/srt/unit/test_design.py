"""What the documents list, against what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: Whose docstring lists their modules.
PACKAGES = (
    "disaggregation/delta",
    *(f"disaggregation/delta/{name}" for name in ("prefill", "decode", "nixl", "mooncake")),
    "mem_cache/buffer_only",
)


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


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_its_modules(package: str) -> None:
    """Guards against a list of a package's modules that names some that are gone, or leaves some
    out."""
    folder = ROOT / "python/sglang/srt" / package
    text = (folder / "__init__.py").read_text()
    there = {path.stem for path in folder.iterdir() if not path.name.startswith("_")}
    assert there - set(re.findall(r"``(\w+)``", text)) == set()
    rows = re.findall(r"^(?:``\w+``(?:, |(?=\s)))+", text, re.MULTILINE)
    assert set(re.findall(r"\w+", " ".join(rows))) - there == set()
