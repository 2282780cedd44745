"""Which prefill ranks serve a decode rank: ours beside SGLang's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.disaggregation.delta.pages import sources_of


@pytest.mark.parametrize("prefill_size", [1, 2, 4, 8])
@pytest.mark.parametrize("decode_size", [1, 2, 4, 8])
def test_sources_are_those_that_sglang_connects(prefill_size: int, decode_size: int) -> None:
    """Guards against a mapping of ours that differs from SGLang's: a rank that was told to send
    nothing would hold heads that nobody else sends, or decode would not wait for one that writes.
    """
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
        manager = SimpleNamespace(
            attn_tp_size=decode_size,
            attn_cp_size=1,
            attn_cp_rank=0,
            pp_size=1,
            pp_rank=0,
            kv_args=SimpleNamespace(engine_rank=rank),
            is_mla_backend=False,
            enable_all_cp_ranks_for_transfer=False,
        )
        CommonKVManager._resolve_rank_mapping(manager, info)
        sources = sources_of(rank, prefill_size, decode_size)
        assert info.target_tp_ranks[: len(sources)] == list(sources)
        assert info.target_tp_rank == sources[0]
        assert info.required_prefill_response_num == len(sources)
