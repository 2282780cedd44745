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

os.environ.setdefault("UCX_TLS", "tcp,self")
sys.path.insert(0, str(Path(__file__).parents[2]))

from component.nixl.pair import Pair, Side  # noqa: E402
from component.pools.memory import (  # noqa: E402
    POOLS,
    assert_arrived,
    fill,
    is_mla,
    kv_args,
    scattered,
    snapshot,
)
from component.transfer.pair import DONE, pages  # noqa: E402

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
        self.page, self._kind = page, name
        super().__init__()

    def side(self, name: str, mode: Any) -> PoolSide:
        pool = POOLS[self._kind](self.page)
        fill(pool, ("prefill", "decode").index(name))
        return PoolSide(name, mode, pool)

    def move(self, seed: int, prefix: int) -> None:
        """A room whose decode server holds ``prefix`` pages; in two chunks where there are two."""
        source, target = scattered(seed, PROMPT)
        before, sent = snapshot(self.decode.pool), self.sent()
        sender, receiver = self.ready_room(
            *target[prefix:], prefix=prefix * self.page, prompt=PROMPT
        )
        middle = (prefix + PROMPT) // 2
        if middle > prefix:
            sender.send(pages(*source[prefix:middle]))
        sender.send(pages(*source[middle:]))
        assert self.finish(sender, receiver) == DONE
        assert_arrived(
            before, self.decode.pool, self.prefill.pool, source[prefix:], target[prefix:]
        )
        page_bytes = sum(self.decode.manager.kv_args.kv_item_lens)
        assert self.sent() - sent == (PROMPT - prefix) * page_bytes
        sender.clear()
        receiver.clear()
        assert not self.leftovers(), self.leftovers()


def run(name: str, page: int) -> None:
    """A delta, a full hit and a whole prompt between two new servers."""
    pair = PoolPair(name, page)
    for seed, prefix in enumerate((PREFIX, PROMPT, 0)):
        pair.move(seed, prefix)
    pair.close()


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
