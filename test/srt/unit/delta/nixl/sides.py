"""A prefill and a decode rank with memory of numpy, and what a chunk has to change in it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang.srt.disaggregation.delta.nixl.backend import NixlBackend
from sglang.srt.disaggregation.delta.nixl.descriptors import ChunkPayload, Destination
from sglang.srt.disaggregation.delta.nixl.layout import Layout
from sglang.srt.disaggregation.delta.nixl.peers import Peers
from sglang.srt.disaggregation.delta.observability import AsyncTransferStats
from sglang.srt.disaggregation.delta.pages import heads_of, sources_of
from sglang.srt.disaggregation.delta.prefill.transfer_backend import Chunk, State
from unit.delta.nixl.fakes import FakeAgent, Memory

PAGE, LAYERS = 4, 2
KEY_BYTES, VALUE_BYTES = 3, 2
METADATA, STATE = (8, 24, 3), (16, 40)
ROOM, WRITER = 4711, 3


class Side:
    """One rank: rank ``rank`` of ``size`` of a model with ``total`` KV heads."""

    def __init__(
        self,
        base: int,
        slots: int,
        rank: int = 0,
        size: int = 1,
        total: int = 2,
        is_mla: bool = False,
        state_type: str = "mamba",
    ) -> None:
        self.memory = Memory(base, seed=base % 1009)
        self.heads = range(1) if is_mla else heads_of(rank, size, total)
        self.rank, self.size, self.total = rank, size, total
        lens = [PAGE * len(self.heads) * KEY_BYTES] * LAYERS
        if not is_mla:
            lens += [PAGE * len(self.heads) * VALUE_BYTES] * LAYERS
        self.kv = [self.memory.allocate(slots, length) for length in lens]
        self.metadata = [self.memory.allocate(5, length) for length in METADATA]
        self.state = [self.memory.allocate(6, length) for length in STATE]
        self.slots = slots
        self.args = SimpleNamespace(
            kv_data_ptrs=[address for address, _ in self.kv],
            kv_data_lens=[view.nbytes for _, view in self.kv],
            kv_item_lens=lens,
            aux_data_ptrs=[address for address, _ in self.metadata],
            aux_data_lens=[view.nbytes for _, view in self.metadata],
            aux_item_lens=list(METADATA),
            state_data_ptrs=[address for address, _ in self.state],
            state_data_lens=[view.nbytes for _, view in self.state],
            state_item_lens=list(STATE),
            state_type=state_type,
            gpu_id=rank + 1,
            page_size=PAGE,
            kv_head_num=len(self.heads),
            total_kv_head_num=total,
            engine_rank=rank,
            prefill_start_layer=0,
        )

    def info(self, name: str) -> Any:
        """What it registers with prefill: SGLang's ``KVArgsRegisterInfo``."""
        return SimpleNamespace(
            endpoint="10.0.0.2",
            dst_port=4000,
            agent_name=name,
            agent_metadata=name.encode(),
            dst_kv_ptrs=self.args.kv_data_ptrs,
            dst_aux_ptrs=self.args.aux_data_ptrs,
            dst_state_data_ptrs=self.args.state_data_ptrs,
            dst_kv_item_len=self.args.kv_item_lens[0],
            gpu_id=self.args.gpu_id,
            decode_tp_size=self.size,
            decode_tp_rank=self.rank,
        )

    def snapshot(self) -> list[npt.NDArray[np.uint8]]:
        """A copy of all its buffers."""
        return [view.copy() for _, view in (*self.kv, *self.metadata, *self.state)]


def manager_of(side: Side, is_mla: bool = False) -> Any:
    """What ``Layout`` reads of a manager, with SGLang's own choice of layers."""
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    manager = object.__new__(CommonKVManager)
    manager.__dict__.update(
        kv_args=side.args, is_mla_backend=is_mla, attn_tp_size=side.size, pp_size=1
    )
    return manager


class Bench:
    """A backend between a prefill rank and one decode rank, "decode"."""

    def __init__(
        self, prefill: Side | None = None, decode: Side | None = None, is_mla: bool = False
    ) -> None:
        self.prefill = prefill or Side(2**63 - 5000, 12, is_mla=is_mla)
        self.decode = decode or Side(2**40, 17, is_mla=is_mla)
        self.agent = FakeAgent({"": self.prefill.memory, "decode": self.decode.memory})
        self.table: dict[str, Any] = {}
        self.peers = Peers(self.agent, self.table)
        self.peers.add(self.decode.info("decode"))
        self.stats = AsyncTransferStats()
        self.now = 0.0
        self.backend = NixlBackend(
            self.agent,
            self.peers,
            Layout(manager_of(self.prefill, is_mla)),
            self.stats,
            writer=WRITER,
            clock=self.clock,
        )

    def clock(self) -> float:
        """A second later each time."""
        self.now += 1.0
        return self.now

    def chunk(
        self,
        pages: Sequence[int] = (),
        to: Sequence[int] = (),
        *,
        is_last: bool = True,
        state: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
        slots: tuple[int, int] = (3, 1),
        is_stock: bool = False,
        in_note: bool = False,
    ) -> Chunk:
        """``pages`` to pages ``to`` of decode; ``state`` and ``slots`` of prefill and decode;
        ``in_note``: decode takes metadata in a note."""
        destination = Destination(
            pages=np.array(to, np.int32),
            state_pages=np.array(state[1], np.int32),
            metadata_slot=slots[1],
            pool_pages=None if is_stock else self.decode.slots,
            metadata_slots=None if is_stock else 5,
            takes_metadata=in_note,
        )
        load = ChunkPayload(
            chunk_id=2,
            pages=np.array(pages, np.int32),
            metadata_slot=slots[0] if is_last else None,
            state_pages=np.array(state[0], np.int32),
            destinations={"decode": destination},
        )
        return Chunk(ROOM, ("decode",), load, is_last, 1e9, 0.0)

    def expected(self, chunk: Chunk) -> list[npt.NDArray[np.uint8]]:
        """Decode's buffers after the chunk, by plain loops over layers, pages, tokens and heads."""
        load, to = chunk.payload, chunk.payload.destinations["decode"]
        was = iter(self.decode.snapshot())
        ours, theirs = self.prefill, self.decode
        found = []
        for _, source in ours.kv:
            target = next(was)
            for page, at in zip(load.pages.tolist(), to.pages.tolist(), strict=True):
                self._move_page(source[page], target[at])
            found.append(target)
        for (_, source), is_sent in (
            *((buffer, chunk.is_last and not to.takes_metadata) for buffer in ours.metadata),
            *((buffer, chunk.is_last and len(load.state_pages)) for buffer in ours.state),
        ):
            target = next(was)
            is_state = len(found) >= len(ours.kv) + len(ours.metadata)
            places = (
                zip(load.state_pages, to.state_pages, strict=True)
                if is_state
                else [(load.metadata_slot, to.metadata_slot)]
            )
            if is_sent:
                for slot, at in places:
                    target[at] = source[slot]
            found.append(target)
        assert len(theirs.kv) == len(ours.kv)
        return found

    def _move_page(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
        ours, theirs = self.prefill, self.decode
        from_, to = (
            page.reshape(PAGE, len(side.heads), -1)
            for page, side in ((source, ours), (target, theirs))
        )
        for head in set(ours.heads) & set(theirs.heads):
            holders = [
                rank
                for rank in sources_of(theirs.rank, ours.size, theirs.size)
                if head in heads_of(rank, ours.size, ours.total)
            ]
            if ours.size == theirs.size or min(holders) == ours.rank:
                for token in range(PAGE):
                    to[token, head - theirs.heads.start] = from_[token, head - ours.heads.start]

    def post(self, chunk: Chunk) -> list[Any]:
        """As a worker does: every handle that was given, also if posting raises in the end."""
        return list(self.backend.post(chunk, "decode"))

    def finish(self, posted: list[Any]) -> None:
        """Everything is delivered, in any order, noticed and released."""
        for each in reversed(posted):
            assert self.backend.state(each) is State.IN_PROGRESS
            self.agent.settle(each.handle)
        for each in posted:
            assert self.backend.state(each) is State.DONE
        for each in posted:
            self.backend.release(each)

    def users(self) -> int:
        """Of the peer, which must be none in the end."""
        return self.peers._peers["decode"].users

    def check(self) -> None:
        """Nothing is left."""
        self.agent.check()
        assert self.users() == 0
