"""Delta rooms and head slices over real NIXL agents, between SGLang's own pools."""

from __future__ import annotations

import pytest

from component import programs
from component.pools.memory import POOLS, RANK_LAYOUTS


@pytest.fixture(scope="module")
def rooms() -> str:
    """What the program of equal ranks printed."""
    return programs.run(__file__, "program_nixl.py")


@pytest.fixture(scope="module")
def slices() -> str:
    """What the program of unequal ranks printed."""
    return programs.run(__file__, "program_nixl_ranks.py")


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("pool", POOLS)
def test_a_room_moves_its_pages_byte_for_byte(rooms: str, pool: str, page: int) -> None:
    """Guards against pools that are not keys and values of one shape: latent buffers, bytes stored
    for fp8, values shorter than keys. A delta, a full hit and a whole prompt, scattered, in chunks;
    no byte outside the announced pages may change, and the bytes counted are those moved."""
    programs.passed(rooms, f"{pool}_{page}")


@pytest.mark.hazard("unequal-tensor-parallelism")
@pytest.mark.parametrize("form", ["ranges", "prepared"])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("prefill", "decode", "heads"), RANK_LAYOUTS)
def test_unequal_ranks_move_their_heads(
    slices: str, prefill: int, decode: int, heads: int, page: int, form: str
) -> None:
    """Guards against heads at another rank's place, in either form, against lists that NIXL does
    not prepare, against replicas missed or written over one another, and against a rank that sends
    nothing and says nothing: decode waits for every one."""
    programs.passed(slices, f"ranks_{prefill}_{decode}_heads_{heads}_{page}_{form}")


@pytest.mark.parametrize("form", ["ranges", "prepared"])
def test_slices_of_values_shorter_than_keys(slices: str, form: str) -> None:
    """Guards against values that are cut and placed by the length of keys."""
    programs.passed(slices, f"ranks_short_values_{form}")
