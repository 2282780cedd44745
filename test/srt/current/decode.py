"""A decode server of 0.5.23; the test takes the part of its prefill server.

Queues, NIXL manager and receivers are SGLang's. Messages to prefill are recorded as frames, and a
transfer completes when the test calls :meth:`Decode.deliver`, with KV that the same model computed
in :meth:`Decode.learn`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any  # Any: objects of SGLang

import numpy as np
import torch

from current.server import HOST, PAGE, PORT, Server
from sglang.srt.disaggregation import decode as decode_module
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, get_kv_class


class Room(CommonKVReceiver):
    """SGLang's receiver of a request, which records messages instead of sending them. Comes before
    the class of the transfer backend (``_receivers``)."""

    #: All rooms of this process by number, and the frames sent to prefill.
    rooms: dict[int, Room] = {}
    frames: list[list[bytes]] = []
    _wire = threading.Lock()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Room.rooms[self.bootstrap_room] = self
        #: Announced pages and metadata slot, and the length of the prefix on decode.
        self.announced: dict[str, Any] | None = None

    def _setup_bootstrap_infos(self) -> None:
        self.bootstrap_infos = [{"rank_ip": HOST, "rank_port": 1, "is_dummy": False, "pp_rank": 0}]

    @classmethod
    def _connect_to_bootstrap_server(cls, bootstrap_info: dict[str, Any]) -> Any:
        return cls, cls._wire

    @classmethod
    def send_multipart(cls, frames: list[bytes], flags: int = 0) -> None:
        """Record frames instead of sending them."""
        cls.frames.append(frames)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **more: Any,
    ) -> None:
        self.announced = {
            "pages": np.asarray(kv_indices).copy(),
            "slot": aux_index,
            "prefix": decode_prefix_len or 0,
        }
        super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len, **more)


@cache
def _receivers(backend: Any, kind: Any) -> Any:
    found = get_kv_class(backend, kind)
    return type("Room", (Room, found), {}) if kind == KVClassType.RECEIVER else found


def _key(req: Any) -> tuple[Any, ...]:
    return req.extra_key, *req.origin_input_ids


class Decode(Server):
    """One rank of a decode server. Call ``learn`` for each prompt before using it."""

    def __init__(self, model: str, *arguments: str, tokens: int = 8000) -> None:
        decode_module.get_kv_class = _receivers
        super().__init__(model, "decode", *arguments, tokens=tokens)
        self.prealloc = self.scheduler.disagg_decode_prealloc_queue
        self.transfer = self.scheduler.disagg_decode_transfer_queue
        self.manager = self.prealloc.kv_manager
        self.page: int = self.scheduler.tree_cache.page_size
        self.manager._heartbeat_shutdown.set()  # because no server would answer
        self.bring_prefill()
        #: Learned prompts with their namespace -> first token, and their rows in each buffer.
        self._known: dict[tuple[Any, ...], tuple[int, list[torch.Tensor]]] = {}

    def bring_prefill(self) -> None:
        """Make prefill reachable (again)."""
        info = PrefillServerInfo(
            attn_tp_size=1,
            attn_cp_size=1,
            dp_size=1,
            pp_size=1,
            page_size=self.page,
            kv_cache_dtype="auto",
            follow_bootstrap_room=True,
            target_tp_rank=0,
            target_tp_ranks=[0],
            target_cp_ranks=[0],
            target_pp_ranks=[0],
            required_dst_info_num=1,
            required_prefill_response_num=1,
        )
        self.manager.prefill_info_table[f"{HOST}:{PORT}"] = info

    def lose_prefill(self) -> None:
        """Report the loss of prefill, as SGLang's heartbeat does."""
        self.manager._handle_node_failure(f"{HOST}:{PORT}")

    def learn(self, prompts: Sequence[Sequence[int]], new: int, **more: Any) -> list[list[int]]:
        """Return the answers of ``new`` tokens that an aggregated server gives to ``prompts``.

        Afterwards these prompts can be delivered. The tree is empty before and after. ``more``: see
        ``ask``.
        """
        self.in_mode(DisaggregationMode.NULL)
        rids = [self.ask(prompt, new + PAGE, **more) for prompt in prompts]
        self.step()
        # Copy the KV as soon as it is complete, because a window moves on with each later token.
        self.until(lambda: not [rid for rid in rids if not self._is_copied(self.requests[rid])])
        self.until(lambda: self.ended(*rids) and self.is_idle())
        answers = [self.output(rid) for rid in rids]
        self.in_mode(self.mode)
        self.flush()
        return [answer[:new] for answer in answers]

    def _is_copied(self, req: Any) -> bool:
        """Return True if the KV of a prompt is known. Copy it when it is complete."""
        if req.output_ids and _key(req) not in self._known:
            row, length = req.kv.req_pool_idx, len(req.origin_input_ids)
            slots = self.scheduler.req_to_token_pool.req_to_token[row, :length].long()
            copies = [buffer[rows].clone() for buffer, rows, _ in self._buffers(slots)]
            copies += [state.clone() for state in self._states(req)]
            self._known[_key(req)] = req.output_ids[0], copies
        return _key(req) in self._known

    def _states(self, req: Any) -> list[torch.Tensor]:
        """Return the recurrent states of a request in its slot, if the model has any."""
        if not req.kv.holds_mamba:
            return []
        states = self.scheduler.req_to_token_pool.mamba_pool.mamba_cache
        return [part[:, req.kv.mamba_pool_idx] for part in (*states.conv, states.temporal)]

    def _buffers(self, slots: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """Return each buffer of KV, with a draft model's last, the rows of ``slots`` in it, and the
        tokens of a row. Row 0 is that of a token outside of a window."""
        allocator = self.scheduler.token_to_kv_pool_allocator
        pools = [(allocator.get_kvcache(), slots)]
        if not self.scheduler.spec_algorithm.is_none():
            draft = self.scheduler.draft_worker.draft_worker.draft_runner.token_to_kv_pool
            pools.append((draft, slots))
        if hasattr(allocator, "full_to_swa_index_mapping"):
            pool, windows = pools[0][0], allocator.full_to_swa_index_mapping[slots]
            pools[:1] = [(pool.full_kv_pool, slots), (pool.swa_kv_pool, windows)]
        pools[0] = (getattr(pools[0][0], "full_kv_pool", pools[0][0]), pools[0][1])
        page, found = self.page, []
        for pool, rows in pools:
            tokens = pool.kv_buffer if hasattr(pool, "kv_buffer") else pool.k_buffer + pool.v_buffer
            found += [(buffer, rows, 1) for buffer in tokens]
            indices = getattr(pool, "index_k_with_scale_buffer", ())
            found += [(buffer, rows[::page] // page, page) for buffer in indices]
        return found

    def room(self, rid: str) -> Room:
        """Return the receiver of a request, even if SGLang has released it."""
        return Room.rooms[self.requests[rid].bootstrap_room]

    def arriving(self) -> list[str]:
        """Return the announced requests without their KV, in queue order."""
        return [entry.req.rid for entry in self.transfer.queue]

    def deliver(self, *rids: str) -> None:
        """Write the KV and first token of these requests, by default of all announced ones.

        Decode sees them in the next step.
        """
        for rid in rids or self.arriving():
            self.call(lambda rid=rid: self._write(self.requests[rid]))

    def _write(self, req: Any) -> None:
        room = Room.rooms[req.bootstrap_room]
        assert room.announced is not None, f"{req.rid} was not announced"
        first, known = self._known[_key(req)]
        prefix, pages = room.announced["prefix"], torch.as_tensor(room.announced["pages"])
        slots = (pages[:, None] * self.page + torch.arange(self.page)).flatten()
        slots = slots[: len(req.origin_input_ids) - prefix].long()
        buffers = self._buffers(slots)
        for kv, (buffer, rows, tokens) in zip(known, buffers, strict=False):
            buffer[rows[rows > 0]] = kv[prefix // tokens :][rows > 0]
        for state, copy in zip(self._states(req), known[len(buffers) :], strict=True):
            state.copy_(copy)
        buffers = self.scheduler.disagg_metadata_buffers
        buffers.output_ids[room.announced["slot"]][0] = first
        buffers.cached_tokens[room.announced["slot"]][:] = 0
        buffers.bootstrap_room[room.announced["slot"], 0] = req.bootstrap_room
        self.manager.update_status(req.bootstrap_room, KVPoll.Success)

    def fail(self, rid: str, reason: str = "prefill failed the transfer") -> None:
        """Report that prefill failed the transfer of a request."""
        room = self.requests[rid].bootstrap_room
        self.manager.record_failure(room, reason)
        self.manager.update_status(room, KVPoll.Failed)

    @property
    def frames(self) -> list[list[bytes]]:
        """Messages to prefill, oldest first."""
        return Room.frames

    def confirm(self, rid: str) -> None:
        """Send prefill's confirmation that it stopped writing for an aborted request."""
        room = self.room(rid).bootstrap_room
        state = self.manager._deferred_abort_ack_tracker[room]
        self.manager.note_abort_ack(room, 0, state.generation)

    def finish(self, *rids: str, limit: int = 600) -> None:
        """Step until these requests (by default all) have ended and the server is idle.

        Delivers every announced request.
        """
        self.step()
        for _ in range(limit):
            if self.ended(*rids) and self.is_idle():
                return
            for rid in self.arriving():
                if self.room(rid).announced and self.room(rid).poll() != KVPoll.Success:
                    self.deliver(rid)
            self.step()
        raise AssertionError(f"not idle in {limit} steps: {self.state()}")
