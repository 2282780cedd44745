"""Runs under the later release: its decode or its prefill rank of a NIXL transfer, on CPU memory.

Commands are lines of JSON on standard input, answers lines of JSON on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("UCX_TLS", "tcp,self")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
import zmq  # noqa: E402
from nixl import _api  # noqa: E402

from component.transfer.managers import buffers, without_engine  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402
from sglang.srt.disaggregation.common.utils import FastQueue  # noqa: E402
from sglang.srt.disaggregation.nixl import conn  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402

PAGE, PAGES, LAYERS, AUX = 4, 48, 2, 8
LIMIT_S = 60.0


class Side:
    """One rank: pool, metadata, and the release's own manager without an engine around it."""

    def __init__(self, mode: Any) -> None:
        self.kv = [torch.zeros(PAGES, PAGE * 8) for _ in range(2 * LAYERS)]
        self.aux = torch.zeros(AUX, 16, dtype=torch.int32)
        config = _api.nixl_agent_config(backends=["UCX"])
        manager = self.manager = without_engine(
            conn.NixlKVManager,
            agent=_api.nixl_agent(f"later-{os.getpid()}", config),
            kv_args=buffers(self.kv, self.aux, PAGE),
            disaggregation_mode=mode,
            local_ip="127.0.0.1",
            waiting_timeout=LIMIT_S,
            bootstrap_timeout=LIMIT_S,
            _staging_ctx=None,
            kv_item_lens_sum=0,
            state_item_lens_sum=0,
            transfer_statuses=defaultdict(conn.TransferStatus),
            exceptions={},
            req_to_decode_prefix_len={},
        )
        manager.kv_args.__dict__.update(state_types=[], state_dim_per_tensor=[])
        manager.server_socket = zmq.Context.instance().socket(zmq.PULL)
        manager.rank_port = manager.server_socket.bind_to_random_port("tcp://127.0.0.1")
        manager.register_buffer_to_engine()
        if mode == DisaggregationMode.PREFILL:
            for layer, tensor in enumerate(self.kv):
                tensor += torch.arange(1, PAGES + 1)[:, None] + 1000 * layer
            manager.transfer_queues = [FastQueue()]
            worker = threading.Thread(
                target=manager.transfer_worker, args=(manager.transfer_queues[0],), daemon=True
            )
            worker.start()
            manager._start_bootstrap_thread()


def until_over(endpoint: Any, wanted: int) -> int:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        state = int(endpoint.poll())
        if state in (wanted, int(KVPoll.Failed)):
            return state
        time.sleep(0.001)
    return -1


def receive(side: Side, prefill_port: int, rooms: list[dict[str, Any]]) -> None:
    """Decode: announce each room with its prefix, and say what has arrived."""
    info = {"rank_ip": "127.0.0.1", "rank_port": prefill_port, "is_dummy": False}
    for at, wanted in enumerate(rooms):
        receiver = conn.NixlKVReceiver(side.manager, "127.0.0.1:8998", wanted["room"])
        receiver.bootstrap_infos, receiver.required_dst_info_num = [info], 1
        receiver.prefill_info = SimpleNamespace(attn_tp_size=1)
        side.manager.required_prefill_response_num_table[wanted["room"]] = 1
        receiver.init_time = time.time()
        if not at:
            receiver._register_kv_args()
        pages = torch.tensor(wanted["pages"], dtype=torch.int32).numpy()
        receiver.send_metadata(pages, wanted["slot"], [], decode_prefix_len=wanted["prefix"])
        state = until_over(receiver, int(KVPoll.Success))
        say(
            state=state,
            arrived=[[float(layer[page, 0]) for page in wanted["pages"]] for layer in side.kv],
            metadata=int(side.aux[wanted["slot"], 0]),
        )


def send(side: Side, rooms: list[dict[str, Any]]) -> None:
    """Prefill: serve each room as its announcement wants it, a page a chunk."""
    for wanted in rooms:
        sender = conn.NixlKVSender(side.manager, "127.0.0.1:8998", wanted["room"], [0], 0)
        state = until_over(sender, int(KVPoll.WaitingForInput))
        prefix = sender.pop_decode_prefix_len()
        sender.init(len(wanted["pages"]), wanted["slot"])
        side.aux[wanted["slot"]] = 77
        for page in wanted["pages"]:
            sender.send(torch.tensor([page], dtype=torch.int32).numpy(), None)
        state = until_over(sender, int(KVPoll.Success))
        say(state=state, prefix=prefix)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    import sglang

    role = sys.argv[1]
    side = Side(DisaggregationMode.DECODE if role == "decode" else DisaggregationMode.PREFILL)
    say(version=sglang.__version__, port=side.manager.rank_port)
    command = json.loads(sys.stdin.readline())
    if role == "decode":
        receive(side, command["prefill_port"], command["rooms"])
    else:
        send(side, command["rooms"])
    os._exit(0)  # NIXL may crash an interpreter at its exit


main()
