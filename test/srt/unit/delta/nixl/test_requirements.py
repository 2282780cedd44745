"""Which NIXL is taken: by its version, and by its interface."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from sglang.srt.disaggregation.delta.nixl import agent
from sglang.srt.disaggregation.delta.nixl.agent import NEEDED, obstacle

ROOT = Path(__file__).parents[5]


class Agent:
    """An agent with everything that is used."""

    __module__ = "nixl._api"


for _name in agent._AGENT:
    setattr(Agent, _name, None)


def config(sync_mode: Any = None, capture_telemetry: bool = False) -> None:
    """``nixl_agent_config`` of this NIXL."""


def old_config(capture_telemetry: bool = False) -> None:
    """``nixl_agent_config`` of an older one."""


@pytest.fixture
def nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a NIXL of a version with an interface."""

    def install(version: str, **changes: Any) -> None:
        info = tmp_path / f"nixl-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nixl\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        package: Any = ModuleType("nixl")
        modes = SimpleNamespace(NIXL_THREAD_SYNC_RW=1)
        api = {"nixl_agent": Agent, "nixl_agent_config": config, "nixl_thread_sync_t": modes}
        package._api = SimpleNamespace(**api | changes)
        monkeypatch.setitem(sys.modules, "nixl", package)

    return install


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("0.9.0", False), ("1.0.1", False), ("1.4.1", False)]
    + [("1.5.0", True), ("1.5.1", True), ("1.10", True), ("2.0", True)],
)
def test_versions(nixl: Any, version: str, is_taken: bool) -> None:
    """Guards against a check that refuses what works, a list of names that the installed NIXL has
    not, and a server that ends at its start because of the library that it has."""
    assert obstacle() == ""
    nixl(version)
    too_old = f"nixl {version} is installed, {NEEDED} or newer is needed"
    assert obstacle() == ("" if is_taken else too_old)


def test_the_version_is_that_of_the_implementation(nixl: Any, tmp_path: Path) -> None:
    """Guards against a judgement of the shim, which may hand on another version's classes."""
    info = tmp_path / "nixl_cu12-1.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nixl-cu12\nVersion: 1.1.0\n")
    nixl("1.5.1", nixl_agent=type("Agent", (Agent,), {"__module__": "nixl_cu12._api"}))
    assert obstacle() == f"nixl-cu12 1.1.0 is installed, {NEEDED} or newer is needed"


class Bare:
    """An agent of a NIXL whose names are others."""

    __module__ = "nixl._api"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"nixl_thread_sync_t": None}, "NIXL_THREAD_SYNC_RW"),
        ({"nixl_agent_config": old_config}, "nixl_agent_config(sync_mode=...)"),
        ({"nixl_agent": Bare}, "nixl_agent.make_prepped_xfer"),
    ],
)
def test_another_interface(nixl: Any, changes: dict[str, Any], named: str) -> None:
    """Guards against a build whose version says nothing of what it lacks."""
    nixl("1.5.1", **changes)
    assert obstacle().startswith("nixl 1.5.1 has no ") and named in obstacle()


def test_no_nixl_at_all(nixl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an exception where the library is broken or missing."""
    nixl("1.5.1")
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert "cannot be imported" in obstacle()


def test_the_extras_ask_for_it() -> None:
    """Guards against an installation that pip finds in order and that is then left stock."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    for extra, cuda in ("cuda12", 12), ("cuda13", 13), ("cpu", 12):
        found = [Requirement(line) for line in project["optional-dependencies"][extra]]
        nixl = [each for each in found if each.name.startswith("nixl")]
        assert {each.name for each in nixl} == {"nixl", f"nixl-cu{cuda}"}
        for each in nixl:
            assert str(each.specifier) == f">={NEEDED}"
            assert pinned[each.name] in each.specifier
