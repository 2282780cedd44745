"""Both ends of a room, through SGLang's own managers, and the two loops that are measured.

Which of ``stock`` and ``ours`` it is, only the environment of the process says
(``SGLANG_PATCHSET=0`` is stock); ``radix`` is ours with the flag of decode's radix cache, and
prompts of which decode has nothing. Managers are built by their constructors, as SGLang's
scheduler does, over a real bootstrap server.
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
#: Contents of prefill's pool are below it; decode's is filled with it first.
_NOTHING = 251
_PREFILL_PAUSE_S = 2e-4


def _wait(ready: Callable[[], bool], otherwise: str, pause_s: float = 0.01) -> None:
    """Raises TimeoutError with ``otherwise`` after a minute."""
    deadline = time.monotonic() + 60.0
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(pause_s)


class _End:
    """A manager with its pool and metadata buffers, in a process of its own."""

    def __init__(self, setup: Setup, process: int, mode: DisaggregationMode) -> None:
        """``process``: 0 for prefill, 1 and more for the decode peers."""
        run, shape = setup.run, setup.shape
        self.setup, self.address = setup, f"{HOST}:{setup.ports[0]}"
        self.takes_delta = setup.arm == "radix" and mode == DisaggregationMode.DECODE
        self._conn = importlib.import_module(f"sglang.srt.disaggregation.{setup.backend}.conn")
        # What the managers read of SGLang's ``ServerArgs``, whose constructor wants a model.
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
        """SGLang's class, or the one that took its place."""
        return getattr(self._conn, f"{self.setup.backend.capitalize()}KV{kind}")

    def content(self, buffer: int) -> torch.Tensor:
        """The byte of each page of a buffer on the prefill side."""
        pages = torch.arange(self.setup.run.pool_pages, device=self.setup.device)
        return ((pages * 31 + buffer * 7) % _NOTHING).to(torch.uint8)

    def _bootstrap_answers(self) -> bool:
        try:
            return requests.get(f"http://{self.address}/health", timeout=1).status_code == 200
        except requests.RequestException:
            return False


class Prefill(_End):
    """What the prefill scheduler does with a manager."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, 0, DisaggregationMode.PREFILL)
        for index, buffer in enumerate(self.buffers):
            buffer[:] = self.content(index)[:, None]
        self._work = _units(setup.run.work_s)

    def senders(self, rooms: list[Room]) -> dict[int, Any]:
        """Senders of rooms that decode has announced; not part of any measurement."""
        sender = self.of_backend("Sender")
        made = {
            room.number: sender(self.manager, self.address, room.number, [0], 0) for room in rooms
        }
        for number, each in made.items():
            otherwise = f"room {number} was not announced"
            _wait(lambda each=each: each.poll() == KVPoll.WaitingForInput, otherwise, 0.001)
        return made

    def send(self, rooms: list[Room], senders: dict[int, Any], limit_s: float) -> Round:
        """Send all rooms, at most ``in_flight`` of them under way, and wait for their ends.

        As in SGLang's event loop, one thread sends the rooms whose turn it is, then polls all rooms
        under way, then does something else (here: sleeps). After ``limit_s`` rooms without an end
        are ``stuck``.
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
                except Exception as error:  # it would end the stock scheduler
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
    """As the scheduler does when a request leaves its queue."""
    room.ended, room.outcome = time.monotonic(), outcome
    sender = senders.pop(room.number)
    if outcome == "failed":
        try:
            sender.failure_exception()
        except Exception as error:  # it always raises: that is how it tells the reason
            room.error = room.error or str(error)
    elif hasattr(sender, "clear"):
        sender.clear()


def _clocks() -> tuple[float, float, float]:
    """Seconds: monotonic, CPU of this thread, and for which it was ready to run without a core."""
    # Time on a run queue, nanoseconds, is the second number of the kernel's sched-stats. The
    # first, CPU time, is as old as the last tick.
    stat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    return time.monotonic(), time.thread_time(), int(stat.split()[1]) * 1e-9


def _units(seconds: float) -> int:
    """So much work takes ``seconds`` on a core of its own."""
    trials = []
    for _ in range(25):
        began = time.perf_counter()
        _some(100)
        trials.append(time.perf_counter() - began)
    return round(seconds / (min(trials) / 100))


def _some(units: int) -> None:
    """Python work: small objects made and dropped, as a scheduler does."""
    table: dict[int, tuple[int, str]] = {}
    for number in range(units):
        table[number % 64] = (number, str(number))


class Decode(_End):
    """What the decode scheduler does with a manager."""

    def __init__(self, setup: Setup, process: int) -> None:
        super().__init__(setup, process, DisaggregationMode.DECODE)
        for buffer in self.buffers:
            buffer.fill_(_NOTHING)
        self._receivers: dict[int, Any] = {}
        ready = self.manager.try_ensure_parallel_info
        _wait(lambda: ready(self.address), "the prefill process did not register", 0.05)

    @property
    def name(self) -> str:
        """What prefill knows it by."""
        if self.setup.backend == "nixl":
            return str(self.manager.agent.name)
        return str(self.manager.engine.get_session_id())

    def announce(self, room: Room) -> None:
        """Tell prefill where the room's pages go."""
        receiver = self.of_backend("Receiver")(self.manager, self.address, room.number)
        if self.takes_delta:  # the addresses of prefill's ranks are asked in the background
            _wait(lambda: receiver.is_ready(0), "prefill does not report its ranks' addresses")
            receiver.init(0)
            receiver.announce(room.destination, room.slot, prefix_len=0)
        else:
            receiver.init(0)
            receiver.send_metadata(room.destination, room.slot)
        self._receivers[room.number] = receiver

    def arrivals(self, limit_s: float) -> dict[int, float]:
        """When each room that was announced was seen complete; without those that failed, or had
        no end within ``limit_s``."""
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
        """Destination pages that differ from their source, over all buffers. First, middle and
        last byte of a page are looked at."""
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
