"""Pages through a real Mooncake master and store on loopback, and what happens when they fail."""

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
    """What the program printed."""
    return programs.run(__file__, "program_mooncake.py")


@pytest.mark.parametrize(("kind", "layout", "page"), THROUGH_MOONCAKE)
def test_another_server_reads_what_one_wrote(
    output: str, kind: str, layout: str, page: int
) -> None:
    """Guards against host tensors that are not registered (NSA's index), against parts that change
    places, and against a missing page that moves the others."""
    programs.passed(output, f"pages_{kind}_{layout}_{page}")


def test_the_server_that_has_the_pages_hangs(output: str) -> None:
    """Guards against pages that are handed out again while a read may still write into them: this
    one does, when the other server goes on."""
    programs.passed(output, "holder_hangs")


def test_a_store_that_is_full(output: str) -> None:
    """Guards against a full store that costs more than hits, and against losing first the prefixes
    that are always on the device: a look-up is what keeps them (``touch``)."""
    programs.passed(output, "full")
