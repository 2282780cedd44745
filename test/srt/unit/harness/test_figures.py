"""The figures of README.md are those of the committed results."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from benchmark import figures

BYTES_PER_TOKEN = 256


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


def test_two_turns_move_the_pages_that_were_measured() -> None:
    """Guards against a drawing that counts other pages than the servers do: over all turns of all
    sessions its counts are the bytes of each round."""
    summary = json.loads(figures.LOCAL.read_text())
    load = summary["load"]
    whole = sum(figures.pages(tokens) for tokens in figures.prompts(load))
    moved = {"PD, stock": whole, "PD, remote": whole - sum(figures.held(load))}
    for arm, pages in moved.items():
        for measured in summary["runs"][arm]["0"]:
            tokens = pages * figures.PAGE * load["talks"]
            assert measured["bytes_moved"] == tokens * BYTES_PER_TOKEN
