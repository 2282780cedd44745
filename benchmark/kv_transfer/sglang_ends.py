"""Both ends of a room, through SGLang's own managers: the arms ``stock``, ``ours`` and ``radix``.

Which of the first two it is, only the environment of the process says (``SGLANG_PATCHSET=0`` is
stock); ``radix`` is ours with the flag of decode's radix cache, and prompts of which decode has
nothing.
Managers are built by their constructors, as SGLang's scheduler does, over a real bootstrap server.
"""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace
from typing import Any

from benchmark.kv_transfer.pool import Pool
from benchmark.kv_transfer.records import Pages, Peer, RoomPlan, Setup

HOST = "127.0.0.1"
_PREFIX = {"nixl": "Nixl", "mooncake": "Mooncake"}
_CONNECT_S = 60.0


def preload() -> None:
    """Import what takes long."""
    for name in (
        "sglang.srt.disaggregation.nixl.conn",
        "sglang.srt.disaggregation.mooncake.conn",
        "sglang.srt.distributed",
        "sglang.srt.layers.dp_attention",
    ):
        importlib.import_module(name)


def _server_args(setup: Setup) -> Any:
    """What the managers read of SGLang's ``ServerArgs``, whose constructor wants a model."""
    return SimpleNamespace(
        host=HOST,
        disaggregation_bootstrap_port=setup.bootstrap_port,
        disaggregation_mode=setup.role,
        disaggregation_decode_enable_radix_cache=_has_flag(setup),
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


def _has_flag(setup: Setup) -> bool:
    return setup.arm == "radix" and setup.role == "decode"


def _start_ranks(setup: Setup, args: Any) -> None:
    """One tensor parallel rank of one."""
    import torch

    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    init_distributed_environment(
        backend="gloo",
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"tcp://{HOST}:{setup.dist_port}",
    )
    initialize_model_parallel()
    initialize_dp_attention(args, SimpleNamespace(hidden_size=8, dtype=torch.float16))


class _End:
    """A manager with its pool and metadata buffers."""

    def __init__(self, setup: Setup, pool: Pool) -> None:
        import torch

        from sglang.srt.disaggregation.base.conn import KVArgs
        from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers

        self.setup, self.pool = setup, pool
        self._conn = importlib.import_module(f"sglang.srt.disaggregation.{setup.backend}.conn")
        self.address = f"{HOST}:{setup.bootstrap_port}"
        server_args = _server_args(setup)
        _start_ranks(setup, server_args)
        if setup.backend == "mooncake":
            from sglang.srt.distributed.device_communicators import mooncake_transfer_engine

            mooncake_transfer_engine.init_mooncake_transfer_engine(HOST, 0, None)
        args = KVArgs()
        args.engine_rank = args.pp_rank = args.prefill_start_layer = args.gpu_id = 0
        args.system_dp_rank = 0
        args.ib_device = None
        pool.describe(args)
        self._metadata = MetadataBuffers(setup.slots, 16, torch.float32)
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self._metadata.get_buf_infos()
        args.state_data_ptrs, args.state_data_lens, args.state_item_lens = [], [], []
        args.state_type = "none"
        if setup.role == "prefill":
            self._bootstrap = self._class("BootstrapServer")(HOST, setup.bootstrap_port)
            self._wait_for_bootstrap()
        mode = DisaggregationMode.PREFILL if setup.role == "prefill" else DisaggregationMode.DECODE
        self.manager = self._class("Manager")(args, mode, server_args, setup.shape.mla)

    def _class(self, kind: str) -> Any:
        return getattr(self._conn, f"{_PREFIX[self.setup.backend]}KV{kind}")

    def _wait_for_bootstrap(self) -> None:
        import requests

        deadline = time.monotonic() + _CONNECT_S
        while True:
            try:
                if requests.get(f"http://{self.address}/health", timeout=1).status_code == 200:
                    return
            except requests.RequestException:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError("the bootstrap server does not answer")
            time.sleep(0.02)


class Prefill(_End):
    """What the prefill scheduler does with a manager."""

    def sender(self, plan: RoomPlan) -> Sender:
        """A room whose announcement is or will be there."""
        endpoint = self._class("Sender")(self.manager, self.address, plan.room, [0], 0)
        return Sender(endpoint, plan)

    def step(self) -> None:
        """What our patch set adds to the scheduler's step; nothing in the stock release."""
        settle = getattr(self.manager, "settle", None)
        if settle is not None:
            settle()


class Sender:
    """One room at prefill."""

    def __init__(self, endpoint: Any, plan: RoomPlan) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self._endpoint, self._plan, self._poll = endpoint, plan, KVPoll
        self.error = ""

    def ready(self) -> bool:
        """Whether decode has announced it."""
        return bool(self._endpoint.poll() == self._poll.WaitingForInput)

    def start(self) -> None:
        """As the scheduler does before the first chunk."""
        self._endpoint.init(len(self._plan.source), self._plan.slot)

    def send(self, pages: Pages) -> None:
        """The call that is measured."""
        self._endpoint.send(pages)

    def poll(self) -> str | None:
        """``done``, ``failed``, or None while it is under way."""
        state = self._endpoint.poll()
        if state == self._poll.Success:
            return "done"
        return "failed" if state == self._poll.Failed else None

    def close(self, outcome: str) -> None:
        """As the scheduler does when a request leaves its queue."""
        if outcome == "failed":
            try:
                self._endpoint.failure_exception()
            except Exception as error:  # it always raises: that is how it tells the reason
                self.error = str(error)
        elif hasattr(self._endpoint, "clear"):
            self._endpoint.clear()


class Decode(_End):
    """What the decode scheduler does with a manager."""

    def __init__(self, setup: Setup, pool: Pool) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        super().__init__(setup, pool)
        self._states = KVPoll
        self._receivers: dict[int, Any] = {}
        deadline = time.monotonic() + _CONNECT_S
        while not self.manager.try_ensure_parallel_info(self.address):
            if time.monotonic() > deadline:
                raise TimeoutError("the prefill process did not register")
            time.sleep(0.05)

    def describe(self, pid: int) -> Peer:
        """Its name is what prefill knows it by."""
        if self.setup.backend == "nixl":
            return Peer(str(self.manager.agent.name), pid)
        return Peer(str(self.manager.engine.get_session_id()), pid)

    def announce(self, plan: RoomPlan) -> None:
        """Tell prefill where the room's pages go."""
        receiver = self._class("Receiver")(self.manager, self.address, plan.room)
        if _has_flag(self.setup):
            deadline = time.monotonic() + _CONNECT_S
            while not receiver.is_ready(0):  # its ranks are asked in the background
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        "the prefill process does not report the addresses of its ranks"
                    )
                time.sleep(0.01)
            receiver.init(0)
            receiver.announce(plan.destination, plan.slot, prefix_len=0)
        else:
            receiver.init(0)
            receiver.send_metadata(plan.destination, plan.slot)
        self._receivers[plan.room] = receiver

    def poll(self, room: int) -> str | None:
        """``done``, ``failed``, or None while it is under way."""
        state = self._receivers[room].poll()
        if state == self._states.Success:
            return "done"
        return "failed" if state == self._states.Failed else None

    def forget(self, room: int) -> None:
        """The room is done with."""
        self._receivers.pop(room).clear()
