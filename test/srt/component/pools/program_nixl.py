"""Rooms over two real NIXL agents between real KV pools; prints one line for each scenario.

Run by ``test_nixl.py``, whose tests say what each scenario guards against.
"""

from __future__ import annotations

import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("UCX_TLS", "tcp,self")
sys.path.insert(0, str(Path(__file__).parents[2]))

from component.nixl import pair as nixl_pair  # noqa: E402
from component.nixl.pair import Pair, Side, pages  # noqa: E402
from component.pools.memory import (  # noqa: E402
    POOLS,
    assert_arrived,
    fill,
    is_mla,
    kv_args,
    scattered,
    snapshot,
)
from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402
from sglang.srt.disaggregation.delta.metrics import STATS  # noqa: E402

DONE = (KVPoll.Success, KVPoll.Success)
PROMPT, PREFIX = 11, 4
"""Pages of a prompt, and those of them that decode holds."""


class PoolSide(Side):
    """A server whose manager moves a real pool."""

    def __init__(self, name: str, mode: Any, pool: Any) -> None:
        super().__init__(name, mode)
        self.pool = pool
        self.manager.kv_args.__dict__.update(kv_args(pool))
        self.manager.is_mla_backend = is_mla(pool)
        self.manager.register_buffer_to_engine()


class PoolPair(Pair):
    """Two servers with pools of one kind, each full of other random bytes."""

    def __init__(self, name: str, page: int) -> None:
        pools = {side: POOLS[name](page) for side in ("prefill", "decode")}
        for seed, pool in enumerate(pools.values()):
            fill(pool, seed)
        build = lambda side, mode: PoolSide(side, mode, pools[side])  # noqa: E731
        with mock.patch.object(nixl_pair, "Side", build):
            super().__init__()
        self.page = page

    def move(self, seed: int, prefix: int) -> None:
        """A room whose decode server holds ``prefix`` pages; in two chunks where there are two."""
        sender, receiver = self.room()
        source, target = scattered(seed, PROMPT)
        before = snapshot(self.decode.pool)
        sent = STATS.totals["kv_transfer_sent_bytes"]
        receiver.announce(pages(*target[prefix:]), 5, prefix_len=prefix * self.page)
        self.announced(sender)
        sender.init(PROMPT, 3)
        middle = (prefix + PROMPT) // 2
        if middle > prefix:
            sender.send(pages(*source[prefix:middle]))
        sender.send(pages(*source[middle:]))
        assert self.finish(sender, receiver) == DONE
        assert_arrived(
            before, self.decode.pool, self.prefill.pool, source[prefix:], target[prefix:]
        )
        page_bytes = sum(self.decode.manager.kv_args.kv_item_lens)
        moved = STATS.totals["kv_transfer_sent_bytes"] - sent
        assert moved == (PROMPT - prefix) * page_bytes
        sender.clear()
        receiver.clear()
        assert not self.leftovers(), self.leftovers()


def run(name: str, page: int) -> None:
    """A delta, a full hit and a whole prompt between two new servers."""
    pair = PoolPair(name, page)
    for seed, prefix in enumerate((PREFIX, PROMPT, 0)):
        pair.move(seed, prefix)


SCENARIOS = {f"{name}_{page}": partial(run, name, page) for name in POOLS for page in (1, 16)}


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
    # NIXL crashes an interpreter without a GPU driver at exit, after all work is done.
    os._exit(0)
