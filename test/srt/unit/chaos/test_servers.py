"""Servers that are killed and started again: dummies that answer /health and nothing else."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.ports import allocate_ports, is_free
from benchmark.harness.process import diagnose
from benchmark.harness.servers import ServerConfig
from benchmark.harness.watchdog import session_members
from chaos.servers import ENV, Servers, chaos_config

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print("up", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class DummyConfig:
    """Stands in for a ``PairConfig``."""

    def layout(self) -> list[ServerConfig]:
        ports = allocate_ports(3)
        command = (sys.executable, "-c", SERVER)
        return [
            ServerConfig("prefill", ports[0], (*command, str(ports[0])), {}, ports[2]),
            ServerConfig("decode", ports[1], (*command, str(ports[1]))),
        ]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    config: Any = DummyConfig()
    with Servers(config, tmp_path, start_timeout_s=30) as running:
        yield running


def test_a_killed_server_comes_back_on_its_port_with_a_log_of_its_own(
    servers: Servers, tmp_path: Path
) -> None:
    """Guards against a restart that writes over the log of the server that was killed, and against
    peers that would have to learn a new address."""
    url, first = servers.addresses.prefill, servers.current("prefill")
    servers.kill("prefill")
    assert session_members(first.process.pid) == []
    assert first.killed_at == len(first.process.log_text()) > 0
    assert servers.dead() == []  # we did it
    servers.start("prefill")
    second = servers.current("prefill")
    assert (second.name, servers.addresses.prefill) == ("prefill.2", url)
    assert sorted(log.name for log in tmp_path.glob("*.log")) == [
        "decode.1.log",
        "prefill.1.log",
        "prefill.2.log",
    ]
    assert servers.current("decode").name == "decode.1"


def test_a_server_that_died_by_itself_is_noticed(servers: Servers) -> None:
    """Guards against a crash that passes for one of our kills."""
    incarnation = servers.current("decode")
    incarnation.process._popen.kill()
    deadline = time.monotonic() + 10
    while not servers.dead() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert servers.dead() == [incarnation]


def test_a_paused_server_answers_nobody(servers: Servers) -> None:
    """Guards against a stop that stops nothing."""
    process = servers.current("prefill").process
    pids = servers.pause("prefill")
    assert pids == session_members(process.pid)
    servers.resume(pids)
    assert process.wait_ready(10) > 0


def test_all_end_with_the_run(tmp_path: Path) -> None:
    """Guards against servers, stopped ones too, that outlive a run."""
    config: Any = DummyConfig()
    with Servers(config, tmp_path, start_timeout_s=30) as servers:
        servers.pause("prefill")
    for incarnation in servers.incarnations:
        assert not incarnation.process.alive
    assert is_free(int(servers.addresses.decode.rpartition(":")[2]))


def test_a_server_that_never_checks_itself_is_a_problem(servers: Servers) -> None:
    """Guards against a run that calls servers balanced because they did not look."""
    since = servers.log_sizes()
    with pytest.raises(TimeoutError, match="decode did not check its invariants"):
        servers.wait_balanced(since, timeout_s=0.05)
    for role in since:
        with servers.current(role).process.log.open("a") as log:
            log.write("idle and balanced: all invariants hold\n")
    servers.wait_balanced(since, timeout_s=5)


def test_a_scheduler_that_failed_is_not_taken_for_short_memory() -> None:
    """Guards against a report that sends its reader to look for memory: SGLang ends a server whose
    scheduler raised with the signal that the kernel uses."""
    log = (
        "[t] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n    raise InvariantError\n'
        "a.b.InvariantError: rooms are left\n\n[t] SIGQUIT received\n"
    )
    assert diagnose(log, -9) == "its scheduler failed: a.b.InvariantError: rooms are left"


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_the_pair_runs_with_the_short_bounds(tmp_path: Path, backend: str) -> None:
    """Guards against minutes of waiting for stock timeouts, and a pool that is never full."""
    prefill, decode = chaos_config(tmp_path, tmp_path, backend, 16).layout()
    for server in (prefill, decode):
        assert ENV.items() <= server.env.items()
        assert server.env["SGLANG_DISAGGREGATION_CHECK_INVARIANTS"] == "1"
        assert server.env.get("MC_FORCE_TCP") == ("1" if backend == "mooncake" else None)
        assert backend in server.command
    assert "--disaggregation-decode-enable-radix-cache" in decode.command
    assert decode.env["SGLANG_TEST_RETRACT"] == "1"
    assert "SGLANG_TEST_RETRACT" not in prefill.env
