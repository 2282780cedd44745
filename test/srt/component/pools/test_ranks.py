"""Head slices between ranks of unequal numbers, over real NIXL agents and Mooncake engines."""

from __future__ import annotations

from functools import cache

import pytest

from component import programs
from component.pools.memory import RANK_LAYOUTS

#: Backends, NIXL with both forms of its descriptors.
ARMS = ("nixl_ranges", "nixl_prepared", "mooncake")


@cache
def printed(backend: str) -> str:
    """What the program printed with this backend."""
    return programs.run(__file__, "program_ranks.py", backend)


@pytest.fixture(params=ARMS)
def arm(request: pytest.FixtureRequest) -> str:
    """One of ``ARMS``."""
    if request.param == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
    name: str = request.param
    return name


@pytest.mark.hazard("unequal-tensor-parallelism")
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("prefill", "decode", "heads"), RANK_LAYOUTS)
def test_unequal_ranks_move_their_heads(
    arm: str, prefill: int, decode: int, heads: int, page: int
) -> None:
    """Guards against heads at another rank's place, in either form, against lists that NIXL does
    not prepare, against replicas missed or written over one another (SGLang sends rank r of 4 head
    r % 2 of 2), and against a NIXL rank that sends nothing and says nothing: decode waits for every
    one."""
    said = printed(arm.partition("_")[0])
    programs.passed(said, f"{arm}_{prefill}_{decode}_heads_{heads}_{page}")


def test_slices_of_values_shorter_than_keys(arm: str) -> None:
    """Guards against values that are cut and placed by the length of keys."""
    programs.passed(printed(arm.partition("_")[0]), f"{arm}_short_values")
