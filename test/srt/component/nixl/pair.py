"""A prefill and a decode manager in one process: real agents, real sockets, real handshake."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import zmq
from nixl import _api

from component.pair import ADDRESS, AUX, LAYERS, LIMIT_S, PAGE, PAGES, Rooms, pages, until
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import capability
from sglang.srt.disaggregation.delta.nixl.agent import attuned
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.disaggregation.utils import DisaggregationMode

__all__ = ["ADDRESS", "LIMIT_S", "Pair", "pages", "until"]


class Side:
    """One server's pool, metadata and transfer manager."""

    def __init__(self, name: str, mode: Any) -> None:
        self.kv = [torch.zeros(PAGES, PAGE * 8) for _ in range(2 * LAYERS)]
        self.aux = torch.zeros(AUX, 16, dtype=torch.int32)
        manager = conn.NixlKVManager.__new__(conn.NixlKVManager)
        with attuned(4 if mode == DisaggregationMode.PREFILL else 0):
            manager.agent = _api.nixl_agent(name, _api.nixl_agent_config(backends=["UCX"]))
        manager.kv_args = SimpleNamespace(
            kv_data_ptrs=[layer.data_ptr() for layer in self.kv],
            kv_data_lens=[layer.nbytes for layer in self.kv],
            kv_item_lens=[layer[0].nbytes for layer in self.kv],
            aux_data_ptrs=[self.aux.data_ptr()],
            aux_data_lens=[self.aux.nbytes],
            aux_item_lens=[self.aux[0].nbytes],
            state_data_ptrs=[],
            state_data_lens=[],
            state_item_lens=[],
            state_type="none",
            gpu_id=0,
            pp_rank=0,
            prefill_start_layer=0,
            engine_rank=0,
            page_size=PAGE,
            kv_head_num=2,
        )
        manager.__dict__.update(
            disaggregation_mode=mode,
            server_args=SimpleNamespace(dp_size=1, disaggregation_decode_enable_radix_cache=True),
            is_mla_backend=False,
            attn_tp_size=1,
            attn_tp_rank=0,
            attn_cp_size=1,
            attn_cp_rank=0,
            pp_size=1,
            pp_rank=0,
            local_ip="127.0.0.1",
            heartbeat_interval=LIMIT_S,
            max_failures=2,
            waiting_timeout=LIMIT_S,
            bootstrap_timeout=LIMIT_S,
            enable_staging=False,
            is_dummy_cp_rank=False,
            enable_all_cp_ranks_for_transfer=False,
            failure_lock=threading.Lock(),
            connection_lock=threading.Lock(),
            transfer_statuses=defaultdict(conn.TransferStatus),
            addr_to_rooms_tracker=defaultdict(set),
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
        manager.start_delta(mode, manager.server_args)
        manager.server_socket = zmq.Context.instance().socket(zmq.PULL)
        manager.rank_port = manager.server_socket.bind_to_random_port("tcp://127.0.0.1")
        manager.register_buffer_to_engine()
        self.manager = manager


class Pair(Rooms):
    """Prefill and decode, connected."""

    ends = (conn, "Nixl")

    def __init__(self) -> None:
        self.prefill = Side("prefill", DisaggregationMode.PREFILL)
        self.decode = Side("decode", DisaggregationMode.DECODE)
        self.fill()
        self.prefill.manager._start_bootstrap_thread()
        manager = self.decode.manager
        manager._start_heartbeat_checker_thread()
        manager.servers._capabilities[ADDRESS] = capability.OURS
        manager.servers._epochs[ADDRESS] = 1
        self.connect()
        sender, receiver = self.room()
        receiver._register_kv_args()
        until(lambda: self.prefill.manager.decode_kv_args_table, "registration")
        sender.clear()
        receiver.clear()

    def announced(self, sender: Any) -> None:
        """Wait until prefill has read the room's announcement."""
        infos = self.prefill.manager.transfer_infos
        until(lambda: sender.bootstrap_room in infos, "announcement")
        until(lambda: sender.poll() == KVPoll.WaitingForInput, "bootstrapped")
