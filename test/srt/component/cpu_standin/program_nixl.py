"""Two real NIXL agents move CPU tensors that are described as VRAM, as SGLang describes its KV."""

import os
import time

import numpy as np
import torch
from nixl._api import nixl_agent, nixl_agent_config

PAGES, PAGE_BYTES = 16, 4096


def agent(name: str):
    """Create an agent with UCX, as SGLang does."""
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


source = torch.randint(0, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8)
target = torch.zeros_like(source)
sender, receiver = agent("sender"), agent("receiver")
for owner, tensor in ((sender, source), (receiver, target)):
    region = [(tensor.data_ptr(), tensor.numel(), 0, "")]
    assert owner.register_memory(region, "VRAM").getType() is not None
peer = sender.add_remote_agent(receiver.get_agent_metadata())
peer = peer.decode() if isinstance(peer, bytes) else peer


def rows(tensor: torch.Tensor, pages: list[int]) -> np.ndarray:
    """Return descriptors of pages: address, length, device."""
    return np.array([(tensor.data_ptr() + p * PAGE_BYTES, PAGE_BYTES, 0) for p in pages], np.uint64)


handle = sender.initialize_xfer(
    "WRITE",
    sender.get_xfer_descs(rows(source, [3, 4, 9]), "VRAM"),
    sender.get_xfer_descs(rows(target, [0, 15, 7]), "VRAM"),
    peer,
    b"done",
)
state = sender.transfer(handle)
deadline = time.monotonic() + 20
while state != "DONE":
    assert state in ("PROC", "DONE") and time.monotonic() < deadline, state
    state = sender.check_xfer_state(handle)
notes: list[bytes] = []
while not notes:
    assert time.monotonic() < deadline, "no notification"
    notes = receiver.get_new_notifs().get("sender", [])
assert notes == [b"done"]

expected = torch.zeros_like(target)
expected[[0, 15, 7]] = source[[3, 4, 9]]
assert torch.equal(target, expected)
print("CHECKED", flush=True)
# NIXL crashes an interpreter without a GPU driver at exit, after all work is done.
os._exit(0)
