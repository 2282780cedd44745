"""Both ends of a room, through SGLang's own managers, and the two measured loops.

Only the environment of the process selects ``stock`` or ``ours`` (``SGLANG_PATCHSET=0`` is stock).
``radix`` is ``ours`` with the flag of decode's radix cache, for prompts that are not in that cache.
Managers are built by their constructors, as in SGLang's scheduler, over a real bootstrap server.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import requests
import torch

from benchmark.kv_transfer.runs import Room, Round, Setup
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.distributed.device_communicators import mooncake_transfer_engine
from sglang.srt.layers.dp_attention import initialize_dp_attention

HOST = "127.0.0.1"
#: Initial content of decode's pool. All bytes of prefill's pool are lower.
_NOTHING = 251
_PREFILL_PAUSE_S = 2e-4


def _wait(ready: Callable[[], bool], otherwise: str, pause_s: float = 0.01) -> None:
    """Wait until ``ready``. Raises TimeoutError with the text ``otherwise`` after a minute."""
    deadline = time.monotonic() + 60.0
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(pause_s)


class _End:
    """A manager with its pool and metadata buffers, in its own process."""

    def __init__(self, setup: Setup, process: int, mode: DisaggregationMode) -> None:
        """``process``: 0 for prefill, 1 and above for the decode peers."""
        run, shape = setup.run, setup.shape
        self.setup, self.address = setup, f"{HOST}:{setup.ports[0]}"
        self.takes_delta = setup.arm == "radix" and mode == DisaggregationMode.DECODE
        self._conn = importlib.import_module(f"sglang.srt.disaggregation.{setup.backend}.conn")
        # The fields that managers read of SGLang's ``ServerArgs``, whose constructor needs a model.
        server_args = SimpleNamespace(
            host=HOST,
            disaggregation_bootstrap_port=setup.ports[0],
            disaggregation_mode=mode.value,
            disaggregation_decode_enable_radix_cache=self.takes_delta,
            dist_init_addr=None,
            dp_size=1,
            pp_size=1,
            attn_cp_size=1,
            enable_dp_attention=False,
            moe_dense_tp_size=None,
            enable_hisparse=False,
            kv_cache_dtype="auto",
            load_balance_method="round_robin",
            chunked_prefill_size=8192,
            device=setup.device,
        )
        init_distributed_environment(
            backend="gloo",
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"tcp://{HOST}:{setup.ports[1 + process]}",
        )
        initialize_model_parallel()
        initialize_dp_attention(server_args, SimpleNamespace(hidden_size=8, dtype=torch.float16))
        if setup.backend == "mooncake":
            mooncake_transfer_engine.init_mooncake_transfer_engine(HOST, 0, None)

        page_bytes = run.page_size * shape.row_bytes
        self.buffers = [
            torch.empty((run.pool_pages, page_bytes), dtype=torch.uint8, device=setup.device)
            for _ in range(shape.buffers)
        ]
        args = KVArgs()
        args.engine_rank = args.pp_rank = args.prefill_start_layer = args.gpu_id = 0
        args.system_dp_rank = 0
        args.ib_device = None
        args.kv_data_ptrs = [buffer.data_ptr() for buffer in self.buffers]
        args.kv_data_lens = [buffer.nbytes for buffer in self.buffers]
        args.kv_item_lens = [page_bytes] * shape.buffers
        args.page_size = run.page_size
        args.kv_head_num = args.total_kv_head_num = shape.kv_heads
        self._metadata = MetadataBuffers(run.rooms_a_peer, 16, torch.float32)
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self._metadata.get_buf_infos()
        args.state_data_ptrs, args.state_data_lens, args.state_item_lens = [], [], []
        args.state_type = "none"
        if mode == DisaggregationMode.PREFILL:
            self._bootstrap = self.of_backend("BootstrapServer")(HOST, setup.ports[0])
            _wait(self._bootstrap_answers, "the bootstrap server does not answer")
        self.manager = self.of_backend("Manager")(args, mode, server_args, shape.mla)

    def of_backend(self, kind: str) -> Any:
        """Return SGLang's class, or its replacement."""
        return getattr(self._conn, f"{self.setup.backend.capitalize()}KV{kind}")

    def content(self, buffer: int) -> torch.Tensor:
        """Return the byte of each page of a buffer on the prefill side."""
        pages = torch.arange(self.setup.run.pool_pages, device=self.setup.device)
        return ((pages * 31 + buffer * 7) % _NOTHING).to(torch.uint8)

    def _bootstrap_answers(self) -> bool:
        try:
            return requests.get(f"http://{self.address}/health", timeout=1).status_code == 200
        except requests.RequestException:
            return False


class Prefill(_End):
    """The prefill side: a manager, used as the prefill scheduler does."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, 0, DisaggregationMode.PREFILL)
        for index, buffer in enumerate(self.buffers):
            buffer[:] = self.content(index)[:, None]
        self._work = _units(setup.run.work_s)

    def senders(self, rooms: list[Room]) -> dict[int, Any]:
        """Return senders of rooms that decode has announced. Not measured."""
        sender_class = self.of_backend("Sender")
        senders = {
            room.number: sender_class(self.manager, self.address, room.number, [0], 0)
            for room in rooms
        }
        for number, sender in senders.items():
            otherwise = f"room {number} was not announced"
            _wait(lambda sender=sender: sender.poll() == KVPoll.WaitingForInput, otherwise, 0.001)
        return senders

    def send(self, rooms: list[Room], senders: dict[int, Any], limit_s: float) -> Round:
        """Send all rooms, at most ``in_flight`` of them at once, and wait for their ends.

        As in SGLang's event loop, one thread sends the next rooms, then polls all rooms in flight,
        then does other work (here: sleeps). Rooms without an end after ``limit_s`` are ``stuck``.
        """
        run = self.setup.run
        waiting, active = deque(rooms), dict[int, Room]()
        clocks = [_clocks()]
        cpu, began = time.process_time(), time.monotonic()
        while (waiting or active) and time.monotonic() - began < limit_s:
            turn = time.monotonic()
            while waiting and len(active) < run.in_flight:
                room = waiting.popleft()
                room.began = turn
                active[room.number] = room
                try:
                    _send(senders[room.number], room)
                except Exception as error:  # libraries raise bare exceptions of several kinds
                    room.error = f"send raised: {error!r}"
                    _end(active.pop(room.number), senders, "failed")
                if run.work_s:
                    break
            for room in list(active.values()):
                try:
                    state = senders[room.number].poll()
                except Exception as error:  # would end the stock scheduler
                    room.error, state = f"poll raised: {error!r}", KVPoll.Failed
                if state in (KVPoll.Success, KVPoll.Failed):
                    outcome = "done" if state == KVPoll.Success else "failed"
                    _end(active.pop(room.number), senders, outcome)
            _some(self._work)
            if active:
                time.sleep(_PREFILL_PAUSE_S)
            if run.work_s:
                clocks.append(_clocks())
        wall, used = time.monotonic() - began, time.process_time() - cpu
        for room in active.values():
            _end(room, senders, "stuck")
        page_bytes = sum(buffer[0].nbytes for buffer in self.buffers)
        moved = sum(len(room.source) for room in rooms if room.outcome == "done") * page_bytes
        return Round(rooms, wall, used, moved, np.diff(clocks, axis=0) if run.work_s else None)


def _send(sender: Any, room: Room) -> None:
    sender.init(len(room.source), room.slot)
    cpu, began = time.thread_time(), time.perf_counter()
    sender.send(room.source)
    room.send_s = time.perf_counter() - began
    room.send_cpu_s = time.thread_time() - cpu


def _end(room: Room, senders: dict[int, Any], outcome: str) -> None:
    """End a room, as the scheduler does when a request leaves its queue."""
    room.ended, room.outcome = time.monotonic(), outcome
    sender = senders.pop(room.number)
    if outcome == "failed":
        try:
            sender.failure_exception()
        except Exception as error:  # always raised, as it carries the reason
            room.error = room.error or str(error)
    elif hasattr(sender, "clear"):
        sender.clear()


def _clocks() -> tuple[float, float, float]:
    """Return seconds of the monotonic clock, of this thread's CPU time, and on a run queue."""
    # The second number of schedstat is the time on a run queue in nanoseconds. The first one, CPU
    # time, is updated only at each tick, so it is not used.
    stat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    return time.monotonic(), time.thread_time(), int(stat.split()[1]) * 1e-9


def _units(seconds: float) -> int:
    """Return the number of work units that take ``seconds`` on an idle core."""
    trials = []
    for _ in range(25):
        began = time.perf_counter()
        _some(100)
        trials.append(time.perf_counter() - began)
    return round(seconds / (min(trials) / 100))


def _some(units: int) -> None:
    """Do Python work: create and drop small objects, as a scheduler does."""
    table: dict[int, tuple[int, str]] = {}
    for number in range(units):
        table[number % 64] = (number, str(number))


class Decode(_End):
    """The decode side: a manager, used as the decode scheduler does."""

    def __init__(self, setup: Setup, process: int) -> None:
        super().__init__(setup, process, DisaggregationMode.DECODE)
        for buffer in self.buffers:
            buffer.fill_(_NOTHING)
        self._receivers: dict[int, Any] = {}
        ready = self.manager.try_ensure_parallel_info
        _wait(lambda: ready(self.address), "the prefill process did not register", 0.05)

    @property
    def name(self) -> str:
        """Name by which prefill knows this peer."""
        if self.setup.backend == "nixl":
            return str(self.manager.agent.name)
        return str(self.manager.engine.get_session_id())

    def announce(self, room: Room) -> None:
        """Announce the room's destination pages to prefill."""
        receiver = self.of_backend("Receiver")(self.manager, self.address, room.number)
        if self.takes_delta:  # the addresses of prefill's ranks are queried in the background
            _wait(lambda: receiver.is_ready(0), "prefill does not report its ranks' addresses")
            receiver.init(0)
            from sglang.srt.disaggregation.delta.wire import DeltaFrame

            receiver.announce(DeltaFrame(decode_prefix_len=0), room.destination, room.slot)
        else:
            receiver.init(0)
            receiver.send_metadata(room.destination, room.slot)
        self._receivers[room.number] = receiver

    def arrivals(self, limit_s: float) -> dict[int, float]:
        """Return the time at which each announced room was seen complete. Rooms that failed, or did
        not end within ``limit_s``, are left out."""
        deadline, arrived = time.monotonic() + limit_s, {}
        while self._receivers and time.monotonic() < deadline:
            for number, receiver in list(self._receivers.items()):
                state = receiver.poll()
                if state == KVPoll.Success:
                    arrived[number] = time.monotonic()
                if state in (KVPoll.Success, KVPoll.Failed):
                    self._receivers.pop(number).clear()
            if self._receivers:
                time.sleep(self.setup.run.decode_pause_s)
        return arrived

    def wrong_pages(self, room: Room) -> int:
        """Return the number of destination pages that differ from their source, over all buffers.
        Only the first, middle and last byte of a page are compared."""
        source, destination = (
            torch.from_numpy(side.astype("int64")).to(self.setup.device)
            for side in (room.source, room.destination)
        )
        size, wrong = self.buffers[0].shape[1], 0
        places = torch.tensor([0, size // 2, size - 1], device=self.setup.device)
        for index, buffer in enumerate(self.buffers):
            expected = self.content(index)[source][:, None]
            wrong += int((buffer[destination[:, None], places] != expected).any(dim=1).sum())
        return wrong
