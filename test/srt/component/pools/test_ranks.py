"""SGLang's own KV pools over real NIXL agents and Mooncake engines: a room of each kind of pool,
and head slices between unequal numbers of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from component import programs
from component.pools.memory import CASES, RANK_LAYOUTS
from component.transfer.bare import without_engine
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.disaggregation.delta.pages import RECURRENT_TYPE, sources_of


@pytest.fixture(scope="module", params=["nixl", "mooncake"])
def printed(request: pytest.FixtureRequest) -> str:
    """Output of the program for this backend."""
    if request.param == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
    return programs.run(__file__, "program.py", request.param)


@pytest.mark.hazard("unequal-tensor-parallelism")
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("prefill", "decode", "heads"), RANK_LAYOUTS)
def test_unequal_ranks_move_their_heads(
    printed: str, prefill: int, decode: int, heads: int, page: int
) -> None:
    """Guards against heads at another rank's place, with either form of NIXL's descriptors (one for
    each page size), against lists that NIXL does not prepare, against replicas that are missing or
    overwrite each other (SGLang sends head r % 2 of 2 to rank r of 4), and against a silent rank
    that sends nothing: decode waits for every rank."""
    programs.passed(printed, f"{prefill}_{decode}_heads_{heads}_{page}")


def test_slices_of_values_shorter_than_keys(printed: str) -> None:
    """Guards against values that are cut and placed by the length of keys."""
    programs.passed(printed, "short_values")


def manager_of(size: int, rank: int, **more: Any) -> Any:
    """Return SGLang's manager of one decode rank, without an engine."""
    args = SimpleNamespace(engine_rank=rank, state_type=more.pop("state_type", "none"))
    return without_engine(
        CommonKVManager,
        attn_tp_size=size,
        attn_cp_size=1,
        attn_cp_rank=0,
        pp_size=1,
        pp_rank=0,
        kv_args=args,
        is_mla_backend=False,
        enable_all_cp_ranks_for_transfer=False,
        **more,
    )


@pytest.mark.parametrize(
    ("prefill_size", "decode_size", "stages"), [(1, 2, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2)]
)
def test_recurrent_state_needs_ranks_of_equal_number(
    prefill_size: int, decode_size: int, stages: int
) -> None:
    """Guards against misplaced slices of states, since a rank's convolution has a part of the
    queries, of the keys and of the values; and against prefill's pipeline stages, each with the
    states of some layers only. Without the flag SGLang's own check applies."""
    info = SimpleNamespace(attn_tp_size=prefill_size, attn_cp_size=1, pp_size=stages)
    manager_of(decode_size, 0, state_type=RECURRENT_TYPE)._resolve_rank_mapping(info)
    with_flag = manager_of(decode_size, 0, state_type=RECURRENT_TYPE, servers=object())
    if (prefill_size, stages) == (decode_size, 1):
        with_flag._resolve_rank_mapping(info)
        return
    sizes = rf"\({prefill_size}, {stages}\) on prefill and \({decode_size}, 1\) on decode"
    with pytest.raises(RuntimeError, match=sizes):
        with_flag._resolve_rank_mapping(info)


@pytest.mark.parametrize("prefill_size", [1, 2, 4, 8])
@pytest.mark.parametrize("decode_size", [1, 2, 4, 8])
def test_sources_are_those_that_sglang_connects(prefill_size: int, decode_size: int) -> None:
    """Guards against a mapping that differs from SGLang's: a silent rank would hold heads that no
    other rank sends, or decode would not wait for a writing rank."""
    info = PrefillServerInfo(
        attn_tp_size=prefill_size,
        attn_cp_size=1,
        dp_size=1,
        pp_size=1,
        page_size=1,
        kv_cache_dtype=None,
        follow_bootstrap_room=False,
    )
    for rank in range(decode_size):
        manager_of(decode_size, rank)._resolve_rank_mapping(info)
        sources = sources_of(rank, prefill_size, decode_size)
        assert info.target_tp_ranks[: len(sources)] == list(sources)
        assert info.target_tp_rank == sources[0]
        assert info.required_prefill_response_num == len(sources)


@pytest.mark.parametrize(("pool", "page"), CASES)
def test_a_room_moves_its_pages_byte_for_byte(printed: str, pool: str, page: int) -> None:
    """Guards against pools that are not keys and values of one shape: latent buffers, fp8 stored as
    bytes, values shorter than keys, an index beside latent buffers. A delta, a full hit and a whole
    prompt, scattered, in chunks: no byte outside the announced pages may change, and the counted
    bytes are those of the moved KV."""
    programs.passed(printed, f"{pool}_{page}")
