"""Delta rooms over real NIXL agents and Mooncake engines, between SGLang's own pools."""

from __future__ import annotations

import pytest

from component import programs
from component.pools.memory import CASES


@pytest.fixture(scope="module", params=["nixl", "mooncake"])
def printed(request: pytest.FixtureRequest) -> str:
    """What the program printed with this backend."""
    if request.param == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
    return programs.run(__file__, "program_rooms.py", request.param)


@pytest.mark.parametrize(("pool", "page"), CASES)
def test_a_room_moves_its_pages_byte_for_byte(printed: str, pool: str, page: int) -> None:
    """Guards against pools that are not keys and values of one shape: latent buffers, bytes stored
    for fp8, values shorter than keys, an index beside latent buffers. A delta, a full hit and a
    whole prompt, scattered, in chunks; no byte outside the announced pages may change, and the
    bytes counted are those of the KV moved."""
    programs.passed(printed, f"{pool}_{page}")
