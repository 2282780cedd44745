"""A rank's transfer manager with only those attributes of SGLang's ``__init__`` that tests need;
and such managers without a transfer library, threads or sockets."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.decode.connection import DeltaReceiver, RoomReceiver
from sglang.srt.disaggregation.delta.decode.transfer import Progress
from sglang.srt.disaggregation.mooncake import conn as mooncake
from sglang.srt.disaggregation.nixl import conn as nixl
from sglang.srt.disaggregation.utils import DisaggregationMode

ADDRESS = "10.0.0.1:8998"
#: Number of metadata slots; bytes of a slot and of a KV page.
SLOTS, ITEM = 8, 64
#: A manager's tables of rooms and peers.
TABLES = (
    "request_status",
    "failure_records",
    "transfer_infos",
    "decode_kv_args_table",
    "required_prefill_response_num_table",
    "prefill_info_table",
    "connection_pool",
)


def without_engine(kind: Any, **own: Any) -> Any:
    """Return a manager of the class ``kind``, the only rank of its server; ``own`` are attributes
    of its backend, its release or a test."""
    manager = kind.__new__(kind)
    manager.__dict__.update({table: {} for table in TABLES})
    manager.__dict__.update(
        server_args=SimpleNamespace(
            dp_size=1,
            disaggregation_decode_enable_radix_cache=True,
            enable_hisparse=False,
            speculative_algorithm=None,
        ),
        kv_args=None,
        is_mla_backend=False,
        attn_tp_size=1,
        attn_tp_rank=0,
        attn_cp_size=1,
        attn_cp_rank=0,
        attn_dp_rank=0,
        system_dp_size=1,
        pp_size=1,
        pp_rank=0,
        local_ip="127.0.0.1",
        rank_port=4999,
        bootstrap_timeout=300,
        enable_staging=False,
        is_dummy_cp_rank=False,
        enable_all_cp_ranks_for_transfer=False,
        failure_lock=threading.Lock(),
        connection_lock=threading.Lock(),
        addr_to_rooms_tracker=defaultdict(set),
    )
    manager.__dict__.update(own)
    return manager


def buffers(kv: list[torch.Tensor], aux: torch.Tensor, page: int) -> Any:
    """Return the buffers' description that a scheduler passes to its manager: ``kv`` is (pages,
    page elements) for each layer, keys first, then values; ``aux`` is (slots, slot elements)."""
    return SimpleNamespace(
        kv_data_ptrs=[layer.data_ptr() for layer in kv],
        kv_data_lens=[layer.nbytes for layer in kv],
        kv_item_lens=[layer[0].nbytes for layer in kv],
        aux_data_ptrs=[aux.data_ptr()],
        aux_data_lens=[aux.nbytes],
        aux_item_lens=[aux[0].nbytes],
        state_data_ptrs=[],
        state_data_lens=[],
        state_item_lens=[],
        state_type="none",
        gpu_id=0,
        pp_rank=0,
        prefill_start_layer=0,
        engine_rank=0,
        page_size=page,
        kv_head_num=2,
    )


class Sockets:
    """Records messages instead of sending them."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, Any]] = []

    def send(self, host: str, port: int, message: Any) -> None:
        self.sent.append((host, port, message))

    send_frames = send

    def drop(self, host: str, port: int) -> None:
        pass

    def drop_unused(self, for_s: float) -> None:
        pass


class Agent:
    """Stands for NIXL's agent: knows peers, and delivers a test's notifications."""

    name = "decode"

    def __init__(self) -> None:
        self.notes: dict[str, list[bytes]] = {}

    def add_remote_agent(self, metadata: bytes) -> None:
        if metadata != b"metadata":
            raise ValueError("not a peer's metadata")

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notes, self.notes = self.notes, {}
        return notes


def _nixl() -> Any:
    return without_engine(
        nixl.NixlKVManager, agent=Agent(), transfer_statuses=defaultdict(nixl.TransferStatus)
    )


def _mooncake() -> Any:
    return without_engine(
        mooncake.MooncakeKVManager,
        transfer_statuses=defaultdict(Progress),
    )


def bare(backend: str, mode: Any, sockets: Any = None, **own: Any) -> Any:
    """Return a manager of either side, with ``own`` attributes. Its metadata buffer is
    ``manager.aux``; ``manager.sockets`` records its messages."""
    manager = {"nixl": _nixl, "mooncake": _mooncake}[backend]()
    manager.aux = np.zeros((SLOTS, ITEM), dtype=np.uint8)
    manager.kv_args = SimpleNamespace(
        kv_data_ptrs=[1, 2],
        kv_item_lens=[ITEM, ITEM],
        aux_data_ptrs=[manager.aux.ctypes.data],
        aux_data_lens=[manager.aux.nbytes],
        aux_item_lens=[ITEM],
        state_type="none",
    )
    manager.sockets = sockets or Sockets()
    manager.__dict__.update(own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PeerSockets", lambda *_: manager.sockets)
        manager.start_delta(mode, manager.server_args)
    return manager


def _nothing(*_: Any) -> None:
    pass


def prefill(backend: str, sockets: Any = None, **own: Any) -> Any:
    """Return a prefill rank's manager with transfer workers that do nothing."""
    manager = bare(backend, DisaggregationMode.PREFILL, sockets, **own)
    manager.transfers = SimpleNamespace(open=_nothing, cancel=_nothing, forget=_nothing)
    table = manager.decode_kv_args_table
    manager._backend = SimpleNamespace(
        register=lambda info: table.__setitem__(info.mooncake_session_id, info),
        forget=lambda peer: table.pop(peer, None),
    )
    return manager


def destinations(manager: Any, number: int) -> list[Any]:
    """Return the decode ranks' announcements of a room so far."""
    room = manager.rooms.room(number)
    return list(room.announcements.values()) if room else []


def decode(backend: str, *rooms: int, writers: int = 1, **own: Any) -> Any:
    """Return a decode rank's manager that waits for ``rooms``; room ``n`` has metadata slot
    ``n % 8`` (over NIXL a test announces it)."""
    manager = bare(backend, DisaggregationMode.DECODE, **own)
    for room in rooms:
        manager.transfer_statuses[room].address = ADDRESS
        if backend == "mooncake":
            manager.expect_metadata(room, room % SLOTS)
        manager.update_status(room, KVPoll.WaitingForInput)
        manager.required_prefill_response_num_table[room] = writers
        manager.addr_to_rooms_tracker[ADDRESS].add(room)
    return manager


class Receiver(RoomReceiver, DeltaReceiver):
    """This package's receiver of any backend, without SGLang's base class."""


def announced(manager: Any, room: int, address: str = ADDRESS, writers: int = 1) -> Any:
    """Return decode's end of a room that ``writers`` ranks at ``address`` may write to."""
    made: Any = Receiver.__new__(Receiver)
    made.__dict__.update(
        kv_mgr=manager, bootstrap_addr=address, bootstrap_room=room, announced=True,
        required_prefill_response_num=writers,
    )  # fmt: skip
    return made
