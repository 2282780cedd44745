"""Runs under the later release: prints its decode side's messages, and parses ours.

Writes lines of JSON to standard output. The argument is a JSON object: by backend, our decode
side's messages (frames in hexadecimal), which the release's prefill side parses.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np

#: Name -> pages, prefix, and True if this prefill rank sends nothing.
ROOMS = {
    "all": ([4, 5], 0, False),
    "rest": ([4, 5], 16, False),
    "full hit": ([], 24, False),
    "nothing": ([4, 5], 0, True),
    "nothing after a prefix": ([4, 5], 16, True),
}


def receiver_of(kind: Any) -> tuple[Any, list[list[bytes]]]:
    """Return a receiver with the fields that its messages need, and the list of its messages."""
    sent: list[list[bytes]] = []
    socket = SimpleNamespace(send_multipart=sent.append)

    class Recorded(kind):  # type: ignore[misc]
        _connect_to_bootstrap_server = classmethod(lambda cls, info: (socket, threading.Lock()))

    receiver = Recorded.__new__(Recorded)
    receiver.kv_mgr = SimpleNamespace(
        local_ip="10.0.0.2",
        rank_port=4000,
        enable_staging=False,
        attn_tp_size=1,
        agent=SimpleNamespace(name="D", get_agent_metadata=lambda: b"metadata"),
        get_session_id=lambda: "10.0.0.2:5000",
        kv_args=SimpleNamespace(
            engine_rank=0, kv_data_ptrs=[0, 1], kv_item_lens=[64, 64], aux_data_ptrs=[9],
            state_data_ptrs=[], state_item_lens=[], state_dim_per_tensor=[], gpu_id=0,
        ),
        transfer_statuses=defaultdict(SimpleNamespace),
        server_args=SimpleNamespace(enable_hisparse=False),
    )  # fmt: skip
    receiver.session_id, receiver.bootstrap_room = "10.0.0.2:5000", 7
    receiver.required_dst_info_num, receiver.require_staging = 1, False
    return receiver, sent


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    import sglang
    from sglang.srt.disaggregation.mooncake import conn as mooncake
    from sglang.srt.disaggregation.nixl import conn as nixl

    say(version=sglang.__version__)
    ours = json.loads(sys.argv[1])
    for backend, module, kind in (
        ("nixl", nixl, nixl.NixlKVReceiver),
        ("mooncake", mooncake, mooncake.MooncakeKVReceiver),
    ):
        receiver, sent = receiver_of(kind)
        for name, (pages, prefix, is_dummy) in ROOMS.items():
            receiver.bootstrap_infos = [
                {"rank_ip": "10.0.0.1", "rank_port": 1, "is_dummy": is_dummy}
            ]
            receiver.send_metadata(np.array(pages, np.int32), 3, [], decode_prefix_len=prefix)
            say(backend=backend, sends=name, frames=[frame.hex() for frame in sent.pop()])
        receiver._register_kv_args()
        say(backend=backend, sends="registration", frames=[frame.hex() for frame in sent.pop()])
        for name, message in ours[backend].items():
            frames = [bytes.fromhex(frame) for frame in message]
            try:
                info = module.TransferInfo.from_zmq(frames)
            except Exception as error:
                say(backend=backend, reads=name, error=type(error).__name__)
            else:
                say(
                    backend=backend,
                    reads=name,
                    room=info.room,
                    pages=info.dst_kv_indices.tolist(),
                    prefix=info.decode_prefix_len,
                )


main()
