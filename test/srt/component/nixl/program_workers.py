"""A prefill server's NIXL manager, made by its own constructor. One thread for each of its transfer
threads makes a transfer; NIXL's log names the UCX worker of each."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import torch

os.environ["NIXL_LOG_LEVEL"] = "DEBUG"

from component.transfer.bare import buffers  # noqa: E402
from sglang.srt.disaggregation.common import conn as common  # noqa: E402
from sglang.srt.disaggregation.nixl import conn  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402

for name, value in {"tp": (1, 0), "cp": (1, 0), "dp": (1, 0)}.items():
    for what, number in zip(("size", "rank"), value, strict=True):
        setattr(common, f"get_attention_{name}_{what}", lambda number=number: number)
common.get_pp_group = lambda: None
common.get_local_ip_auto = lambda: "127.0.0.1"
conn.NixlKVManager.register_to_bootstrap = lambda self: None

kv = [torch.zeros(8, 64) for _ in range(4)]
args = buffers(kv, torch.zeros(8, 16, dtype=torch.int32), 4)
args.system_dp_rank, args.ib_device = 0, None
server_args = SimpleNamespace(
    host="127.0.0.1",
    disaggregation_bootstrap_port=1,
    dist_init_addr=None,
    enable_dp_attention=False,
    dp_size=1,
    pp_size=1,
    load_balance_method="follow_bootstrap_room",
    kv_cache_dtype="auto",
    disaggregation_decode_enable_radix_cache=False,
)
manager = conn.NixlKVManager(args, DisaggregationMode.PREFILL, server_args, False)
transfer_threads = [t for t in threading.enumerate() if t.name.startswith("kv-transfer-")]


def post() -> None:
    """Post one transfer to this agent itself, as a transfer thread does."""
    agent = manager.agent
    ours, theirs = (agent.get_xfer_descs([(kv[i].data_ptr(), 64, 0)], "VRAM") for i in (0, 1))
    agent.transfer(agent.initialize_xfer("WRITE", ours, theirs, agent.name))


threads = [threading.Thread(target=post) for _ in transfer_threads]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(f"POSTED {len(threads)}", flush=True)
os._exit(0)  # NIXL crashes an interpreter without a GPU driver at exit
