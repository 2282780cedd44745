"""Pages through NIXL's storage plugin POSIX, with a real agent."""

from __future__ import annotations

import pytest

from component import programs
from component.buffer_only.host_pools import KINDS, LAYOUTS

pytest.importorskip("nixl", reason="needs NIXL")


@pytest.fixture(scope="module")
def output() -> str:
    """What the program printed."""
    return programs.run(__file__, "program_nixl.py")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back(output: str, kind: str, layout: str) -> None:
    """Guards against parts that are forgotten, a missing page that fails its whole batch, hits
    counted by key and not by page, and files that stay open until no more can be opened."""
    programs.passed(output, f"pages_{kind}_{layout}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_of_a_stock_server_are_found(output: str, kind: str, layout: str) -> None:
    """Guards against file names or contents other than SGLang's own."""
    programs.passed(output, f"stock_{kind}_{layout}")


def test_a_file_cut_short_is_written_again(output: str) -> None:
    """Guards against a file whose writer died: found for ever, and read by nobody."""
    programs.passed(output, "cut_short")


def test_a_file_that_is_removed_while_it_is_read(output: str) -> None:
    """Guards against what the stage held before, taken for a page: of another request, as a rule.
    NIXL 1.0 says of a read from an empty file that it is done."""
    programs.passed(output, "removed")


def test_a_file_system_that_is_full(output: str) -> None:
    """Guards against a page that counts as stored where only a part of it fitted. NIXL 1.0 says of
    such a write that it is done."""
    programs.passed(output, "full")


def test_a_transfer_that_fails(output: str) -> None:
    """Guards against handles that pile up in NIXL 1.5, which raises."""
    programs.passed(output, "refused")
