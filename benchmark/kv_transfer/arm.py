"""One arm of a run: a new process becomes prefill, with some decode processes on loopback."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cpu_standin
from benchmark.harness.command import RunFailed
from benchmark.harness.models import REPOSITORY
from benchmark.harness.watchdog import NEW_GROUP, Watchdog, kill_group
from benchmark.kv_transfer.runs import ARMS, TRANSPORTS, Room, Round, Setup, deal

_watchdog = Watchdog()
#: Time limit of a round.
_LIMIT_S = 120.0
#: Unit of the time limit for a process's other answers, such as the one after its start.
_GRACE_S = 60.0
#: Parts of the names of transfer threads: ours, and those of SGLang's Mooncake manager.
_WORKERS = ("kv-transfer", "transfer_worker")

#: Rounds, and shares of a core that threads of the idle prefill process used.
Measured = tuple[list[Round], dict[str, float]]


def in_processes(setup: Setup) -> Measured:
    """Return the result of ``_measure`` in new processes, whose environment makes the arm.

    Raises:
        RunFailed: a process ended, or a room or page was wrong; has the end of the log.
    """
    env = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        "SGLANG_PATCHSET": "1",
        "NIXL_LOG_LEVEL": "ERROR",
        **ARMS[setup.arm],
        **TRANSPORTS[setup.transport],
    }
    if setup.device == "cpu":
        env["MC_FORCE_TCP"] = "1"
    if setup.run.deadline_s:
        env["SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT"] = f"{setup.run.deadline_s:g}"
    rounds = len(setup.run.tokens) * (1 + 2 * setup.run.rounds)
    with tempfile.TemporaryDirectory(prefix="kv-transfer-") as folder:
        setup_file, result_file, log = (Path(folder, name) for name in ("setup", "result", "log"))
        setup_file.write_bytes(pickle.dumps(setup))
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmark.kv_transfer.arm",
                    str(setup_file),
                    str(result_file),
                ],
                env=cpu_standin.environment({**os.environ, **env}),
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                **NEW_GROUP,
            )
        _watchdog.guard(process.pid)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3 * _GRACE_S + rounds * (_LIMIT_S + _GRACE_S))
        finally:
            kill_group(process.pid)  # includes stopped peers
            process.wait()
            _watchdog.release(process.pid)
        if not result_file.exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            raise RunFailed(f"{setup.arm}: its processes failed\n{tail}")
        return pickle.loads(result_file.read_bytes())


def _measure(setup: Setup) -> Measured:
    """Measure one pass of the arm. This process becomes prefill."""
    from benchmark.kv_transfer import sglang_ends

    run, rounds, idle = setup.run, list[Round](), dict[str, float]()
    peers = _Peers(setup)
    prefill = sglang_ends.Prefill(setup)
    peers.start()
    for tokens in run.tokens:
        first = peers.round(prefill, tokens)  # opens the connections
        for room in first.rooms:
            if room.outcome != "done":
                raise RuntimeError(f"a room of {tokens:,} tokens {room.outcome}: {room.error}")
        rounds += [peers.round(prefill, tokens) for _ in range(run.rounds)]
        # The stock release never ends the rooms of the stopped peer, so stop it only once.
        halts = 0 if not run.deadline_s else 1 if setup.arm == "stock" else run.rounds
        for _ in range(halts):
            rounds.append(peers.round(prefill, tokens, run.deadline_s + 15.0, stop=True))
            time.sleep(1.0)  # lets transfers in flight complete
    if run.idle_s:
        time.sleep(1.0)
        idle = _threads(run.idle_s)
    return rounds, idle


class _Peers:
    """The decode processes. They are forked before this process has threads of SGLang's or memory,
    because importing SGLang takes longer than measuring. With CUDA they are spawned instead, since
    a CUDA context does not survive a fork."""

    def __init__(self, setup: Setup) -> None:
        context = multiprocessing.get_context("fork" if setup.device == "cpu" else "spawn")
        self._run = setup.run
        self._connections: list[Connection] = []
        for number in range(1, 1 + setup.run.peers):
            ours, theirs = context.Pipe()
            context.Process(target=_decode, args=(theirs, setup, number), daemon=True).start()
            theirs.close()
            self._connections.append(ours)

    def start(self) -> None:
        """Set up all decode processes at once. Requires prefill's bootstrap server."""
        self._send(None)
        #: Name and process id of each.
        self._names: list[tuple[str, int]] = self._receive()

    def _send(self, message: object) -> None:
        for connection in self._connections:
            connection.send(message)

    def _receive(self, limit_s: float = 0.0) -> list[Any]:
        """Return an answer of each. Raises EOFError if one ended, TimeoutError if one is silent."""
        for connection in self._connections:
            if not connection.poll(limit_s + 3 * _GRACE_S):
                raise TimeoutError("a decode process does not answer")
        return [connection.recv() for connection in self._connections]

    def round(
        self, prefill: Any, tokens: int, limit_s: float = _LIMIT_S, stop: bool = False
    ) -> Round:
        """Send a round of rooms. ``stop``: the last peer is stopped during the round.

        Raises:
            RuntimeError: a page differs from the one that was sent.
        """
        rooms = deal(self._run, tokens)
        self._send(rooms)
        self._receive()
        senders = prefill.senders(rooms)
        name, pid = self._names[-1]
        if stop:
            os.kill(pid, signal.SIGSTOP)
        try:
            self._send(limit_s)
            measured: Round = prefill.send(rooms, senders, limit_s)
        finally:
            if stop:
                os.kill(pid, signal.SIGCONT)
        measured.tokens, measured.stopped = tokens, name if stop else ""
        for arrived, cpu_s, wrong in self._receive(limit_s):
            measured.peer_cpu_s += cpu_s
            if wrong:
                raise RuntimeError(f"{wrong} pages of a peer differ from those that were sent")
            for room in rooms:
                room.arrived = arrived.get(room.number, room.arrived)
        return measured


def _decode(connection: Connection, setup: Setup, number: int) -> None:
    """Run a decode process, until it is killed."""
    from benchmark.kv_transfer.sglang_ends import Decode

    connection.recv()
    end = Decode(setup, number)
    connection.send((end.name, os.getpid()))
    while True:
        dealt: list[Room] = connection.recv()
        rooms = [room for room in dealt if room.peer == number - 1]
        for room in rooms:
            end.announce(room)
        connection.send(None)
        limit_s = connection.recv()
        cpu = time.process_time()
        arrived = end.arrivals(limit_s)
        used = time.process_time() - cpu
        wrong = sum(end.wrong_pages(room) for room in rooms if room.number in arrived)
        connection.send((arrived, used, wrong))


def _threads(seconds: float) -> dict[str, float]:
    """Return the shares of a core that transfer workers, other Python threads, and native threads
    (NIXL's, UCX's, Mooncake's) use while this thread sleeps."""
    import psutil

    def used() -> dict[int, float]:
        return {
            thread.id: thread.user_time + thread.system_time
            for thread in psutil.Process().threads()
        }

    before = used()
    time.sleep(seconds)
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    shares = dict.fromkeys(("workers", "other Python threads", "native threads"), 0.0)
    for tid, cpu_s in used().items():
        name = known.get(tid)
        group = "native threads" if name is None else "other Python threads"
        if name and any(mark in name for mark in _WORKERS):
            group = "workers"
        shares[group] += (cpu_s - before.get(tid, 0.0)) / seconds
    return shares


if __name__ == "__main__":
    try:
        result = _measure(pickle.loads(Path(sys.argv[1]).read_bytes()))
        Path(sys.argv[2]).write_bytes(pickle.dumps(result))
    except Exception:
        traceback.print_exc()
    os._exit(0)  # NIXL crashes an interpreter without a GPU driver at exit
