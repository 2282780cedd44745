"""NIXL managers without an agent, threads or sockets: only what messages may change."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from component.mooncake.bare import Sockets
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.disaggregation.utils import DisaggregationMode

ADDRESS = "10.0.0.1:8998"


class Agent:
    """Knows peers, and delivers the notifications that a test puts in."""

    name = "decode"

    def __init__(self) -> None:
        self.notes: dict[str, list[bytes]] = {}

    def add_remote_agent(self, metadata: bytes) -> None:
        if metadata != b"metadata":
            raise ValueError("not a peer's metadata")

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notes, self.notes = self.notes, {}
        return notes


def bare(mode: Any) -> Any:
    """A manager of either side."""
    manager = conn.NixlKVManager.__new__(conn.NixlKVManager)
    manager.agent = Agent()
    manager.kv_args = SimpleNamespace(
        kv_data_ptrs=[1, 2], kv_item_lens=[64, 64], aux_data_ptrs=[3], aux_item_lens=[64]
    )
    tables = (
        "request_status",
        "failure_records",
        "transfer_infos",
        "decode_kv_args_table",
        "required_prefill_response_num_table",
        "prefill_info_table",
        "connection_pool",
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
        failure_lock=threading.Lock(),
        connection_lock=threading.Lock(),
        transfer_statuses=defaultdict(conn.TransferStatus),
        addr_to_rooms_tracker=defaultdict(set),
    )
    manager.start_delta(mode, manager.server_args)
    (manager.decode_ranks or manager.servers)._sockets = Sockets()
    return manager


def prefill() -> Any:
    """A prefill rank's manager, whose transfer workers have nothing to drop."""
    manager = bare(DisaggregationMode.PREFILL)
    manager.transfers = SimpleNamespace(cancel=lambda room, kind: None)
    return manager


def decode(*rooms: int, writers: int = 1) -> Any:
    """A decode rank's manager that waits for ``rooms``."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    manager = bare(DisaggregationMode.DECODE)
    for room in rooms:
        manager.update_status(room, KVPoll.WaitingForInput)
        manager.required_prefill_response_num_table[room] = writers
        manager.addr_to_rooms_tracker[ADDRESS].add(room)
    return manager
