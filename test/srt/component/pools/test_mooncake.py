"""Pages and head slices over real Mooncake engines, between SGLang's own pools."""

from __future__ import annotations

import pytest

from component import programs
from component.pools.memory import POOLS, RANK_LAYOUTS

pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")


@pytest.fixture(scope="module")
def output() -> str:
    """What the program printed."""
    return programs.run(__file__, "program_mooncake.py")


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("pool", POOLS)
def test_pages_move_byte_for_byte(output: str, pool: str, page: int) -> None:
    """Guards against pools that are not keys and values of one shape: latent buffers, bytes stored
    for fp8, values shorter than keys. The pages after a prefix, scattered, in two chunks; no byte
    outside them may change."""
    programs.passed(output, f"{pool}_{page}")


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("prefill", "decode", "heads"), RANK_LAYOUTS)
def test_unequal_ranks_move_their_heads(
    output: str, prefill: int, decode: int, heads: int, page: int
) -> None:
    """Guards against heads at another rank's place, and against replicas of fewer heads than ranks
    that get the heads of their neighbours (SGLang sends rank r of 4 head r % 2 of 2)."""
    programs.passed(output, f"ranks_{prefill}_{decode}_heads_{heads}_{page}")


def test_slices_of_values_shorter_than_keys(output: str) -> None:
    """Guards against values that are cut and placed by the length of keys."""
    programs.passed(output, "ranks_short_values")
