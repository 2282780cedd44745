"""A prefill and a decode manager in one process: real engines, real sockets, real workers."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import zmq

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.utils import FastQueue
from sglang.srt.disaggregation.decode_radix.invariants import idle_rooms
from sglang.srt.disaggregation.delta import capability
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)

PAGE, PAGES, LAYERS, AUX = 4, 48, 2, 8
ADDRESS = "127.0.0.1:8998"
LIMIT_S = 30.0


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for another thread or for the transport; an error names what did not happen."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.0005)


class Side:
    """One server's pool, metadata and transfer manager."""

    def __init__(self, mode: Any) -> None:
        self.kv = [torch.zeros(PAGES, PAGE * 8) for _ in range(2 * LAYERS)]
        self.aux = torch.zeros(AUX, 16, dtype=torch.int32)
        manager = conn.MooncakeKVManager.__new__(conn.MooncakeKVManager)
        manager.engine = MooncakeTransferEngine("127.0.0.1")
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
            pp_rank=0,
            prefill_start_layer=0,
            engine_rank=0,
            page_size=PAGE,
            kv_head_num=2,
        )
        manager.__dict__.update(
            disaggregation_mode=mode,
            server_args=SimpleNamespace(
                dp_size=1, disaggregation_decode_enable_radix_cache=True, enable_hisparse=False
            ),
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
            enable_custom_mem_pool=False,
            is_dummy_cp_rank=False,
            enable_all_cp_ranks_for_transfer=False,
            failure_lock=threading.Lock(),
            connection_lock=threading.Lock(),
            addr_to_rooms_tracker=defaultdict(set),
            prefill_response_tracker=defaultdict(set),
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


class Pair:
    """Prefill and decode, connected."""

    def __init__(self) -> None:
        self.prefill = Side(DisaggregationMode.PREFILL)
        self.decode = Side(DisaggregationMode.DECODE)
        for layer, tensor in enumerate(self.prefill.kv):
            tensor += torch.arange(1, PAGES + 1)[:, None] + 1000 * layer
        self._next_room = 100
        sender = self.prefill.manager
        sender.transfer_queues = [FastQueue()]
        sender.start_prefill_thread()
        self.workers = [
            threading.Thread(
                target=sender.transfer_worker, args=(queue, ThreadPoolExecutor(1)), daemon=True
            )
            for queue in sender.transfer_queues
        ]
        for worker in self.workers:
            worker.start()
        manager = self.decode.manager
        manager.start_decode_thread()
        manager.servers._capabilities[ADDRESS] = capability.OURS
        manager.servers._epochs[ADDRESS] = 1
        self.connect()
        self.register()

    def connect(self) -> None:
        """What decode's handshake with the bootstrap server leaves behind."""
        manager = self.decode.manager
        manager.prefill_info_table[ADDRESS] = SimpleNamespace(
            target_tp_rank=0,
            target_tp_ranks=[0],
            target_cp_ranks=[0],
            target_pp_ranks=[0],
            required_dst_info_num=1,
            required_prefill_response_num=1,
            attn_tp_size=1,
        )
        port = self.prefill.manager.rank_port
        info = {"rank_ip": "127.0.0.1", "rank_port": port, "is_dummy": False}
        manager.connection_pool[f"{ADDRESS}_0_0_0"] = [info]

    def register(self) -> None:
        """Decode lists its buffers; a room is needed for it, which is never announced."""
        receiver = self.receiver(self.next_room())
        receiver._register_kv_args()
        until(lambda: self.prefill.manager.decode_kv_args_table, "registration")
        receiver.clear()

    def next_room(self) -> int:
        """A room number that was not used yet."""
        self._next_room += 1
        return self._next_room

    def receiver(self, room: int) -> Any:
        """Decode's end of a room, handshake done."""
        receiver = conn.MooncakeKVReceiver(self.decode.manager, ADDRESS, room)
        if receiver.conclude_state is None:
            receiver.init(0)
        return receiver

    def sender(self, room: int) -> Any:
        """Prefill's end of a room."""
        return conn.MooncakeKVSender(self.prefill.manager, ADDRESS, room, [0], 0)

    def room(self) -> tuple[Any, Any]:
        """A new room: its sender and its receiver."""
        room = self.next_room()
        receiver = self.receiver(room)
        return self.sender(room), receiver

    def announced(self, sender: Any) -> None:
        """Wait until prefill has read the room's announcement."""
        until(lambda: sender.poll() == KVPoll.WaitingForInput, "announcement")

    def finish(self, sender: Any, receiver: Any) -> tuple[int, int]:
        """Poll both until each has ended; returns how."""
        ends = (KVPoll.Success, KVPoll.Failed)
        until(lambda: sender.poll() in ends, "sender")
        until(lambda: receiver.poll() in ends, "receiver")
        return sender.poll(), receiver.poll()

    def leftovers(self) -> list[str]:
        """Entries of rooms, of which there must be none."""
        return [*idle_rooms(self.prefill.manager), *idle_rooms(self.decode.manager)]

    def wipe(self) -> None:
        """Empty decode's memory, to see what arrives."""
        for layer in self.decode.kv:
            layer.zero_()
        self.decode.aux.zero_()

    def arrived(self, source: list[int], target: list[int]) -> bool:
        """Whether decode's memory holds exactly ``source`` pages at ``target``, nothing else."""
        for ours, theirs in zip(self.decode.kv, self.prefill.kv, strict=True):
            expected = torch.zeros_like(ours)
            expected[target] = theirs[source]
            if not torch.equal(ours, expected):
                return False
        return True


def pages(*numbers: int) -> np.ndarray:
    """A page list as SGLang keeps it."""
    return np.array(numbers, dtype=np.int32)
