"""Head slices between ranks of unequal numbers over real NIXL; prints one line for each scenario.

Run by ``test_nixl.py``. Each prefill rank has an agent and knows its peers, as a process of its own
would; one agent of decode has the pools of all its ranks registered.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("UCX_TLS", "tcp,self")
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np  # noqa: E402
from nixl._api import nixl_agent, nixl_agent_config  # noqa: E402

from component.pools.memory import (  # noqa: E402
    HEAD_DIM,
    RANK_LAYOUTS,
    assert_arrived,
    kv_args,
    rank_pools,
    scattered,
    snapshot,
)
from component.transfer.pair import until  # noqa: E402
from sglang.srt.disaggregation.delta.metrics import AsyncTransferStats  # noqa: E402
from sglang.srt.disaggregation.delta.nixl.backend import NixlBackend  # noqa: E402
from sglang.srt.disaggregation.delta.nixl.descriptors import Costs, Form  # noqa: E402
from sglang.srt.disaggregation.delta.nixl.layout import (  # noqa: E402
    ChunkPayload,
    Destination,
    Layout,  # noqa: E402
)
from sglang.srt.disaggregation.delta.nixl.peers import Peers  # noqa: E402
from sglang.srt.disaggregation.delta.pages import sources_of  # noqa: E402
from sglang.srt.disaggregation.delta.prefill.transfer_backend import (
    Chunk,  # noqa: E402
    State,  # noqa: E402
)
from sglang.srt.disaggregation.nixl import conn  # noqa: E402

COSTS = {
    Form.RANGES: Costs(0.0, 0.0, 1.0, 1.0),
    Form.PREPARED: Costs(1.0, 1.0, 0.0, 0.0),
}
"""With these the form is always taken, where it can be."""
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


def count_forms(agent: Any, made: Counter[Form]) -> None:
    """Count in ``made`` the transfers that the agent makes in each form, from now on."""

    def counting(form: Form, call: Any, *arguments: Any) -> Any:
        made[form] += 1
        return call(*arguments)

    agent.initialize_xfer = partial(counting, Form.RANGES, agent.initialize_xfer)
    agent.make_prepped_xfer = partial(counting, Form.PREPARED, agent.make_prepped_xfer)


def manager(agent: Any, pool: Any, rank: int, ranks: int, heads: int) -> Any:
    """A prefill rank's manager, of the class that serves it."""
    found = conn.NixlKVManager.__new__(conn.NixlKVManager)
    found.__dict__.update(
        agent=agent,
        kv_args=SimpleNamespace(
            **kv_args(pool, total_kv_head_num=heads),
            engine_rank=rank,
            pp_rank=0,
            prefill_start_layer=0,
            gpu_id=0,
        ),
        is_mla_backend=False,
        attn_tp_size=ranks,
        attn_tp_rank=rank,
        attn_cp_size=1,
        attn_cp_rank=0,
        pp_size=1,
        pp_rank=0,
    )
    return found


def run(
    form: Form, prefill_size: int, decode_size: int, heads: int, page: int, v_dim: int = HEAD_DIM
) -> None:
    """Every prefill rank sends its slice to every decode rank that SGLang connects it to, and each
    of them says so, also where another replica has sent the heads."""
    prefill = rank_pools(prefill_size, heads, page, seed=1, v_dim=v_dim)
    wanted = rank_pools(decode_size, heads, page, seed=1, v_dim=v_dim)
    decode = rank_pools(decode_size, heads, page, seed=2, v_dim=v_dim)
    ours = [agent_of(f"prefill{rank}", [pool]) for rank, pool in enumerate(prefill)]
    theirs = agent_of("decode", decode)
    made: Counter[Form] = Counter()
    for agent in ours:
        count_forms(agent, made)
    peers = [Peers(agent, {}) for agent in ours]
    source, target = (np.array(pages[PREFIX:], np.int32) for pages in scattered(3, PROMPT))
    senders = [
        NixlBackend(
            ours[rank],
            peers[rank],
            Layout(manager(ours[rank], pool, rank, prefill_size, heads)),
            AsyncTransferStats(0),
            writer=rank,
            costs=COSTS[form],
        )
        for rank, pool in enumerate(prefill)
    ]
    for rank, pool in enumerate(decode):
        before = snapshot(pool)
        bases, _, item_lens = pool.get_contiguous_buf_infos()
        connected = sources_of(rank, prefill_size, decode_size)
        info = SimpleNamespace(
            agent_name="decode",
            agent_metadata=theirs.get_agent_metadata(),
            dst_kv_ptrs=bases,
            dst_kv_item_len=item_lens[0],
            decode_tp_size=decode_size,
            decode_tp_rank=rank,
            gpu_id=0,
        )
        to = Destination(target, (), 0, len(pool.k_buffer[0]) // page, None)
        chunk = Chunk(
            rank, ("decode",), ChunkPayload(0, source, None, (), {"decode": to}), False, 0.0, 0.0
        )
        for sender in connected:
            peers[sender].add(info)
            for posted in list(senders[sender].post(chunk, "decode")):
                done = partial(senders[sender].state, posted)
                until(lambda done=done: done() is State.DONE, "transfer")
                senders[sender].release(posted)
            senders[sender].complete(chunk)
            peers[sender].forget("decode")
        said: set[bytes] = set()

        def all_said(said: set[bytes] = said, wanted: int = 2 * len(connected)) -> bool:
            for texts in theirs.get_new_notifs().values():
                said.update(texts)
            return len(said) == wanted

        until(all_said, f"KV and metadata of each of {list(connected)}")
        assert_arrived(before, pool, wanted[rank], source.tolist(), target.tolist())
    assert set(made) == {form}, made


SCENARIOS = {
    f"ranks_{prefill}_{decode}_heads_{heads}_{page}_{form.value}": partial(
        run, form, prefill, decode, heads, page
    )
    for prefill, decode, heads in RANK_LAYOUTS
    for page in (1, 16)
    for form in Form
}
for form in Form:
    name = f"ranks_short_values_{form.value}"
    SCENARIOS[name] = partial(run, form, 2, 1, 4, 16, HEAD_DIM // 2)


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
