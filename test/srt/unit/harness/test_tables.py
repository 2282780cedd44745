"""The tables of the READMEs show the committed results."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from benchmark import tables
from benchmark.agentic.studies import cli
from benchmark.agentic.studies.spec import Claim
from benchmark.harness.models import REPOSITORY
from unit.agentic_studies.test_numbers import cells, run


@pytest.mark.parametrize("path", tables.FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_tables_are_those_of_the_results(path) -> None:
    """Guards against a number in a README without a committed run, or a run that is not shown.

    Run ``python -m benchmark.tables`` after a benchmark.
    """
    assert tables.render(path.read_text(), path.parent) == path.read_text()


def test_every_table_is_shown_somewhere() -> None:
    """Guards against results that are measured and not shown."""
    shown = "".join(path.read_text() for path in tables.FILES)
    assert all(f"<!-- table:{name} -->" in shown for name in tables.TABLES)


#: The path of a result as a README names it, from its own folder; may contain a *.
RESULT = re.compile(r"[\w./-]*\bresults[\w-]*/[\w./*-]*\w")
COMMIT = re.compile(r"(?<![\w/.-])[0-9a-f]{7,10}(?![\w/.-])")
IMAGE = re.compile(r"^!\[[^]]*\]\(([\w.-]+)\)", re.MULTILINE)


def tracked(pattern: str) -> set[Path]:
    """Return the existing files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", pattern], cwd=REPOSITORY, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("no git repository")
    return {path for name in listed.stdout.split() if (path := REPOSITORY / name).exists()}


def shown(results: set[Path], monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Return the results that a table or a README uses; for a page, also its images and data."""
    read: set[Path] = set()
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self: read.add(self) or read_text(self))
    for table in tables.TABLES.values():
        table()
    for page in tracked("*.md") - results:
        for name in RESULT.findall(page.read_text()):
            read.update(path.resolve() for path in page.parent.glob(name))
    read &= results
    for page in [path for path in read if path.suffix == ".md"]:
        read.add(page.parent / "summary.json")
        read.update(page.parent / image for image in IMAGE.findall(page.read_text()))
    return read


def test_all_results_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against outdated results: ``git rm`` them, or name them in their benchmark's
    README."""
    results = {path for path in tracked("benchmark") if "/results" in str(path.parent)}
    unshown = results - shown(results, monkeypatch)
    assert {str(path.relative_to(REPOSITORY)) for path in unshown} == set()


def test_commits_on_pages_are_in_the_history() -> None:
    """Guards against results of a commit that is not in the history, such as one of a deleted
    branch."""
    query = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(query, cwd=REPOSITORY, capture_output=True, text=True).stdout != "false\n":
        pytest.skip("no history")
    pages = "".join(page.read_text() for page in tracked("*.md"))
    commits = {
        commit for commit in COMMIT.findall(pages) if not commit.isdigit() and not commit.isalpha()
    }
    checked = subprocess.run(
        ["git", "cat-file", "--batch-check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        input="\n".join(sorted(commits)),
    )
    assert [line for line in checked.stdout.splitlines() if line.endswith("missing")] == []


def test_a_study_is_shown_from_its_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the pages that a measured study is shown on: they are written from its summary
    alone."""
    result = run(cells("aggregated", 1.0), cells("pd-radix", 0.8))
    claim_fields = {"arm": "pd-radix", "over": "aggregated", "of": "e2e", "at": 4}
    claim = Claim("b is faster", **claim_fields, at_most=0.9, theirs="a tenth")
    result.study = msgspec.structs.replace(result.study, claims=(claim,))
    cli.write(result, tmp_path / "worth", cli.Console(quiet=True))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    text = tables.study("worth")
    assert text.startswith("At 4 sessions at once, **pd-radix is best**")
    shown = tables.render("<!-- table:study-worth -->\n<!-- end -->", tmp_path.parent)
    assert f"![A title]({tmp_path.name}/worth/load.svg)" in shown and "| 4 | pd-radix | 0 |" in text
    claims = tables.claims()
    assert (
        "| worth | b is faster | 4 | a tenth; at most 0.9 | 0.8" in claims
        and "| agrees |" in claims
    )
