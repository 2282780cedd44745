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
    """Guards against a first page that is too long to be read to its end."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_the_numbers_of_readme_are_measured() -> None:
    """Guards against a result on the first page without a committed run: numbers with a unit belong
    in the part that ``python -m benchmark.tables`` writes, unless they are requirements."""
    text = (ROOT / "README.md").read_text()
    by_hand = re.sub(r"<!-- table:.*?<!-- end -->|```.*?```", "", text, flags=re.DOTALL)
    assert by_hand != text
    units = r"\b\d[\d.,]*\s?(?:ms|s|MB|GB|KB|x|times|requests/s|tokens/s|%)(?!\w)"
    assert re.findall(units, by_hand) == ["12 GB"]  # of disk


def test_the_index_lists_every_page() -> None:
    """Guards against a page without a link from the index."""
    index = ROOT / "docs" / "README.md"
    listed = {path for path, _ in pages.links(index)} | {index}
    assert [name(path) for path in PAGES if path not in listed] == []


def test_each_variable_is_described_on_one_page() -> None:
    """Guards against two descriptions of which one is out of date, and against a page that names a
    variable without a link to its meaning, default and bounds."""
    homes: dict[str, list[Path]] = {group: [] for group in environment.VARIABLE_GROUPS}
    for page in PAGES:
        for group in re.findall(r"<!-- table:variables-(\w+) -->", page.read_text()):
            homes[group].append(page)
    assert {group: len(pages_) for group, pages_ in homes.items()} == dict.fromkeys(homes, 1)
    unlinked = []
    for page in PAGES:
        if not name(page).startswith(("docs/", "README", "CONTRIBUTING")):
            continue
        text, reached = page.read_text(), {page, *(path for path, _ in pages.links(page))}
        for variable in environment.VARIABLES:
            (home,) = homes[variable.group]
            if re.search(rf"\b{variable.name}\b", text) and home not in reached:
                unlinked.append(f"{name(page)} has no link to {name(home)} for {variable.name}")
    assert unlinked == []


@pytest.mark.parametrize(
    ("page", "heading"),
    [("request.md", "Where is it"), ("request.md", "Where to set a breakpoint")],
)
def test_places_in_tables_exist(page, heading) -> None:
    """Guards against a table that sends its reader to a file or a name that no longer exists.

    A row is ``| question | `path` `name`, ... |``: the names are defined in the file before them.
    """
    text = (ROOT / "docs" / page).read_text()
    section = re.search(rf"## {heading}\n(.*?)(?:\n## |\Z)", text, re.DOTALL)
    assert section
    rows = [line for line in section[1].splitlines() if line.startswith("|")][2:]
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


def test_every_promise_names_an_existing_test() -> None:
    """Guards against a list of promises that sends its reader to a test that no longer exists."""
    text = (ROOT / "docs/promises.md").read_text()
    section = text.partition("\n## Promises\n")[2].partition("\n## Hazards\n")[0]
    rows = re.findall(r"^\| (?!promise|-)(.+) \| (.+) \|$", section, re.M)
    assert len(rows) > 50
    missing = []
    for _, place in rows:
        path, _, name = place.strip("`").partition("::")
        test_file = ROOT / "test/srt" / path
        if not test_file.exists() or (name and f"def {name}(" not in test_file.read_text()):
            missing.append(place)
    assert missing == []


_SRT = "python/sglang/srt"
#: Folders in which the paths of pages begin, besides the page's own folder.
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
    """Yield links to files or headings that do not exist."""
    for path, anchor in pages.links(page):
        if not path.exists():
            yield f"{path}"
        elif anchor and anchor not in pages.anchors(path):
            yield f"{name(path)}#{anchor}"


def unknown_flags(page: Path) -> Iterator[str]:
    """Yield flags in command lines that a server would refuse."""
    for module, known in (
        ("sglang.launch_server", pages.server_flags()),
        ("sglang_router.launch_router", pages.router_flags()),
    ):
        for arguments in pages.commands(page.read_text(), module):
            yield from pages.flags(arguments) - known


def missing_files(page: Path) -> Iterator[str]:
    """Yield names of modules that were moved or merged."""
    folders = [page.parent, *(ROOT / below for below in BELOW)]
    for file in set(re.findall(r"(?<![\w/.])[\w/]+\.py\b(?!::)", page.read_text())):
        if not any((folder / file).exists() for folder in folders):
            yield file


@cache
def known_variables() -> set[str]:
    """Return the variables that some source reads."""
    sglang_sources = pages.SITE_PACKAGES / "sglang/srt"
    folders = [ROOT / "python", sglang_sources / "disaggregation", sglang_sources / "utils"]
    sources = [
        *sglang_sources.glob("*.py"),
        *(path for folder in folders for path in folder.rglob("*.py")),
    ]
    return set(re.findall(r"SGLANG_\w+", "".join(path.read_text() for path in sources)))


def unknown_variables(page: Path) -> Iterator[str]:
    """Yield variables of operator pages that no source reads. Other pages may name other releases'
    variables."""
    if page.parent.name == "operations":
        yield from set(re.findall(r"\bSGLANG_\w+[A-Z0-9]\b", page.read_text())) - known_variables()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_on_a_page_exist(page: Path) -> None:
    """Guards against a page that sends its reader to missing files, or to refused commands."""
    problems = [*dead_links(page), *unknown_flags(page), *missing_files(page)]
    assert [*problems, *unknown_variables(page)] == []
