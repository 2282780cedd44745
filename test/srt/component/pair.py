"""What a test's prefill and decode managers in one process have in common, on any backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode.invariants import idle_rooms

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


class Rooms:
    """Makes rooms between ``prefill`` and ``decode``, and looks at what they left."""

    prefill: Any
    decode: Any
    #: The backend's module with its senders and receivers, and how their names start.
    ends: tuple[Any, str]
    _next_room = 100

    def fill(self) -> None:
        """Give each page of prefill's pool content of its own."""
        for layer, tensor in enumerate(self.prefill.kv):
            tensor += torch.arange(1, PAGES + 1)[:, None] + 1000 * layer

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

    def next_room(self) -> int:
        """A room number that was not used yet."""
        self._next_room += 1
        return self._next_room

    def receiver(self, room: int) -> Any:
        """Decode's end of a room, handshake done."""
        receiver = self._end("Receiver")(self.decode.manager, ADDRESS, room)
        if receiver.conclude_state is None:
            receiver.init(0)
        return receiver

    def sender(self, room: int) -> Any:
        """Prefill's end of a room."""
        return self._end("Sender")(self.prefill.manager, ADDRESS, room, [0], 0)

    def room(self) -> tuple[Any, Any]:
        """A new room: its sender and its receiver."""
        room = self.next_room()
        receiver = self.receiver(room)
        return self.sender(room), receiver

    def _end(self, kind: str) -> Any:
        module, name = self.ends
        return getattr(module, f"{name}KV{kind}")

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
