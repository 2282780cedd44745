"""Head slices between ranks of unequal numbers over a real library; prints a line a scenario.

Run by ``test_ranks.py``, whose tests say what each scenario guards against.

python program_ranks.py BACKEND
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from component import programs
from component.pools.memory import (
    HEAD_DIM,
    RANK_LAYOUTS,
    assert_arrived,
    kv_args,
    rank_pools,
    scattered,
    snapshot,
)
from component.transfer.bare import without_engine
from component.transfer.pair import until
from sglang.srt.disaggregation.delta.nixl.agent import configured_agents
from sglang.srt.disaggregation.delta.nixl.backend import NixlBackend
from sglang.srt.disaggregation.delta.nixl.descriptors import ChunkPayload, Costs, Destination, Form
from sglang.srt.disaggregation.delta.nixl.layout import Layout
from sglang.srt.disaggregation.delta.nixl.peers import Peers
from sglang.srt.disaggregation.delta.observability import AsyncTransferStats
from sglang.srt.disaggregation.delta.pages import sources_of
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk, State

COSTS = {
    Form.RANGES: Costs(0.0, 0.0, 1.0, 1.0),
    Form.PREPARED: Costs(1.0, 1.0, 0.0, 0.0),
}
"""With these the form is always taken, where it can be."""
PROMPT, PREFIX = 11, 4
"""Pages of a prompt, and those of them that decode holds."""


def manager(kind: Any, pool: Any, rank: int, ranks: int, heads: int, **own: Any) -> Any:
    """The manager of a prefill rank, of the class ``kind``."""
    nothing = (
        "aux_data_ptrs",
        "aux_data_lens",
        "aux_item_lens",
        "state_data_ptrs",
        "state_data_lens",
    )
    args = SimpleNamespace(
        **kv_args(pool, total_kv_head_num=heads),
        **{name: [] for name in nothing},
        engine_rank=rank,
        pp_rank=0,
        prefill_start_layer=0,
        gpu_id=0,
    )
    return without_engine(kind, kv_args=args, attn_tp_size=ranks, attn_tp_rank=rank, **own)


@cache
def engines() -> dict[str, Any]:
    """Mooncake's, for all scenarios."""
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
        MooncakeTransferEngine,
    )

    return {side: MooncakeTransferEngine("127.0.0.1") for side in ("prefill", "decode")}


@cache
def agent_of(name: str) -> Any:
    """One of NIXL's, for all scenarios: of dozens, each slows the others down."""
    from nixl import _api

    with configured_agents():
        return _api.nixl_agent(name, _api.nixl_agent_config(backends=["UCX"]))


#: Pools whose memory stays registered with the agents.
_REGISTERED: list[Any] = []


class MooncakeRanks:
    """All ranks of prefill share an engine, as do those of decode."""

    def __init__(self, prefill: list[Any], decode: list[Any], heads: int) -> None:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

        own = {"engine": engines()["prefill"], "enable_custom_mem_pool": False}
        self._pools = {"prefill": prefill, "decode": decode}
        self._senders = [
            manager(MooncakeKVManager, pool, rank, len(prefill), heads, **own)
            for rank, pool in enumerate(prefill)
        ]
        for sender in self._senders:
            sender.register_buffer_to_engine()
        self._executor = ThreadPoolExecutor(4)

    def deliver(self, rank: int, connected: range, source: Any, target: Any) -> None:
        """Each prefill rank of ``connected`` sends its slice to one decode rank."""
        pool, engine = self._pools["decode"][rank], engines()["decode"]
        addresses, lengths, item_lens = pool.get_contiguous_buf_infos()
        engine.batch_register(addresses, lengths)
        for sender in connected:
            status = self._senders[sender].send_kvcache_slice(
                engine.session_id, source, list(addresses), target,
                rank, len(self._pools["decode"]), item_lens[0], self._executor,
            )  # fmt: skip
            assert status == 0

    def close(self) -> None:
        """Forget the pools: the next ones may get their memory."""
        for side, pools in self._pools.items():
            for pool in pools:
                engines()[side].batch_deregister(pool.get_contiguous_buf_infos()[0])


class NixlRanks:
    """Each prefill rank has an agent and knows its peers, as a process of its own would; one agent
    of decode has the pools of all its ranks registered."""

    def __init__(self, form: Form, prefill: list[Any], decode: list[Any], heads: int) -> None:
        from sglang.srt.disaggregation.nixl.conn import NixlKVManager

        self._form, self._pools = form, decode
        self._theirs = self._agent("decode", decode)
        self._made: Counter[Form] = Counter()
        self._peers, self._senders = [], []
        for rank, pool in enumerate(prefill):
            agent = self._agent(f"prefill{rank}", [pool])
            self._count_forms(agent)
            own = manager(NixlKVManager, pool, rank, len(prefill), heads, agent=agent)
            self._peers.append(Peers(agent, {}))
            self._senders.append(
                NixlBackend(
                    agent,
                    self._peers[rank],
                    Layout(own),
                    AsyncTransferStats(0),
                    writer=rank,
                    costs=COSTS[form],
                )
            )

    @staticmethod
    def _agent(name: str, pools: list[Any]) -> Any:
        """One that may read and write the pools."""
        agent = agent_of(name)
        for pool in pools:
            pointers, lengths, _ = pool.get_contiguous_buf_infos()
            rows = [(pointer, size, 0, "") for pointer, size in zip(pointers, lengths, strict=True)]
            agent.register_memory(rows, "VRAM")
        _REGISTERED.extend(pools)
        return agent

    def _count_forms(self, agent: Any) -> None:
        """Note the transfers that the agent makes in each form, from now on."""

        def counting(form: Form, call: Any, *arguments: Any) -> Any:
            self._made[form] += 1
            return call(agent, *arguments)

        kind = type(agent)
        agent.initialize_xfer = partial(counting, Form.RANGES, kind.initialize_xfer)
        agent.make_prepped_xfer = partial(counting, Form.PREPARED, kind.make_prepped_xfer)

    def deliver(self, rank: int, connected: range, source: Any, target: Any) -> None:
        """Each prefill rank of ``connected`` sends its slice to one decode rank, and says so."""
        pool = self._pools[rank]
        bases, _, item_lens = pool.get_contiguous_buf_infos()
        info = SimpleNamespace(
            agent_name="decode",
            agent_metadata=self._theirs.get_agent_metadata(),
            dst_kv_ptrs=bases,
            dst_kv_item_len=item_lens[0],
            decode_tp_size=len(self._pools),
            decode_tp_rank=rank,
            gpu_id=0,
        )
        pool_pages = len(pool.k_buffer[0]) // pool.page_size
        to = Destination(target, (), 0, pool_pages, None)
        payload = ChunkPayload(0, source, None, (), {"decode": to})
        chunk = Chunk(rank, ("decode",), payload, False, 0.0, 0.0)
        for sender in connected:
            self._send(sender, chunk, info)
        said: set[bytes] = set()

        def all_said() -> bool:
            for texts in self._theirs.get_new_notifs().values():
                said.update(texts)
            return len(said) == 2 * len(connected)

        until(all_said, f"KV and metadata of each of {list(connected)}")

    def _send(self, sender: int, chunk: Chunk, info: Any) -> None:
        backend = self._senders[sender]
        self._peers[sender].add(info)
        for posted in list(backend.post(chunk, "decode")):
            done = partial(backend.state, posted)
            until(lambda: done() is State.DONE, "transfer")  # noqa: B023
            backend.release(posted)
        backend.complete(chunk)
        self._peers[sender].forget("decode")

    def close(self) -> None:
        """The form that was asked for was taken for all."""
        assert set(self._made) == {self._form}, self._made


def run(
    connect: Callable[..., Any],
    prefill_size: int,
    decode_size: int,
    heads: int,
    page: int,
    v_dim: int = HEAD_DIM,
) -> None:
    """Every prefill rank sends its slice to every decode rank that SGLang connects it to, also
    where another replica has sent the heads."""
    prefill = rank_pools(prefill_size, heads, page, seed=1, v_dim=v_dim)
    wanted = rank_pools(decode_size, heads, page, seed=1, v_dim=v_dim)
    decode = rank_pools(decode_size, heads, page, seed=2, v_dim=v_dim)
    source, target = (np.array(pages[PREFIX:], np.int32) for pages in scattered(3, PROMPT))
    ranks = connect(prefill, decode, heads)
    for rank, pool in enumerate(decode):
        before = snapshot(pool)
        ranks.deliver(rank, sources_of(rank, prefill_size, decode_size), source, target)
        assert_arrived(before, pool, wanted[rank], source.tolist(), target.tolist())
    ranks.close()


def main() -> None:
    """Every layout of ranks, page size and form."""
    arms: dict[str, Any] = {"mooncake": MooncakeRanks}
    if sys.argv[1] == "nixl":
        arms = {f"nixl_{form.value}": partial(NixlRanks, form) for form in Form}
    cases = {
        f"{prefill}_{decode}_heads_{heads}_{page}": (prefill, decode, heads, page)
        for prefill, decode, heads in RANK_LAYOUTS
        for page in (1, 16)
    }
    cases["short_values"] = (2, 1, 4, 16, HEAD_DIM // 2)
    programs.run_scenarios(
        {
            f"{arm}_{case}": partial(run, connect, *sizes)
            for arm, connect in arms.items()
            for case, sizes in cases.items()
        }
    )


if __name__ == "__main__":
    main()
