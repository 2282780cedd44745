"""A prefill and a decode manager in one process, connected: the transfer library, the sockets and
the registration are real. ``connect`` writes what decode's handshake with the bootstrap server
would leave. What differs between the libraries is in ``component.nixl`` and
``component.mooncake``."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import zmq

from component.transfer.bare import buffers
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.decode.invariants import idle_rooms
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.utils import DisaggregationMode

PAGE, PAGES, LAYERS, AUX = 4, 48, 2, 8
ADDRESS = "127.0.0.1:8998"
LIMIT_S = 30.0
DONE = (KVPoll.Success, KVPoll.Success)
LOST = (KVPoll.Failed, KVPoll.Failed)


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for another thread or for the transport; an error names what did not happen."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.0005)


def pages(*numbers: int) -> np.ndarray:
    """A page list as SGLang keeps it."""
    return np.array(numbers, dtype=np.int32)


class Side:
    """One server's pool, metadata and transfer manager."""

    def __init__(self, manager: Any, mode: Any) -> None:
        """``manager`` is one without an engine, with its library's agent or engine."""
        self.kv = [torch.zeros(PAGES, PAGE * 8) for _ in range(2 * LAYERS)]
        self.aux = torch.zeros(AUX, 16, dtype=torch.int32)
        #: What SGLang calls state: an index, in pages with the numbers of the KV's.
        self.index = [torch.zeros(PAGES, 24) for _ in range(LAYERS)]
        manager.kv_args = buffers(self.kv, self.aux, PAGE)
        manager.kv_args.__dict__.update(
            state_data_ptrs=[layer.data_ptr() for layer in self.index],
            state_data_lens=[layer.nbytes for layer in self.index],
            state_item_lens=[layer[0].nbytes for layer in self.index],
            state_type="nsa",
        )
        manager.__dict__.update(
            disaggregation_mode=mode,
            local_ip="127.0.0.1",
            heartbeat_interval=LIMIT_S,
            max_failures=2,
            waiting_timeout=LIMIT_S,
            bootstrap_timeout=LIMIT_S,
        )
        manager.server_socket = zmq.Context.instance().socket(zmq.PULL)
        manager.rank_port = manager.server_socket.bind_to_random_port("tcp://127.0.0.1")
        manager.start_delta(mode, manager.server_args)
        manager.register_buffer_to_engine()
        self.manager = manager


class Hold:
    """Keeps what is being written under way."""

    def __init__(self) -> None:
        self._reached, self._released = threading.Event(), threading.Event()

    def wait(self) -> None:
        """Until something is under way."""
        assert self._reached.wait(LIMIT_S)

    def release(self) -> None:
        """It may end."""
        self._released.set()

    def is_over(self) -> bool:
        """Asked by the library where something is under way."""
        self._reached.set()
        return self._released.is_set()

    def block(self) -> None:
        """The same for a library whose calls return when they are done."""
        self._reached.set()
        assert self._released.wait(LIMIT_S)


class Pair:
    """Prefill and decode, connected. Each backend says how it starts and how it goes wrong."""

    #: The backend's module with its senders and receivers, and how their names start.
    ends: ClassVar[tuple[Any, str]]
    #: Whether decode is told of a write that is late while it is under way.
    tells_at_once: ClassVar[bool]
    #: What decode says of a room whose write failed.
    word_of_a_broken_write: ClassVar[str]
    prefill: Any
    decode: Any
    #: Of all pairs: what is late for one must not be taken for another's.
    _room_numbers = itertools.count(101)

    def __init__(self) -> None:
        self.prefill = self.side("prefill", DisaggregationMode.PREFILL)
        self.decode = self.side("decode", DisaggregationMode.DECODE)
        # Each page of prefill's pool has content of its own.
        for layer, tensor in enumerate([*self.prefill.kv, *self.prefill.index]):
            tensor += torch.arange(1, PAGES + 1)[:, None] + 1000 * layer
        self.start()
        self.decode.manager.servers._servers[ADDRESS].capabilities = wire.OURS
        self.connect()
        self.register()

    # ---- what each backend does in its own way ----

    def side(self, name: str, mode: Any) -> Any:
        """One server."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the threads that read messages and send pages."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave nothing running that would disturb the next pair."""

    @property
    def peer(self) -> str:
        """The name by which prefill knows the decode rank."""
        raise NotImplementedError

    def allowing(self, seconds: float) -> AbstractContextManager[None]:
        """How long a transfer that begins meanwhile may take."""
        raise NotImplementedError

    def held_up(self) -> AbstractContextManager[Hold]:
        """What is written meanwhile stays under way until it is released, or to the end of this."""
        raise NotImplementedError

    def breaking(self) -> AbstractContextManager[None]:
        """The library raises ZeroDivisionError instead of sending."""
        raise NotImplementedError

    # ---- rooms ----

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
        manager.servers.connected(ADDRESS, [info])

    def register(self) -> None:
        """Decode lists its buffers; a room is needed for it, which is never announced."""
        receiver = self.receiver(self.next_room())
        receiver._register_kv_args()
        until(lambda: self.prefill.manager.decode_kv_args_table, "registration")
        receiver.clear()

    def next_room(self) -> int:
        """A room number that was not used yet."""
        return next(self._room_numbers)

    def receiver(self, room: int) -> Any:
        """Decode's end of a room, handshake done."""
        receiver = self._end("Receiver")(self.decode.manager, ADDRESS, room)
        if receiver.conclude_state is None:
            receiver.init(0)
        return receiver

    def sender(self, room: int) -> Any:
        """Prefill's end of a room."""
        return self._end("Sender")(self.prefill.manager, ADDRESS, room, [0], 0)

    def room(self, number: int | None = None) -> tuple[Any, Any]:
        """A new room: its sender and its receiver."""
        room = self.next_room() if number is None else number
        receiver = self.receiver(room)
        return self.sender(room), receiver

    def _end(self, kind: str) -> Any:
        module, name = self.ends
        return getattr(module, f"{name}KV{kind}")

    def announced(self, sender: Any) -> None:
        """Wait until prefill has read the room's announcement."""
        until(lambda: sender.poll() == KVPoll.WaitingForInput, "bootstrapped")

    def ready_room(
        self,
        *targets: int,
        prefix: int = 0,
        prompt: int | None = None,
        slot: int = 5,
        number: int | None = None,
        index: bool = False,
        state: np.ndarray | None = None,
    ) -> tuple[Any, Any]:
        """A room whose ``targets`` decode has announced behind ``prefix`` tokens, and whose sender
        waits for the KV of ``prompt`` pages; metadata go from slot 3 to ``slot``. ``index``: pages
        of an index were listed too; ``state``: or these indices."""
        sender, receiver = self.room(number)
        state = pages(*targets) if index else state
        receiver.announce(pages(*targets), slot, prefix_len=prefix, state_indices=state)
        self.announced(sender)
        sender.init(len(targets) if prompt is None else prompt, 3)
        return sender, receiver

    def finish(self, sender: Any, receiver: Any) -> tuple[int, int]:
        """Poll both until each has ended; returns how."""
        ends = (KVPoll.Success, KVPoll.Failed)
        until(lambda: sender.poll() in ends, "sender")
        until(lambda: receiver.poll() in ends, "receiver")
        return sender.poll(), receiver.poll()

    def serve(self, source: int, target: int) -> None:
        """A room of one page from begin to end."""
        sender, receiver = self.ready_room(target)
        sender.send(pages(source))
        assert self.finish(sender, receiver) == DONE
        self.clear(sender, receiver)

    @staticmethod
    def clear(sender: Any, receiver: Any) -> None:
        """Both were served, are so for good, and are done with."""
        for end in (sender, receiver):
            assert {end.poll() for _ in range(3)} == {KVPoll.Success}
            end.clear()

    # ---- what became of them ----

    @staticmethod
    def reason(endpoint: Any) -> str:
        """What the scheduler is told of a failed room; its entries are gone after that."""
        with pytest.raises(Exception) as told:
            endpoint.failure_exception()
        return str(told.value)

    @staticmethod
    def sent() -> int:
        """Bytes of KV and state sent so far, by all pairs."""
        return STATS.totals["kv_transfer_sent_bytes",]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return sum(self.prefill.manager.kv_args.kv_item_lens)

    def leftovers(self) -> list[str]:
        """Entries of rooms, of which there must be none."""
        return [*idle_rooms(self.prefill.manager), *idle_rooms(self.decode.manager)]

    def arrived(self, source: list[int], target: list[int], *, index: bool = False) -> bool:
        """Whether decode's memory holds exactly ``source`` pages at ``target``, nothing else; with
        their ``index``, or none of it."""
        pairs = zip(
            [*self.decode.kv, *self.decode.index],
            [*self.prefill.kv, *self.prefill.index],
            strict=True,
        )
        for number, (ours, theirs) in enumerate(pairs):
            expected = torch.zeros_like(ours)
            if number < len(self.decode.kv) or index:
                expected[target] = theirs[source]
            if not torch.equal(ours, expected):
                return False
        return True
