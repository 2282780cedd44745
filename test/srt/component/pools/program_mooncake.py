"""KV pages between two real Mooncake engines and real KV pools; prints one line for each scenario.

Run by ``test_mooncake.py``, whose tests say what each scenario guards against.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("MC_FORCE_TCP", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np  # noqa: E402

from component.pools.memory import (  # noqa: E402
    HEAD_DIM,
    POOLS,
    RANK_LAYOUTS,
    Pages,
    assert_arrived,
    fill,
    is_mla,
    kv_args,
    rank_pools,
    scattered,
    snapshot,
)
from sglang.srt.disaggregation.delta.pages import sources_of  # noqa: E402
from sglang.srt.disaggregation.mooncake import conn  # noqa: E402
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (  # noqa: E402
    MooncakeTransferEngine,
)

ENGINES = {side: MooncakeTransferEngine("127.0.0.1") for side in ("prefill", "decode")}
EXECUTOR = ThreadPoolExecutor(4)
PROMPT, PREFIX = 11, 4
"""Pages of a prompt, and those of them that decode holds."""


def manager(pool: Any, rank: int = 0, ranks: int = 1, **changes: Any) -> Any:
    """A prefill rank's manager, of whichever class serves it now, with its pool registered."""
    found = conn.MooncakeKVManager.__new__(conn.MooncakeKVManager)
    found.engine = ENGINES["prefill"]
    found.kv_args = SimpleNamespace(
        **kv_args(pool, **changes),
        aux_data_ptrs=[],
        aux_data_lens=[],
        state_data_ptrs=[],
        state_data_lens=[],
        engine_rank=rank,
        pp_rank=0,
        prefill_start_layer=0,
    )
    found.attn_tp_size = ranks
    found.attn_tp_rank = rank
    found.is_mla_backend = is_mla(pool)
    found.enable_custom_mem_pool = False
    found.register_buffer_to_engine()
    return found


def registered_by_decode(pool: Any) -> list[int]:
    """Make a decode pool a target; returns its buffers' addresses."""
    pointers, lengths, _ = pool.get_contiguous_buf_infos()
    ENGINES["decode"].batch_register(pointers, lengths)
    return list(pointers)


@contextmanager
def released(prefill: list[Any], decode: list[Any]) -> Iterator[None]:
    """Forget the pools at the end: the next ones may get their memory."""
    try:
        yield
    finally:
        for side, pools in (("prefill", prefill), ("decode", decode)):
            for pool in pools:
                ENGINES[side].batch_deregister(pool.get_contiguous_buf_infos()[0])


def indices(pages: Pages) -> np.ndarray:
    """A page list as SGLang keeps it."""
    return np.array(pages, dtype=np.int32)


def equal_ranks(name: str, page: int) -> None:
    """A delta in two chunks, then a whole prompt, then nothing, between pools of one kind."""
    prefill, decode = POOLS[name](page), POOLS[name](page)
    for seed, pool in enumerate((prefill, decode)):
        fill(pool, seed)
    session = ENGINES["decode"].session_id
    with released([prefill], [decode]):
        sender = manager(prefill)
        addresses = registered_by_decode(decode)
        for seed, prefix in enumerate((PREFIX, 0, PROMPT)):
            source, target = (pages[prefix:] for pages in scattered(seed, PROMPT))
            before = snapshot(decode)
            for part in (slice(0, 3), slice(3, None)):
                if source[part]:
                    ours, theirs = indices(source[part]), indices(target[part])
                    assert sender.send_kvcache(session, ours, addresses, theirs, EXECUTOR) == 0
            assert_arrived(before, decode, prefill, source, target)


def unequal_ranks(
    prefill_size: int, decode_size: int, heads: int, page: int, v_dim: int = HEAD_DIM
) -> None:
    """Every prefill rank sends its slice to every decode rank that SGLang connects it to."""
    prefill = rank_pools(prefill_size, heads, page, seed=1, v_dim=v_dim)
    wanted = rank_pools(decode_size, heads, page, seed=1, v_dim=v_dim)
    decode = rank_pools(decode_size, heads, page, seed=2, v_dim=v_dim)
    source, target = (pages[PREFIX:] for pages in scattered(3, PROMPT))
    with released(prefill, decode):
        senders = [
            manager(pool, rank, prefill_size, total_kv_head_num=heads)
            for rank, pool in enumerate(prefill)
        ]
        for rank, pool in enumerate(decode):
            addresses = registered_by_decode(pool)
            item_len = pool.get_contiguous_buf_infos()[2][0]
            before = snapshot(pool)
            for sender in sources_of(rank, prefill_size, decode_size):
                status = senders[sender].send_kvcache_slice(
                    ENGINES["decode"].session_id, indices(source), addresses, indices(target),
                    rank, decode_size, item_len, EXECUTOR,
                )  # fmt: skip
                assert status == 0
            assert_arrived(before, pool, wanted[rank], source, target)


SCENARIOS: dict[str, Callable[[], None]] = {
    f"{name}_{page}": partial(equal_ranks, name, page) for name in POOLS for page in (1, 16)
}
SCENARIOS |= {
    f"ranks_{prefill}_{decode}_heads_{heads}_{page}": partial(
        unequal_ranks, prefill, decode, heads, page
    )
    for prefill, decode, heads in RANK_LAYOUTS
    for page in (1, 16)
}
SCENARIOS["ranks_short_values"] = partial(unequal_ranks, 2, 1, 4, 16, HEAD_DIM // 2)


def main() -> None:
    """Run every scenario, whatever becomes of the others."""
    for name, scenario in SCENARIOS.items():
        try:
            scenario()
            print("PASSED", name, flush=True)
        except Exception:
            print("FAILED", name, traceback.format_exc(), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the engines' threads need not end
