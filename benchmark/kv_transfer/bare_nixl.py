"""The arm ``bare`` over NIXL: the library alone, every transfer prepared outside the timing.

A room is one transfer over ranges of neighbouring pages in all buffers, so that ``send`` is one
post. No metadata, no bootstrap, no manager. Agents are configured as ours are (NIXL's progress
thread sleeps while nothing comes), or, in the arm ``bare-stock``, as SGLang's are (it spins).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmark.kv_transfer.patterns import Pages, RoomPlan, merged
from benchmark.kv_transfer.pool import Pool
from benchmark.kv_transfer.probe import Probe
from benchmark.kv_transfer.records import Peer, Setup

#: Of SGLang's NIXL manager on the prefill side.
_PREFILL_THREADS = 8


def memory(device: str) -> str:
    """NIXL's name for the memory of a torch device."""
    return "VRAM" if device == "cuda" else "DRAM"


def make_agent(arm: str, pool: Pool, threads: int) -> Any:
    """An agent that has registered the pool."""
    from nixl import _api

    from sglang.srt.disaggregation.delta.nixl.agent import configured_agents

    with nullcontext() if arm == "bare-stock" else configured_agents(1 if threads else 0):
        config = _api.nixl_agent_config(backends=["UCX"], num_threads=threads)
        agent = _api.nixl_agent(str(uuid.uuid4()), config)
    regions = [(buffer.data_ptr(), buffer.nbytes, 0, "") for buffer in pool.buffers]
    agent.register_memory(regions, memory(pool.device))
    return agent


def rows(
    bases: Sequence[int], item_len: int, firsts: Pages, lengths: Pages
) -> npt.NDArray[np.uint64]:
    """(address, length, device) of every run in every buffer: (buffers x runs, 3)."""
    table = np.zeros((len(bases), len(firsts), 3), np.uint64)
    table[..., 0] = np.array(bases, np.uint64)[:, None] + firsts.astype(np.uint64) * item_len
    table[..., 1] = lengths.astype(np.uint64) * item_len
    return table.reshape(-1, 3)


class Prefill:
    """Posts what was prepared."""

    def __init__(self, setup: Setup, pool: Pool, probe: Probe) -> None:
        self._pool = pool
        self.agent = make_agent(setup.arm, pool, _PREFILL_THREADS)
        self._peers: Sequence[Peer] = ()
        probe.watch_nixl(self.agent)

    def connect(self, peers: Sequence[Peer]) -> None:
        """Make the peers known to the agent."""
        self._peers = peers
        for peer in peers:
            self.agent.add_remote_agent(peer.metadata)

    def sender(self, plan: RoomPlan) -> Sender:
        """A room, prepared."""
        peer, pool = self._peers[plan.peer], self._pool
        sources, destinations, lengths = merged(plan.source, plan.destination)
        kind = memory(pool.device)
        handle = self.agent.initialize_xfer(
            "WRITE",
            self.agent.get_xfer_descs(rows(pool.bases, pool.item_len, sources, lengths), kind),
            self.agent.get_xfer_descs(rows(peer.bases, pool.item_len, destinations, lengths), kind),
            peer.name,
            f"{plan.room}_kv".encode(),
        )
        return Sender(self.agent, handle)

    def step(self) -> None:
        """Nothing."""


class Sender:
    """One prepared transfer."""

    error = ""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent, self._handle = agent, handle
        self._posted = False

    def ready(self) -> bool:
        """It is when it was made."""
        return True

    def start(self) -> None:
        """Nothing."""

    def send(self, pages: Pages) -> None:
        """Post the whole room, whatever its chunks are."""
        if self._posted:
            return
        self._posted = True
        if self._agent.transfer(self._handle) == "ERR":
            raise RuntimeError("NIXL refused a transfer")

    def poll(self) -> str | None:
        """``done``, ``failed``, or None while it is under way."""
        return {"DONE": "done", "ERR": "failed"}.get(self._agent.check_xfer_state(self._handle))

    def close(self, outcome: str) -> None:
        """Release the handle; NIXL raises for one that is under way."""
        if outcome != "stuck":
            self._agent.release_xfer_handle(self._handle)


class Decode:
    """Waits for notifications."""

    def __init__(self, setup: Setup, pool: Pool) -> None:
        self._pool = pool
        self.agent = make_agent(setup.arm, pool, 0)
        self._arrived: set[int] = set()

    def describe(self, pid: int) -> Peer:
        """What the other agent needs."""
        metadata = self.agent.get_agent_metadata()
        return Peer(self.agent.name, pid, metadata, tuple(self._pool.bases))

    def announce(self, plan: RoomPlan) -> None:
        """Nothing: prefill has the plan."""

    def poll(self, room: int) -> str | None:
        """``done`` once its notification has come."""
        for messages in self.agent.get_new_notifs().values():
            self._arrived.update(int(message.split(b"_")[0]) for message in messages)
        return "done" if room in self._arrived else None

    def forget(self, room: int) -> None:
        """The room is done with."""
        self._arrived.discard(room)
