"""The tables and figures of the READMEs are those of the committed results."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmark import figures, tables
from benchmark.harness.models import REPOSITORY


@pytest.mark.parametrize("path", tables.FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_tables_are_those_of_the_results(path) -> None:
    """Guards against a number in a README that no committed run shows, or a run that is not told.

    Run ``python -m benchmark.tables`` after a benchmark."""
    text = path.read_text()
    assert "<!-- table:" in text
    assert tables.render(text) == text


def test_every_table_is_shown_somewhere() -> None:
    """Guards against results that are measured and shown to nobody."""
    shown = "".join(path.read_text() for path in tables.FILES)
    assert all(f"<!-- table:{name} -->" in shown for name in tables.TABLES)


#: The path of a result as a README names it, from its own folder; perhaps with a * in it.
RESULT = re.compile(r"[\w./-]*\bresults[\w-]*/[\w./*-]*\w")
COMMIT = re.compile(r"(?<![\w/.-])[0-9a-f]{7,10}(?![\w/.-])")
IMAGE = re.compile(r"^!\[[^]]*\]\(([\w.-]+)\)", re.MULTILINE)


def tracked(what: str) -> set[Path]:
    """Files that git knows, and that are there."""
    listed = subprocess.run(
        ["git", "ls-files", what], cwd=REPOSITORY, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("no git repository")
    return {path for name in listed.stdout.split() if (path := REPOSITORY / name).exists()}


def shown(results: set[Path], monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The results that a table is made of, or a README names; with a page, its images and data."""
    read: set[Path] = set()
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self: read.add(self) or read_text(self))
    for table in tables.TABLES.values():
        table()
    for page in tracked("*.md") - results:
        for name in RESULT.findall(page.read_text()):
            read.update(page.parent.glob(name))
    read &= results
    for page in [path for path in results if path.with_suffix(".jsonl") in read]:
        read.add(page)
    for page in [path for path in read if path.suffix == ".md"]:
        read.update((page.with_suffix(".jsonl"), page.parent / "summary.json"))
        read.update(page.parent / image for image in IMAGE.findall(page.read_text()))
    return read


def test_no_results_that_nobody_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against results that stay when newer ones have taken their place: ``git rm`` them, or
    name them in the README of their benchmark."""
    results = {path for path in tracked("benchmark") if "/results" in str(path.parent)}
    left = results - shown(results, monkeypatch)
    assert {str(path.relative_to(REPOSITORY)) for path in left} == set()


def test_commits_on_pages_are_in_the_history() -> None:
    """Guards against results that nobody can go back to: their commit was on a branch."""
    asked = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(asked, cwd=REPOSITORY, capture_output=True, text=True).stdout != "false\n":
        pytest.skip("no history")
    pages = "".join(page.read_text() for page in tracked("*.md"))
    named = {each for each in COMMIT.findall(pages) if not each.isdigit() and not each.isalpha()}
    checked = subprocess.run(
        ["git", "cat-file", "--batch-check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        input="\n".join(sorted(named)),
    )
    assert [line for line in checked.stdout.splitlines() if line.endswith("missing")] == []


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_are_those_of_the_results(name) -> None:
    """Guards against a bar that no committed run shows. Run ``python -m benchmark.figures`` after a
    benchmark."""
    text = figures.FIGURES[name]()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert (figures.FOLDER / name).read_text() == text


def test_every_figure_is_shown_on_the_first_page() -> None:
    """Guards against a picture that nobody sees, and one that nobody writes anew."""
    page = (figures.REPOSITORY / "README.md").read_text()
    assert {path.name for path in figures.FOLDER.iterdir()} == set(figures.FIGURES)
    assert all(f"(docs/figures/{name})" in page for name in figures.FIGURES)
