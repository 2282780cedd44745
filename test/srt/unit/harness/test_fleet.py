"""Several servers as one object."""

from __future__ import annotations

import http.server
import sys
from pathlib import Path

import pytest

from benchmark.harness import checks
from benchmark.harness.fleet import Fleet, names
from benchmark.harness.ports import allocate_ports
from benchmark.harness.process import ServerFailed
from benchmark.harness.servers import ServerConfig

pytestmark = pytest.mark.slow

SERVER = Path(http.server.__file__)


def dummy(role: str, folder: Path) -> ServerConfig:
    """A file server whose folder answers the readiness checks."""
    for name in ("health", "readiness"):
        (folder / name).touch()
    (port,) = allocate_ports(1)
    command = (sys.executable, str(SERVER), str(port), "--bind", "127.0.0.1", "-d", str(folder))
    return ServerConfig(role, port, command)


def broken(role: str) -> ServerConfig:
    return ServerConfig(role, 1, (sys.executable, "-c", "raise SystemExit('no such model')"))


def test_names() -> None:
    """A role that several servers have is numbered, so that their logs and processes differ; one
    that is alone keeps its plain name, which tools look for."""
    layout = [ServerConfig(role, 1, ()) for role in ("prefill", "decode", "decode", "router")]
    assert names(layout) == ["prefill", "decode-0", "decode-1", "router"]


def test_all_start_and_all_end(tmp_path: Path) -> None:
    """Guards against servers left behind, and against one log for two servers."""
    layout = [dummy(role, tmp_path) for role in ("decode", "decode", "router")]
    with Fleet(layout, tmp_path / "logs") as fleet:
        assert set(fleet.processes) == {"decode-0", "decode-1", "router"}
        assert fleet.urls("decode") == [layout[0].url, layout[1].url]
        assert all(process.alive for process in fleet.processes.values())
    assert not any(process.alive for process in fleet.processes.values())
    assert len({process.log for process in fleet.processes.values()}) == 3


def test_one_fails_and_all_end(tmp_path: Path) -> None:
    """A server that cannot start ends the others, also those that wait to be ready, and no load
    balancer is started for nothing."""
    fleet = Fleet([dummy("prefill", tmp_path), broken("decode"), broken("router")], tmp_path / "l")
    with pytest.raises(ServerFailed, match="decode"), fleet:
        pass
    assert set(fleet.processes) == {"prefill", "decode"}
    assert not any(process.alive for process in fleet.processes.values())


def test_every_engine_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a leak on the second server of a role that nobody looked at."""
    waited: list[str] = []
    healthy: list[str] = []
    monkeypatch.setattr(checks, "wait_idle", lambda process, url, timeout_s: waited.append(url))
    monkeypatch.setattr(checks, "assert_healthy", lambda process: healthy.append(process.name))
    layout = [dummy(role, tmp_path) for role in ("prefill", "decode", "decode", "router")]
    with Fleet(layout, tmp_path / "logs") as fleet:
        fleet.check()
    assert waited == [layout[1].url, layout[2].url, layout[0].url]
    assert sorted(healthy) == ["decode-0", "decode-1", "prefill", "router"]
