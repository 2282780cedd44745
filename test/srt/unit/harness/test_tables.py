"""The tables of the READMEs are those of the committed results."""

from __future__ import annotations

import pytest

from benchmark import tables
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


def run(requests_per_s: float) -> dict:
    return {"summary": {"requests_per_s": requests_per_s}}


def test_each_gain_has_its_cause() -> None:
    """Guards against a sentence that gives the flag what the progress thread is worth."""
    two = {"stock": run(1.0), "flag": run(3.0)}
    assert "no arm without the flag" in tables.attribution(two)
    three = {**two, "patched": run(2.0)}
    assert "gives 2.00 times" in tables.attribution(three)
    assert "flag 1.50 times that" in tables.attribution(three)
    four = {**three, "flag, spinning": run(1.2)}
    assert "accounts for 2.50 times" in tables.attribution(four)
    assert "the flag gives 1.20 times" in tables.attribution(four)


def test_rows_without_results_are_left_out() -> None:
    """Guards against an empty cell that is read as a zero."""
    assert tables.markdown(["", "a"], [["x", "1"], ["y", ""]]).count("\n") == 3
