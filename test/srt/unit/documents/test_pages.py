"""The pages, against each other and against the tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from sglang.srt.patchset import environment
from unit.documents import pages
from unit.documents.pages import ROOT

PAGES = pages.pages()


def name(path) -> str:
    return str(path.relative_to(ROOT))


def test_readme_is_short() -> None:
    """Guards against a first page that nobody reads to its end."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_the_numbers_of_readme_are_measured() -> None:
    """Guards against a result on the first page that no committed run shows: numbers with a unit
    stand in the part that ``python -m benchmark.tables`` writes, or are what a user needs."""
    text = (ROOT / "README.md").read_text()
    by_hand = re.sub(r"<!-- table:.*?<!-- end -->|```.*?```", "", text, flags=re.DOTALL)
    assert by_hand != text
    units = r"\b\d[\d.,]*\s?(?:ms|s|MB|GB|KB|x|times|requests/s|tokens/s|%)(?!\w)"
    assert re.findall(units, by_hand) == ["12 GB"]  # of disk


def test_the_index_lists_every_page() -> None:
    """Guards against a page that is found only by who knows of it."""
    index = ROOT / "docs" / "README.md"
    listed = {path for path, _ in pages.links(index)} | {index}
    assert [name(path) for path in PAGES if path not in listed] == []


def test_each_variable_is_described_on_one_page() -> None:
    """Guards against two descriptions of which one is out of date, and against a page of the docs
    that names a variable, and not where its meaning, default and bounds are."""
    homes: dict[str, list[Path]] = {group: [] for group in environment.GROUPS}
    for page in PAGES:
        for group in re.findall(r"<!-- table:variables-(\w+) -->", page.read_text()):
            homes[group].append(page)
    assert {group: len(found) for group, found in homes.items()} == dict.fromkeys(homes, 1)
    lost = []
    for page in PAGES:
        if not name(page).startswith(("docs/", "README", "CONTRIBUTING")):
            continue
        text, reached = page.read_text(), {page, *(path for path, _ in pages.links(page))}
        for each in environment.VARIABLES:
            (home,) = homes[each.group]
            if re.search(rf"\b{each.name}\b", text) and home not in reached:
                lost.append(f"{name(page)} has no link to {name(home)} for {each.name}")
    assert lost == []


@pytest.mark.parametrize(
    ("page", "heading"),
    [("design.md", "Where is it"), ("request.md", "Where to set a breakpoint")],
)
def test_where_is_it(page, heading) -> None:
    """Guards against a table of places that sends its reader to a file or a name that is gone.

    A row is ``| question | `path` `name`, ... |``: the names are defined in the file before them.
    """
    text = (ROOT / "docs" / page).read_text()
    found = re.search(rf"## {heading}\n(.*?)(?:\n## |\Z)", text, re.DOTALL)
    assert found
    rows = [line for line in found[1].splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 6
    missing = []
    for row in rows:
        source, places = "", 0
        for code in re.findall(r"`([^`]+)`", row.split("|")[2]):
            if " " in code:
                continue  # a command
            if "/" in code or code.endswith(".py"):
                path = ROOT / code
                if not path.exists():
                    missing.append(code)
                    continue
                source, places = (path.read_text() if path.is_file() else ""), places + 1
            else:
                defined = (rf"\b(def|class) {part}\b|^(    )?{part}\b" for part in code.split("."))
                if not all(re.search(pattern, source, re.MULTILINE) for pattern in defined):
                    missing.append(code)
        assert places, row
    assert missing == []


def test_every_promise_has_its_place() -> None:
    """Guards against a list of promises that sends its reader to a test that is gone."""
    rows = re.findall(
        r"^\| (?!promise|-)(.+) \| (.+) \|$", (ROOT / "docs/promises.md").read_text(), re.M
    )
    assert len(rows) > 50
    missing = []
    for _, place in rows:
        path, _, name = place.strip("`").partition("::")
        there = ROOT / "test/srt" / path
        if not there.exists() or (name and f"def {name}(" not in there.read_text()):
            missing.append(place)
    assert missing == []


_SRT = "python/sglang/srt"
#: Where the paths in pages begin, beside the page's own folder.
BELOW = (
    "",
    "python",
    _SRT,
    f"{_SRT}/disaggregation",
    f"{_SRT}/disaggregation/delta",
    f"{_SRT}/mem_cache",
    "test/srt",
    "test/srt/standin/cpu_standin",
)


def dead_links(page: Path) -> Iterator[str]:
    """To a file or a heading that was moved or renamed."""
    for path, anchor in pages.links(page):
        if not path.exists():
            yield f"{path}"
        elif anchor and anchor not in pages.anchors(path):
            yield f"{name(path)}#{anchor}"


def unknown_flags(page: Path) -> Iterator[str]:
    """In command lines, which a server would refuse."""
    for module, known in (
        ("sglang.launch_server", pages.server_flags()),
        ("sglang_router.launch_router", pages.router_flags()),
    ):
        for arguments in pages.commands(page.read_text(), module):
            yield from pages.flags(arguments) - known


def missing_files(page: Path) -> Iterator[str]:
    """Modules that were moved or merged."""
    folders = [page.parent, *(ROOT / below for below in BELOW)]
    for named in set(re.findall(r"(?<![\w/.])[\w/]+\.py\b(?!::)", page.read_text())):
        if not any((folder / named).exists() for folder in folders):
            yield named


@cache
def known_variables() -> set[str]:
    """Those that some source reads."""
    theirs = pages.SITE_PACKAGES / "sglang/srt"
    folders = [ROOT / "python", theirs / "disaggregation", theirs / "utils"]
    sources = [*theirs.glob("*.py"), *(path for each in folders for path in each.rglob("*.py"))]
    return set(re.findall(r"SGLANG_\w+", "".join(path.read_text() for path in sources)))


def unknown_variables(page: Path) -> Iterator[str]:
    """Which an operator would set in vain. Other pages tell of those of other releases, too."""
    if page.parent.name == "operations":
        yield from set(re.findall(r"\bSGLANG_\w+[A-Z0-9]\b", page.read_text())) - known_variables()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_names_exists(page: Path) -> None:
    """Guards against a page that sends its reader to what is gone, or has a command refused."""
    gone = [*dead_links(page), *unknown_flags(page), *missing_files(page)]
    assert [*gone, *unknown_variables(page)] == []
