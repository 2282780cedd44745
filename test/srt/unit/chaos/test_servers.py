"""Servers that are killed and started again: dummies that answer /health and nothing else."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.harness.ports import allocate_ports, is_free
from benchmark.harness.process import diagnose
from benchmark.harness.servers import ServerConfig
from benchmark.harness.watchdog import group_members
from chaos import servers as chaos_servers
from chaos import store
from chaos.servers import ENV, LEAD, LOCAL_ARGS, Servers, chaos_config, current_config
from sglang.srt.patchset.environment import LOCAL_CHUNK

pytestmark = pytest.mark.slow

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
    assert group_members(first.process.pid) == []
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
    assert pids == group_members(process.pid)
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


def test_with_a_store_prefill_gets_a_stage_and_decode_none(tmp_path: Path) -> None:
    """Guards against a run of this mode without the mode, without short bounds, or with a tree
    that never needs the store."""
    master: Any = SimpleNamespace(extra_config={"master_server_address": "127.0.0.1:7"})
    prefill, decode = chaos_config(tmp_path, tmp_path, "nixl", 64, master).layout()
    assert {*store.ENV.items(), *ENV.items()} <= set(prefill.env.items())
    flags = dict(zip(prefill.command, prefill.command[1:], strict=False))
    assert flags["--hicache-host-memory-mode"] == "buffer_only"
    assert int(flags["--max-total-tokens"]) == store.PREFILL_TOKENS
    extra = json.loads(flags["--hicache-storage-backend-extra-config"])
    assert extra == {**master.extra_config, "prefetch_threshold": 64}
    assert not any("hicache" in argument for argument in decode.command)


def test_turns_of_killed_servers_count(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a run whose local turns are lost with the decode server that counted them."""
    page = 'sglang:decode_turns_total{where="local",reason="cheaper"} 3.0\n'
    monkeypatch.setattr(chaos_servers.metrics, "page", lambda url: page)
    assert servers.count_turns() is None
    servers._computes_turns = True
    servers.kill("decode")
    assert servers.count_turns() == {("local", "cheaper"): 6}


def test_pages_of_servers_that_ended_count(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a store that was read, in vain, by servers that were killed: of one that died
    by itself, what it said last counts."""
    said: list[dict[str, int] | None] = [{"store_read_pages": 3}]

    def counted(url: str) -> dict[str, int]:
        if said[-1] is None:
            raise OSError("connection refused")
        return said[-1]

    monkeypatch.setattr(store, "counted", counted)
    assert not servers.count_staged()
    servers.master = SimpleNamespace(kill=lambda: None)  # type: ignore[assignment]
    servers.kill("prefill")
    said.append(None)
    assert servers.count_staged() == {"store_read_pages": 3}
    servers.start("prefill")
    assert servers.count_staged() == {"store_read_pages": 3}
    said.append({"store_read_pages": 4})
    assert servers.count_staged() == servers.count_staged() == {"store_read_pages": 7}
    said.append(None)
    servers.current("prefill").process.stop()
    servers.start("prefill")
    said.append({"store_read_pages": 5})
    assert servers.count_staged() == {"store_read_pages": 12}


def test_local_turns_are_decodes_flags(tmp_path: Path) -> None:
    """Guards against an arm of that name without the flags, or with long chunks only."""
    prefill, decode = chaos_config(tmp_path, tmp_path, "nixl", 16, local=True).layout()
    assert {*LOCAL_ARGS} <= set(decode.command) and not {*LOCAL_ARGS} & set(prefill.command)
    assert LOCAL_CHUNK.name in decode.env


def test_the_arms_of_the_later_release_differ_in_the_lead_only(tmp_path: Path) -> None:
    """Guards against a comparison of two stock pairs, or of two different ones."""
    for lead, stock in zip(
        current_config(tmp_path, 16, stock=False).layout(),
        current_config(tmp_path, 16, stock=True).layout(),
        strict=True,
    ):
        differs = {"SGLANG_PATCHSET": "1", **LEAD}
        assert {key: lead.env[key] for key in differs} == differs
        assert stock.env == {"SGLANG_PATCHSET": "0"} | {
            key: value for key, value in lead.env.items() if key not in differs
        }
        # Ports are new for each pair.
        assert [a for a in stock.command if not a.isdecimal()] == [
            a for a in lead.command if not a.isdecimal()
        ]


def test_a_stage_that_does_not_empty_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a stage that is empty for a moment only, or never, and passes."""
    monkeypatch.setattr(store, "METRICS_S", 0.3)
    held = {"write_pages": 0.0, "read_pages": 3.0, "pending_intents": 0.0}
    monkeypatch.setattr(store, "stage", lambda url: held)
    with pytest.raises(TimeoutError, match="{'read_pages': 3}"):
        store.wait_drained("http://x", timeout_s=0.1)
    seen = iter([0.0, 2.0, 0.0])
    monkeypatch.setattr(store, "stage", lambda url: {**held, "read_pages": next(seen, 0.0)})
    store.wait_drained("http://x", timeout_s=5)
    assert next(seen, None) is None
