"""Head slices between ranks of unequal numbers over real NIXL; prints one line for each scenario.

Run by ``test_nixl.py``. One agent a side has the pools of all its ranks registered.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("UCX_TLS", "tcp,self")
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np  # noqa: E402
from nixl._api import nixl_agent, nixl_agent_config  # noqa: E402

from component.nixl.pair import until  # noqa: E402
from component.pools.memory import (  # noqa: E402
    HEAD_DIM,
    RANK_LAYOUTS,
    assert_arrived,
    rank_pools,
    scattered,
    snapshot,
)
from sglang.srt.disaggregation.delta.heads import (  # noqa: E402
    plan_heads,
    slice_descriptors,
    sources_of,
)

HEAD_BYTES = HEAD_DIM * 4
PROMPT, PREFIX = 11, 4
"""Pages of a prompt, and those of them that decode holds."""


def agent_of(name: str, pools: list[Any]) -> Any:
    """An agent that may read and write the pools."""
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    for pool in pools:
        pointers, lengths, _ = pool.get_contiguous_buf_infos()
        rows = [(pointer, size, 0, "") for pointer, size in zip(pointers, lengths, strict=True)]
        agent.register_memory(rows, "VRAM")
    return agent


def table(addresses: np.ndarray, length: int) -> np.ndarray:
    """NIXL's rows: address, bytes, device."""
    rows = np.zeros((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1] = addresses, length
    return rows


def run(prefill_size: int, decode_size: int, heads: int, page: int) -> None:
    """Every prefill rank sends its slice to every decode rank that SGLang connects it to."""
    prefill = rank_pools(prefill_size, heads, page, seed=1)
    wanted = rank_pools(decode_size, heads, page, seed=1)
    decode = rank_pools(decode_size, heads, page, seed=2)
    ours, theirs = agent_of("prefill", prefill), agent_of("decode", decode)
    ours.add_remote_agent(theirs.get_agent_metadata())
    source, target = (np.array(pages[PREFIX:], np.int32) for pages in scattered(3, PROMPT))
    for rank, pool in enumerate(decode):
        before = snapshot(pool)
        target_bases, _, target_lens = pool.get_contiguous_buf_infos()
        for sender in sources_of(rank, prefill_size, decode_size):
            source_bases, _, source_lens = prefill[sender].get_contiguous_buf_infos()
            sources, targets, length = slice_descriptors(
                source_bases,
                target_bases,
                source,
                target,
                page=page,
                source_item_len=source_lens[0],
                destination_item_len=target_lens[0],
                head_bytes=HEAD_BYTES,
                plan=plan_heads(sender, prefill_size, rank, decode_size, heads),
            )
            if not length:
                continue
            handle = ours.initialize_xfer(
                "WRITE",
                ours.get_xfer_descs(table(sources, length), "VRAM"),
                ours.get_xfer_descs(table(targets, length), "VRAM"),
                "decode",
                b"",
            )
            assert ours.transfer(handle) != "ERR"
            until(lambda handle=handle: ours.check_xfer_state(handle) == "DONE", "transfer")
        assert_arrived(before, pool, wanted[rank], source.tolist(), target.tolist())


def main() -> None:
    """Run every scenario, whatever becomes of the others."""
    for layout in RANK_LAYOUTS:
        for page in (1, 16):
            name = "ranks_{}_{}_heads_{}".format(*layout) + f"_{page}"
            try:
                run(*layout, page)
                print("PASSED", name, flush=True)
            except Exception:
                print("FAILED", name, traceback.format_exc(), flush=True)


if __name__ == "__main__":
    main()
    # NIXL crashes an interpreter without a GPU driver at exit, after all work is done.
    os._exit(0)
