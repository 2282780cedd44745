"""Rooms of a backend between real KV pools; prints one line for each scenario.

Run by ``test_ranks.py``, whose tests document the scenarios.

python program.py BACKEND
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any

from component import programs
from component.pools.memory import (
    CASES,
    HEAD_DIM,
    POOLS,
    RANK_LAYOUTS,
    assert_arrived,
    fill,
    has_states,
    is_mla,
    kv_args,
    rank_pools,
    scattered,
    snapshot,
)
from component.transfer.pair import ADDRESS, DONE, pages
from sglang.srt.disaggregation.delta.nixl import descriptors
from sglang.srt.disaggregation.delta.pages import index_buffers, sources_of

PROMPT = 11
"""Pages of a prompt."""
PREFIX = 4
"""Pages of the prompt that decode holds."""
BACKEND = sys.argv[1]
Pair = importlib.import_module(f"component.{BACKEND}.pair").Pair
#: Page size -> NIXL call that builds the descriptors.
FORMS = {1: "initialize_xfer", 16: "make_prepped_xfer"}


class PoolPair(Pair):  # type: ignore[misc, valid-type]
    """A prefill and a decode rank with pools."""

    def __init__(
        self, prefill: Any, decode: Any, ranks: Any = ((0, 1), (0, 1)), **heads: int
    ) -> None:
        """``ranks``: prefill's and decode's, each as the rank and the number of ranks."""
        self._pools = {"prefill": (prefill, *ranks[0]), "decode": (decode, *ranks[1])}
        self._heads = heads
        super().__init__()

    def side(self, name: str, mode: Any) -> Any:
        side = super().side(name, mode)
        side.pool, rank, size = self._pools[name]
        manager = side.manager
        manager.kv_args.__dict__.update(kv_args(side.pool, **self._heads), engine_rank=rank)
        manager.is_mla_backend = is_mla(side.pool)
        manager.attn_tp_rank, manager.attn_tp_size = rank, size
        manager.start_delta(mode, manager.server_args)  # again, because the rank has changed
        manager.register_buffer_to_engine()
        return side

    def connect(self) -> None:
        super().connect()
        server = self.decode.manager.prefill_info_table[ADDRESS]
        server.attn_tp_size = self.prefill.manager.attn_tp_size

    def move(
        self, source: list[int], target: list[int], prefix: int, states: tuple[int, int] = (0, 0)
    ) -> int:
        """Transfer a room with ``prefix`` pages on decode, in two chunks if possible.

        Return the expected number of bytes. ``states``: slots of recurrent state, as in
        ``assert_arrived``.
        """
        kv_args_of_prefill = self.prefill.manager.kv_args
        sent, listed = None, None
        if has_states(self.decode.pool):
            sent, listed = (pages(slot) for slot in states)
        elif index_buffers(self.decode.pool) and prefix < PROMPT:
            sent, listed = pages(*source[prefix:]), pages(*target[prefix:])
        sender, receiver = self.ready_room(
            *target[prefix:],
            prefix=prefix * self.decode.pool.page_size,
            prompt=PROMPT,
            state=listed,
        )
        middle = (prefix + PROMPT) // 2
        if middle > prefix:
            sender.send(pages(*source[prefix:middle]))
        sender.send(pages(*source[middle:]), sent)
        assert self.finish(sender, receiver) == DONE
        sender.clear()
        receiver.clear()
        assert not self.leftovers(), self.leftovers()
        state_bytes = 0 if sent is None else len(sent) * sum(kv_args_of_prefill.state_item_lens)
        return (PROMPT - prefix) * self.page_bytes + state_bytes


def run(name: str, page: int) -> None:
    """Move a delta, a full hit and a whole prompt between two new servers with pools of one kind
    and different random bytes; with recurrent state, each also moves its prompt's state."""
    prefill, decode = POOLS[name](page), POOLS[name](page)
    fill(prefill, 0)
    fill(decode, 1)
    pair = PoolPair(prefill, decode)
    for seed, prefix in enumerate((PREFIX, PROMPT, 0)):
        source, target = scattered(seed, PROMPT)
        before, sent, states = snapshot(decode), pair.sent(), (3 + seed, 20 - seed)
        moved = pair.move(source, target, prefix, states)
        assert_arrived(before, decode, prefill, source[prefix:], target[prefix:], states)
        assert pair.sent() - sent == moved
    pair.close()


def run_ranks(
    prefill_size: int, decode_size: int, heads: int, page: int, v_dim: int = HEAD_DIM
) -> None:
    """Let every prefill rank send its slice to every decode rank that SGLang connects it to, even
    if another replica has sent the heads."""
    call = FORMS[page]
    descriptors.is_selected_faster = lambda *_: call == "make_prepped_xfer"
    prefill = rank_pools(prefill_size, heads, page, seed=1, v_dim=v_dim)
    wanted = rank_pools(decode_size, heads, page, seed=1, v_dim=v_dim)
    decode = rank_pools(decode_size, heads, page, seed=2, v_dim=v_dim)
    source, target = scattered(3, PROMPT)
    for rank, pool in enumerate(decode):
        before = snapshot(pool)
        for sender in sources_of(rank, prefill_size, decode_size):
            ranks = (sender, prefill_size), (rank, decode_size)
            pair = PoolPair(prefill[sender], pool, ranks, total_kv_head_num=heads)
            if BACKEND == "nixl":
                with pair.counted("initialize_xfer", "make_prepped_xfer") as calls:
                    pair.move(source, target, PREFIX)
                assert set(calls) <= {call}, calls
            else:
                pair.move(source, target, PREFIX)
            pair.close()
        assert_arrived(before, pool, wanted[rank], source[PREFIX:], target[PREFIX:])


if __name__ == "__main__":
    cases = {
        f"{prefill}_{decode}_heads_{heads}_{page}": (prefill, decode, heads, page)
        for prefill, decode, heads in RANK_LAYOUTS
        for page in FORMS
    }
    cases["short_values"] = (2, 1, 4, 16, HEAD_DIM // 2)
    programs.run_scenarios(
        {
            **{f"{name}_{page}": partial(run, name, page) for name, page in CASES},
            **{name: partial(run_ranks, *sizes) for name, sizes in cases.items()},
        }
    )
