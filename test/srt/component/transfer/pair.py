"""A prefill and a decode manager in one process, connected: the transfer library, the sockets and
the registration are real. ``connect`` sets the result of decode's handshake with the bootstrap
server. ``component.nixl`` and ``component.mooncake`` have the parts that depend on the library."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
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
from sglang.srt.patchset import environment

PAGE, PAGES, LAYERS, AUX = 4, 48, 2, 8
ADDRESS = "127.0.0.1:8998"
LIMIT_S = 30.0
DONE = (KVPoll.Success, KVPoll.Success)
LOST = (KVPoll.Failed, KVPoll.Failed)


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for another thread or for the transport; raise TimeoutError with ``what`` otherwise."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.0005)


def pages(*numbers: int) -> np.ndarray:
    """Return a page list in SGLang's format."""
    return np.array(numbers, dtype=np.int32)


def frame(prefix: int) -> wire.DeltaFrame:
    """Return the announcement of a request with ``prefix`` tokens on decode."""
    return wire.DeltaFrame(decode_prefix_len=prefix)


class Side:
    """One server's pool, metadata and transfer manager."""

    def __init__(self, manager: Any, mode: Any) -> None:
        """``manager``: from ``without_engine``, with its library's agent or engine."""
        self.kv = [torch.zeros(PAGES, PAGE * 8) for _ in range(2 * LAYERS)]
        self.aux = torch.zeros(AUX, 16, dtype=torch.int32)
        #: SGLang's state: an index, with the same page numbers as the KV.
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
    """Keeps writes in flight until it is released."""

    def __init__(self) -> None:
        self._reached, self._released = threading.Event(), threading.Event()

    def wait(self) -> None:
        """Wait until a write is in flight."""
        assert self._reached.wait(LIMIT_S)

    def release(self) -> None:
        """Let the write end."""
        self._released.set()

    def is_over(self) -> bool:
        """Return True if the write may end; called while it is in flight."""
        self._reached.set()
        return self._released.is_set()

    def block(self) -> None:
        """Block until the write may end, for a library with synchronous calls."""
        self._reached.set()
        assert self._released.wait(LIMIT_S)


class Pair:
    """Prefill and decode, connected. Subclasses start their backend and make it fail."""

    #: The backend's module with its senders and receivers, and the start of their names.
    ends: ClassVar[tuple[Any, str]]
    #: SGLang's methods that start the threads of prefill's and of decode's manager.
    threads: ClassVar[tuple[str, str]]
    #: Time in seconds for which a broken transfer counts as in flight.
    quarantine_s: ClassVar[float] = environment.QUARANTINE_TIMEOUT.default
    #: True if prefill reports a late write while it is still in flight.
    tells_at_once: ClassVar[bool]
    #: Decode's reason for a room with a failed write.
    word_of_a_broken_write: ClassVar[str]
    prefill: Any
    decode: Any
    #: Shared by all pairs, so that a late message never matches another pair's room.
    _room_numbers = itertools.count(101)

    def __init__(self) -> None:
        self.prefill = self.side("prefill", DisaggregationMode.PREFILL)
        self.decode = self.side("decode", DisaggregationMode.DECODE)
        # Each page of prefill's pool has different content.
        for layer, tensor in enumerate([*self.prefill.kv, *self.prefill.index]):
            tensor += torch.arange(1, PAGES + 1)[:, None] + 1000 * layer
        self.start()
        self.decode.manager.servers._servers[ADDRESS].capabilities = wire.OURS
        self.connect()
        self.register()

    def start(self) -> None:
        """Start the threads that read messages and send pages."""
        of_prefill, of_decode = self.threads
        with pytest.MonkeyPatch.context() as patch:
            timeout = replace(environment.QUARANTINE_TIMEOUT, default=self.quarantine_s)
            patch.setattr(environment, "QUARANTINE_TIMEOUT", timeout)
            getattr(self.prefill.manager, of_prefill)()
        getattr(self.decode.manager, of_decode)()

    # ---- implemented by each backend ----

    def side(self, name: str, mode: Any) -> Any:
        """Create one server."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop everything that would disturb the next pair."""

    @property
    def peer(self) -> str:
        """The name by which prefill knows the decode rank."""
        raise NotImplementedError

    def held_up(self) -> AbstractContextManager[Hold]:
        """Keep writes in flight until they are released, or until the context ends."""
        raise NotImplementedError

    def breaking(self) -> AbstractContextManager[None]:
        """Let the library raise ZeroDivisionError instead of sending."""
        raise NotImplementedError

    # ---- rooms ----

    def connect(self) -> None:
        """Set the result of decode's handshake with the bootstrap server."""
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
        """Register decode's buffers, through a room that is never announced."""
        receiver = self.receiver(self.next_room())
        receiver._register_kv_args()
        until(lambda: self.prefill.manager.decode_kv_args_table, "registration")
        receiver.clear()

    def next_room(self) -> int:
        """Return an unused room number."""
        return next(self._room_numbers)

    def receiver(self, room: int) -> Any:
        """Return decode's end of a room, after the handshake."""
        receiver = self._end("Receiver")(self.decode.manager, ADDRESS, room)
        if receiver.conclude_state is None:
            receiver.init(0)
        return receiver

    def sender(self, room: int) -> Any:
        """Return prefill's end of a room."""
        return self._end("Sender")(self.prefill.manager, ADDRESS, room, [0], 0)

    def room(self, number: int | None = None) -> tuple[Any, Any]:
        """Return the sender and the receiver of a new room."""
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
        """Return a room with ``targets`` announced behind ``prefix`` tokens, and a sender that
        waits for the KV of ``prompt`` pages. Metadata go from slot 3 to ``slot``. ``index``: pages
        of an index were announced too; ``state``: or these indices."""
        sender, receiver = self.room(number)
        state = pages(*targets) if index else state
        receiver.announce(frame(prefix), pages(*targets), slot, state)
        self.announced(sender)
        sender.init(len(targets) if prompt is None else prompt, 3)
        return sender, receiver

    def finish(self, sender: Any, receiver: Any) -> tuple[int, int]:
        """Poll both until each has ended; return their final states."""
        ends = (KVPoll.Success, KVPoll.Failed)
        until(lambda: sender.poll() in ends, "sender")
        until(lambda: receiver.poll() in ends, "receiver")
        return sender.poll(), receiver.poll()

    def serve(self, source: int, target: int) -> None:
        """Serve a room of one page from begin to end."""
        sender, receiver = self.ready_room(target)
        sender.send(pages(source))
        assert self.finish(sender, receiver) == DONE
        self.clear(sender, receiver)

    @staticmethod
    def clear(sender: Any, receiver: Any) -> None:
        """Check that both ends stay successful, and clear them."""
        for end in (sender, receiver):
            assert {end.poll() for _ in range(3)} == {KVPoll.Success}
            end.clear()

    def expire(self, deadlines: bool = True) -> None:
        """Let the time pass in which a failed transfer may land, and the deadlines of all."""

        def expire(worker: Any) -> None:
            if deadlines:
                worker._deadlines[:] = sorted((0.0, *entry[1:]) for entry in worker._deadlines)
            for transfer in worker._posted:
                if transfer.settles_at:
                    transfer.settles_at = transfer.poll_at = worker._clock()

        for thread in self.prefill.manager.transfers._threads:
            thread.commands.put(expire)

    # ---- results ----

    @staticmethod
    def reason(endpoint: Any) -> str:
        """Return the scheduler's error for a failed room. Removes the room's entries."""
        with pytest.raises(Exception) as told:
            endpoint.failure_exception()
        return str(told.value)

    @staticmethod
    def sent() -> int:
        """Return the bytes of KV and state sent so far by all pairs."""
        return STATS.totals["kv_transfer_sent_bytes",]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return sum(self.prefill.manager.kv_args.kv_item_lens)

    def leftovers(self) -> list[str]:
        """Return the remaining entries of rooms; there must be none."""
        return [*idle_rooms(self.prefill.manager), *idle_rooms(self.decode.manager)]

    def arrived(self, source: list[int], target: list[int], *, index: bool = False) -> bool:
        """Return True if decode's memory holds exactly ``source`` pages at ``target`` and nothing
        else; with their ``index``, or none of it."""
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
