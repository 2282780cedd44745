"""The two servers of an arm: each can be killed and restarted on the same ports, with a new log."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmark.harness import checks, metrics
from benchmark.harness.fleet import START_S, PairConfig, start
from benchmark.harness.process import ServerProcess
from benchmark.harness.servers import HOST, ServerConfig, Sizes
from chaos import faults, store
from chaos.clients import Addresses
from component.buffer_only.masters import Master
from current.environment import RELEASE
from e2e.support import pair_config, post
from sglang.srt.patchset.environment import LOCAL_CHUNK, LOCAL_TOKENS
from sglang.srt.patchset.status import installed_version

DECODE_TOKENS = 2048
"""Three or four of the bank's requests at once, so that the pool is always full."""
HOLD_S = 30.0
"""How long decode keeps pages of a transfer that ended early without an answer from prefill."""

ENV = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "2",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_DECODE_ADMISSION_TIMEOUT": "60",
    "SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT": f"{HOLD_S:.0f}",
    "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT": "20",
    "SGLANG_DISAGGREGATION_PEER_TIMEOUT": "20",
    "SGLANG_DISAGGREGATION_CLAIM_TIMEOUT": "30",
}
BACKEND_ENV = {"nixl": {}, "mooncake": {"MC_FORCE_TCP": "1"}}
"""Mooncake has no RDMA device here."""
# A pool this small causes retractions; forced ones in addition meet requests in every state.
DECODE_ENV = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "23"}


LOCAL_ARGS = (
    *("--disaggregation-decode-local-tokens", "150"),
    *("--disaggregation-decode-fallback-prefill-tokens", "400"),
)


def chaos_config(
    model: Path,
    logs: Path,
    backend: str,
    page_size: int,
    master: Master | None = None,
    *,
    local: bool = False,
    writes: bool = False,
) -> PairConfig:
    """Return a pair with a full decode pool, short timeouts and short prefill chunks.

    With the ``master`` of a store, the prefill server's tree is small, and a staging buffer lies
    between the tree and the store. ``local``: decode computes short turns itself, and longer ones
    if prefill is lost. ``writes``: decode writes the KV of prompts and answers to that store.
    """
    staged = {} if master is None else store.prefill_with_stage(page_size, master)
    return pair_config(
        model,
        logs,
        backend=backend,
        page_size=page_size,
        decode_tokens=DECODE_TOKENS,
        chunked_prefill_tokens=128,
        decode_args=(
            *("--num-reserved-decode-tokens", str(max(16, page_size))),
            *(LOCAL_ARGS if local else ()),
            *(store.decode_that_writes(page_size, master) if master and writes else ()),
        ),
        env={**ENV, **BACKEND_ENV[backend]},
        decode_env={
            **DECODE_ENV,
            **({LOCAL_CHUNK.name: "64"} if local else {}),
            **(store.ENV if writes else {}),
        },
        **staged,
    )


LEAD = {
    LOCAL_TOKENS.name: "150",
    LOCAL_CHUNK.name: "64",
    "SGLANG_DISAGGREGATION_DECODE_FALLBACK_PREFILL_TOKENS": "400",
    "SGLANG_DISAGGREGATION_DECODE_ADMISSION": "remaining",
    "SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY": "1000",
}
"""All parts of the group ``lead``, on both servers."""


def current_config(model: Path, backend: str, page_size: int, *, stock: bool) -> PairConfig:
    """Return the same pair of SGLang 0.5.23, with the group ``lead`` or ``stock``."""
    return PairConfig(
        model,
        backend=backend,
        stock=stock,
        radix=True,
        prefill_sizes=Sizes(32_000, page_size, chunked_prefill_tokens=128),
        decode_sizes=Sizes(DECODE_TOKENS, page_size, reserved_decode_tokens=max(16, page_size)),
        env={**ENV, **BACKEND_ENV[backend], **({} if stock else LEAD)},
        decode_env=DECODE_ENV,
    )


BALANCED = b"all invariants hold"
"""Log line of an idle server after the check of its invariants."""


@dataclass
class Incarnation:
    """One process of a role. ``killed_at``: size of its log in bytes when the run killed it."""

    role: str
    number: int
    process: ServerProcess
    killed_at: int | None = None

    @property
    def name(self) -> str:
        return f"{self.role}.{self.number}"


def _staging_roles(layout: list[ServerConfig]) -> list[str]:
    """Return the roles of the servers that have a staging buffer."""
    return [config.role for config in layout if "--hicache-buffer-pages" in config.command]


class Servers:
    """A prefill and a decode server. A context manager; both are ready on entry.

    ``master``: the running master of prefill's store, if there is one; stopped with the servers.
    """

    def __init__(
        self,
        config: PairConfig,
        logs: Path,
        master: Master | None = None,
    ) -> None:
        layout = config.layout()
        self._configs: dict[str, ServerConfig] = {server.role: server for server in layout}
        decode = self._configs["decode"]
        self._computes_turns = LOCAL_ARGS[0] in decode.command or LOCAL_TOKENS.name in decode.env
        self._logs = logs
        self._model = str(config.model)
        self.master = master
        self._staging = _staging_roles(layout)
        self._staged_ended: Counter[str] = Counter()
        self._staged: dict[str, Counter[str]] = {}
        self._turns: Counter[tuple[str, ...]] = Counter()
        self.incarnations: list[Incarnation] = []
        prefill = self._configs["prefill"]
        assert prefill.bootstrap_port is not None
        self.addresses = Addresses(
            self._configs["decode"].url, prefill.url, HOST, prefill.bootstrap_port
        )

    def __enter__(self) -> Servers:
        try:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(self.start, ("prefill", "decode")))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, role: str) -> float:
        """Start a server with the log ``ROLE.N.log``; return the seconds until it is ready.

        Raises:
            ServerFailed: the server did not become ready.
        """
        self._staged_ended += self._staged.pop(role, Counter())  # counters end with their process
        number = sum(incarnation.role == role for incarnation in self.incarnations) + 1
        process = start(self._configs[role], self._logs, f"{role}.{number}")
        self.incarnations.append(Incarnation(role, number, process))
        return process.wait_ready(START_S)

    def current(self, role: str) -> Incarnation:
        """Return the latest incarnation of a role."""
        return next(
            incarnation for incarnation in reversed(self.incarnations) if incarnation.role == role
        )

    def kill(self, role: str) -> None:
        """Send SIGKILL to all processes of a server."""
        incarnation = self.current(role)
        self.count_staged()
        if role == "decode":
            with contextlib.suppress(OSError):  # the server may have died by itself
                self._turns.update(self._turns_of_decode())
        incarnation.killed_at = incarnation.process.log.stat().st_size
        incarnation.process.stop()

    def pause(self, role: str, *, scheduler_only: bool = False) -> list[int]:
        """Stop a server or its scheduler; return the processes for ``resume``."""
        group = self.current(role).process.pid
        if not scheduler_only:
            return faults.stop_all(group)
        pid = faults.scheduler_of(group)
        faults.signal_all([pid], signal.SIGSTOP)
        faults.wait_stopped([pid])
        return [pid]

    def resume(self, pids: list[int]) -> None:
        """Resume stopped processes."""
        faults.signal_all(pids, signal.SIGCONT)

    def dead(self) -> list[Incarnation]:
        """Return the servers that ended without being killed."""
        return [
            incarnation
            for incarnation in self.incarnations
            if incarnation.killed_at is None and not incarnation.process.alive
        ]

    def settle(self, timeout_s: float) -> dict[str, checks.Load]:
        """Wait until both servers are idle and have freed the pages of ended transfers.

        Return the load that each role still holds. Its tokens are neither free nor evictable: if an
        idle server keeps holding some, it has leaked them. Pages of a transfer that ended early
        outlive their request by a while.

        Raises:
            ServerFailed: a server died, for example because a memory check failed.
            TimeoutError: requests are left.
        """
        held = {}
        for role in ("decode", "prefill"):
            process = self.current(role).process
            url, deadline = self.addresses.url(role), time.monotonic() + timeout_s
            checks.wait_idle(process, url, timeout_s)
            while (load := checks.load(url)).tokens and time.monotonic() < deadline:
                time.sleep(0.2)
            held[role] = load
            checks.assert_healthy(process)
        return held

    @property
    def abort_reach_s(self) -> float:
        """Seconds after an abort of all requests in which decode may abort later ones too.

        With attention data parallelism SGLang's schedulers handle the requests that a step received
        before the aborts (``Scheduler.recv_requests``).
        """
        return 2.0 if "--enable-dp-attention" in self._configs["decode"].command else 0.0

    def log_sizes(self) -> dict[str, int]:
        """Return the log sizes of the current servers in bytes, by role, for ``wait_balanced``."""
        return {
            role: self.current(role).process.log.stat().st_size for role in ("decode", "prefill")
        }

    def wait_balanced(self, since: dict[str, int], timeout_s: float = HOLD_S + 15.0) -> None:
        """Wait until each idle server has logged, after ``since``, that all invariants hold.

        Prefill keeps a room that was announced and never requested for as long as its request may
        take to arrive. SGLang 0.5.23 has only its own memory check, which ends a server.

        Raises:
            TimeoutError: a server did not check its invariants.
        """
        if installed_version() == RELEASE:
            return
        deadline = time.monotonic() + timeout_s
        for role, size in since.items():
            log = self.current(role).process.log
            while BALANCED not in log.read_bytes()[size:]:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{role} did not check its invariants in {timeout_s:.0f} s")
                time.sleep(0.2)

    def update(self, model: Path) -> list[str]:
        """Load new weights on both idle servers, and on servers that are started later.

        Return an entry for each server that did not load them.
        """
        parts = {self._model: str(model)}
        self._model = str(model)
        problems = []
        for role, config in self._configs.items():
            command = tuple(parts.get(part, part) for part in config.command)
            self._configs[role] = replace(config, command=command)
            try:
                post(config.url, "/update_weights_from_disk", model_path=str(model))
            except OSError as error:
                problems.append(f"{role} does not take new weights: {error}")
        return problems

    def count_staged(self) -> Counter[str]:
        """Return the traffic of all servers' staging buffers so far, by role and counter.

        See ``store.counted``. A server that does not answer counts with its last reply.
        """
        for role in self._staging:
            with contextlib.suppress(OSError, KeyError):  # dead, or without metrics so far
                counted = store.counted(self.addresses.url(role))
                self._staged[role] = Counter({f"{role} {k}": v for k, v in counted.items()})
        return sum(self._staged.values(), self._staged_ended)

    def _turns_of_decode(self) -> Counter[tuple[str, ...]]:
        if not self._computes_turns:
            return Counter()
        counts = metrics.by_labels(
            metrics.page(self.addresses.decode), metrics.TURNS, "where", "reason"
        )
        return Counter({key: int(count) for key, count in counts.items()})

    def count_turns(self) -> Counter[tuple[str, ...]] | None:
        """Return all decode servers' turns so far by side and reason; None if all are prefill's."""
        return self._turns + self._turns_of_decode() if self._computes_turns else None

    def wait_drained(self, timeout_s: float = 30.0) -> None:
        """Wait until the staging buffers of idle servers are empty; see ``store.wait_drained``."""
        for role in self._staging:
            store.wait_drained(self.addresses.url(role), timeout_s)

    def flush(self) -> None:
        """Empty both caches; see ``checks.flush``."""
        for role in ("decode", "prefill"):
            checks.flush(self.addresses.url(role))

    def stop(self) -> None:
        """Stop all processes."""
        for incarnation in self.incarnations:
            incarnation.process.stop()
        if self.master is not None:
            self.master.kill()
