"""Managers without an engine, threads or sockets: only what messages may change."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np

from sglang.srt.disaggregation.delta.mooncake.chunks import ChunkDeadlines
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.disaggregation.utils import DisaggregationMode

ADDRESS = "10.0.0.1:8998"
SLOTS, ITEM = 8, 64


class Sockets:
    """Remembers what would be sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, Any]] = []

    def send(self, host: str, port: int, message: Any) -> None:
        self.sent.append((host, port, message))

    def drop(self, host: str, port: int) -> None:
        pass


def bare(mode: Any) -> Any:
    """A manager of either side; its metadata buffer is ``manager.aux``."""
    manager = conn.MooncakeKVManager.__new__(conn.MooncakeKVManager)
    manager.aux = np.zeros((SLOTS, ITEM), dtype=np.uint8)
    manager.kv_args = SimpleNamespace(
        kv_data_ptrs=[1, 2],
        kv_item_lens=[64, 64],
        aux_data_ptrs=[manager.aux.ctypes.data],
        aux_data_lens=[manager.aux.nbytes],
        aux_item_lens=[ITEM],
    )
    tables = (
        "request_status",
        "failure_records",
        "transfer_infos",
        "decode_kv_args_table",
        "required_prefill_response_num_table",
        "prefill_info_table",
        "connection_pool",
        "_progress",
    )
    manager.__dict__.update({table: {} for table in tables})
    manager.__dict__.update(
        server_args=SimpleNamespace(dp_size=1, disaggregation_decode_enable_radix_cache=True),
        is_mla_backend=False,
        attn_tp_size=1,
        attn_tp_rank=0,
        attn_cp_size=1,
        attn_cp_rank=0,
        pp_size=1,
        pp_rank=0,
        bootstrap_timeout=300,
        enable_staging=False,
        is_dummy_cp_rank=False,
        chunk_deadlines=ChunkDeadlines(120.0),
        _unsettled=[],
        failure_lock=threading.Lock(),
        connection_lock=threading.Lock(),
        session_lock=threading.Lock(),
        session_failures=defaultdict(int),
        failed_sessions=set(),
        addr_to_rooms_tracker=defaultdict(set),
    )
    manager.start_delta(mode, manager.server_args)
    (manager.decode_ranks or manager.servers)._sockets = Sockets()
    return manager


def prefill() -> Any:
    """A prefill rank's manager."""
    return bare(DisaggregationMode.PREFILL)


def decode(*rooms: int, writers: int = 1) -> Any:
    """A decode rank's manager that waits for ``rooms``; room ``n`` has metadata slot ``n % 8``."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    manager = bare(DisaggregationMode.DECODE)
    for room in rooms:
        manager.open_progress(room).slot = room % SLOTS
        manager.update_status(room, KVPoll.WaitingForInput)
        manager.required_prefill_response_num_table[room] = writers
        manager.addr_to_rooms_tracker[ADDRESS].add(room)
    return manager
