"""Pages through a real Mooncake master and store on loopback, and their failures."""

from __future__ import annotations

import importlib.util

import pytest

from component import programs
from component.buffer_only.backends import THROUGH_MOONCAKE
from component.buffer_only.masters import PROGRAM

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None or not PROGRAM.exists(),
    reason="needs Mooncake's store and master",
)


@pytest.fixture(scope="module")
def output() -> str:
    """Output of the program."""
    return programs.run(__file__, "program_mooncake.py")


@pytest.mark.parametrize(("kind", "layout", "page"), THROUGH_MOONCAKE)
def test_a_server_reads_another_ones_pages(output: str, kind: str, layout: str, page: int) -> None:
    """Guards against host tensors that are not registered (NSA's index), against swapped parts, and
    against a missing page that misplaces the others."""
    programs.passed(output, f"pages_{kind}_{layout}_{page}")


def test_the_server_that_holds_the_pages_hangs(output: str) -> None:
    """Guards against pages that are reused while a late read may still write into them: this read
    does, when the other server continues."""
    programs.passed(output, "holder_hangs")


def test_a_store_that_is_full(output: str) -> None:
    """Guards against a full store that costs more than hits, and against the eviction of prefixes
    that are always on the device: look-ups keep them in the store (``touch``)."""
    programs.passed(output, "full")
