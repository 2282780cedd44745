"""Rooms of a backend between real KV pools; prints one line for each scenario.

Run by ``test_rooms.py``, whose tests say what each scenario guards against.

python program_rooms.py BACKEND
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any

from component import programs
from component.pools.memory import (
    CASES,
    POOLS,
    assert_arrived,
    fill,
    is_mla,
    kv_args,
    scattered,
    snapshot,
)
from component.transfer.pair import DONE, pages
from sglang.srt.disaggregation.delta.sparse_index import index_buffers

PROMPT, PREFIX = 11, 4
"""Pages of a prompt, and those of them that decode holds."""
Pair = importlib.import_module(f"component.{sys.argv[1]}.pair").Pair


class PoolPair(Pair):  # type: ignore[misc, valid-type]
    """Two servers with pools of one kind, each full of other random bytes."""

    def __init__(self, name: str, page: int) -> None:
        self.page, self._kind = page, name
        super().__init__()

    def side(self, name: str, mode: Any) -> Any:
        side = super().side(name, mode)
        side.pool = POOLS[self._kind](self.page)
        fill(side.pool, ("prefill", "decode").index(name))
        side.manager.kv_args.__dict__.update(kv_args(side.pool))
        side.manager.is_mla_backend = is_mla(side.pool)
        side.manager.register_buffer_to_engine()
        return side

    def move(self, seed: int, prefix: int) -> None:
        """A room whose decode server holds ``prefix`` pages; in two chunks where there are two."""
        source, target = scattered(seed, PROMPT)
        before, sent = snapshot(self.decode.pool), self.sent()
        has_index = bool(index_buffers(self.decode.pool)) and prefix < PROMPT
        sender, receiver = self.ready_room(
            *target[prefix:], prefix=prefix * self.page, prompt=PROMPT, index=has_index
        )
        middle = (prefix + PROMPT) // 2
        if middle > prefix:
            sender.send(pages(*source[prefix:middle]))
        sender.send(pages(*source[middle:]), pages(*source[prefix:]) if has_index else None)
        assert self.finish(sender, receiver) == DONE
        assert_arrived(
            before, self.decode.pool, self.prefill.pool, source[prefix:], target[prefix:]
        )
        assert self.sent() - sent == (PROMPT - prefix) * self.page_bytes
        sender.clear()
        receiver.clear()
        assert not self.leftovers(), self.leftovers()


def run(name: str, page: int) -> None:
    """A delta, a full hit and a whole prompt between two new servers."""
    pair = PoolPair(name, page)
    for seed, prefix in enumerate((PREFIX, PROMPT, 0)):
        pair.move(seed, prefix)
    pair.close()


if __name__ == "__main__":
    programs.run_scenarios({f"{name}_{page}": partial(run, name, page) for name, page in CASES})
