"""The processes of one arm: a prefill process and some decode peers, fresh and on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmark.harness.command import RunFailed
from benchmark.harness.models import REPOSITORY
from benchmark.harness.ports import allocate_ports
from benchmark.harness.watchdog import NEW_GROUP, Watchdog, kill_group
from benchmark.kv_transfer.clocks import ThreadUse
from benchmark.kv_transfer.records import (
    Failure,
    FleetConfig,
    Peer,
    RoomPlan,
    Round,
    Setup,
    by_peer,
)

_watchdog = Watchdog()
_START_S = 180.0
#: A reply may come so much later than its limit says.
_GRACE_S = 60.0

#: ``--transport`` -> UCX's choice; on a GPU ``auto`` is what makes sense.
TRANSPORTS: dict[str, dict[str, str]] = {
    "tcp": {"UCX_TLS": "tcp,self"},
    "shm": {"UCX_TLS": "sm,tcp,self"},
    "auto": {},
}


class ArmFailed(RunFailed):
    """A process of an arm ended, or could not do what it was asked."""


class Fleet:
    """Starts the processes on entry and ends them on exit, stopped ones too."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.peers: list[Peer] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._log = Path(tempfile.mkstemp(prefix="kv-transfer-", suffix=".log")[1])

    def __enter__(self) -> Fleet:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._stop()
        if kind is None:
            self._log.unlink(missing_ok=True)

    # ---- what is measured ----

    def round(
        self, plans: Sequence[RoomPlan], *, in_flight: int, limit_s: float, check: bool = False
    ) -> Round:
        """Send these rooms. ``check``: see that every page has arrived.

        Raises:
            ArmFailed: a page is not what was sent, or a process failed.
        """
        self.announce(plans)
        return self.send_announced(plans, in_flight=in_flight, limit_s=limit_s, check=check)

    def announce(self, plans: Sequence[RoomPlan]) -> None:
        """Have decode announce the rooms, and prefill make their senders."""
        shares = by_peer(plans, self.config.peers)
        for peer, share in enumerate(shares):
            self._tell(1 + peer, "announce", share)
        for process in range(1, 1 + self.config.peers):
            self._hear(process)
        self.ask(0, "prepare", plans)

    def send_announced(
        self,
        plans: Sequence[RoomPlan],
        *,
        in_flight: int,
        limit_s: float,
        check: bool = False,
        stopped: int | None = None,
    ) -> Round:
        """Send rooms that were announced. ``stopped``: a peer that does not run meanwhile; it is
        woken at the end."""
        shares = by_peer(plans, self.config.peers)
        if stopped is not None:
            os.kill(self.peers[stopped].pid, signal.SIGSTOP)
        try:
            for peer, share in enumerate(shares):
                self._tell(1 + peer, "await_rooms", [plan.room for plan in share], limit_s)
            measured: Round = self.ask(0, "round", in_flight, limit_s, patience_s=limit_s)
        finally:
            if stopped is not None:
                os.kill(self.peers[stopped].pid, signal.SIGCONT)
        arrivals: dict[int, float] = {}
        for peer in range(self.config.peers):
            arrived, cpu_s = self._hear(1 + peer, limit_s)
            arrivals.update(arrived)
            measured.peer_cpu_s += cpu_s
        for times in measured.rooms:
            times.arrived = arrivals.get(times.room, 0.0)
        if check:
            done = {times.room for times in measured.rooms if times.outcome == "done"}
            for peer, share in enumerate(shares):
                sent = [plan for plan in share if plan.room in done]
                if wrong := self.ask(1 + peer, "wrong_pages", sent):
                    arm = self.config.arm
                    raise ArmFailed(f"{arm}: {wrong} pages of peer {peer} are not what was sent")
        return measured

    def idle(self, seconds: float) -> list[ThreadUse]:
        """CPU time of the prefill process's threads while nothing is asked."""
        used: list[ThreadUse] = self.ask(0, "idle", seconds, patience_s=seconds)
        return used

    @property
    def alive(self) -> bool:
        """Whether none of the processes has ended."""
        return all(process.poll() is None for process in self._processes)

    # ---- processes ----

    def ask(self, process: int, name: str, *arguments: Any, patience_s: float = 0.0) -> Any:
        """Have a process (0: prefill) do something, and wait for its answer."""
        self._tell(process, name, *arguments)
        return self._hear(process, patience_s)

    def _tell(self, process: int, name: str, *arguments: Any) -> None:
        try:
            self._connections[process].send((name, arguments))
        except OSError as error:
            raise self._failure(process, "it ended") from error

    def _hear(self, process: int, patience_s: float = 0.0) -> Any:
        connection = self._connections[process]
        try:
            if not connection.poll(patience_s + _GRACE_S):
                raise self._failure(process, f"no answer within {patience_s + _GRACE_S:.0f} s")
            reply = connection.recv()
        except (EOFError, OSError) as error:
            raise self._failure(process, "it ended") from error
        if isinstance(reply, Failure):
            raise self._failure(process, reply.text)
        return reply

    def _failure(self, process: int, text: str) -> ArmFailed:
        name = "prefill" if process == 0 else f"decode peer {process - 1}"
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])
        return ArmFailed(f"{self.config.arm}, {name}: {text}\n{tail}\n(log: {self._log})")

    def _start(self) -> None:
        config = self.config
        sockets = [socket.socketpair() for _ in range(1 + config.peers)]
        self._connections = [Connection(ours.detach()) for ours, _ in sockets]
        theirs = [pair[1] for pair in sockets]
        groups = [theirs] if config.device == "cpu" else [[each] for each in theirs]
        env = {**os.environ, **_environment(config)}
        with self._log.open("wb") as log:
            for group in groups:
                numbers = [each.fileno() for each in group]
                command = [sys.executable, "-m", "benchmark.kv_transfer.worker", config.arm]
                self._processes.append(
                    subprocess.Popen(
                        [*command, *map(str, numbers)],
                        env=env,
                        cwd=REPOSITORY,
                        pass_fds=numbers,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        **NEW_GROUP,
                    )
                )
                _watchdog.guard(self._processes[-1].pid)
        for each in theirs:
            each.close()
        bootstrap_port, *dist_ports = allocate_ports(2 + config.peers)
        # Decode asks the bootstrap server for prefill: prefill first, then all peers at once.
        for process, dist_port in enumerate(dist_ports):
            role = "decode" if process else "prefill"
            ports = {"bootstrap_port": bootstrap_port, "dist_port": dist_port}
            self._tell(process, "start", Setup(**vars(config), role=role, **ports))
            if not process:
                self._hear(0, _START_S)
        for process in range(1, 1 + config.peers):
            self._hear(process, _START_S)
        self.peers = [self.ask(1 + peer, "describe") for peer in range(config.peers)]

    def _stop(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            kill_group(process.pid)
            process.wait()
            _watchdog.release(process.pid)
        time.sleep(0.1)  # the kernel takes a moment to give the pools back


def _environment(config: FleetConfig) -> dict[str, str]:
    env = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        "SGLANG_PATCHSET": "0" if config.arm == "stock" else "1",
        "NIXL_LOG_LEVEL": "ERROR",
        **TRANSPORTS[config.transport],
        **config.env,
    }
    if config.device == "cpu":
        env["SGLANG_CPU_STANDIN"] = "1"
        env["MC_FORCE_TCP"] = "1"
    return env
