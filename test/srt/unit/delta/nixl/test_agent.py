"""Accepted versions of NIXL, and the settings of SGLang's agents."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from sglang.srt.disaggregation.delta.nixl.agent import (
    NEEDED,
    configured_agents,
    obstacle,
    pausing_agents,
)
from sglang.srt.patchset.environment import NIXL_PROGRESS_DELAY

PROGRESS_DELAY = NIXL_PROGRESS_DELAY.name

RW = object()
ROOT = Path(__file__).parents[5]


class Config:
    """The binding's ``nixl_agent_config``."""

    def __init__(self, sync_mode: Any = None, **options: Any):
        self.sync_mode, self.options = sync_mode, options


class AgentConfig:
    """The binding's own settings, which an agent fills at its construction."""

    pthrDelay = 0  # noqa: N815
    other = 0


class Agent:
    """Like the binding's class: creates its settings in its constructor."""

    __module__ = "fake_nixl_api"

    def __init__(self, config: Any) -> None:
        self.config = config
        self.settings = sys.modules["fake_nixl_api"].nixlBind.nixlAgentConfig()
        self.settings.pthrDelay = 0
        self.settings.other = 7
        for backend in config.options.get("backends", []):
            self.create_backend(backend, {"num_threads": "3"})

    def create_backend(self, backend: str, options: dict[str, str]) -> None:
        self.backend = backend, options


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module from which SGLang imports its classes."""
    api: Any = ModuleType("fake_nixl_api")
    api.nixl_thread_sync_t = SimpleNamespace(NIXL_THREAD_SYNC_RW=RW)
    api.nixl_agent_config = Config
    api.nixl_agent = Agent
    api.nixlBind = SimpleNamespace(nixlAgentConfig=AgentConfig)
    package: Any = ModuleType("nixl")
    package._api = api
    monkeypatch.setitem(sys.modules, "nixl", package)
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setitem(sys.modules, "fake_nixl_api", api)
    monkeypatch.delenv(PROGRESS_DELAY, raising=False)
    return api


def assert_restored(api: Any) -> None:
    """Assert that NIXL is unchanged for other users in this process."""
    assert api.nixl_agent_config is Config and api.nixl_agent is Agent
    assert api.nixlBind.nixlAgentConfig is AgentConfig


@pytest.mark.hazard("racing-peer-tables")
@pytest.mark.parametrize(
    ("given", "delay", "workers", "options"),
    [
        (None, 1000, 0, {}),
        ("0", 0, 0, {}),
        ("250", 250, 4, {"num_workers": "7"}),
        (None, 1000, 1, {"num_workers": "4"}),
    ],
)
def test_what_is_asked_for(
    api: Any,
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    delay: int,
    workers: int,
    options: dict[str, str],
) -> None:
    """Guards against an agent without thread synchronisation, which several workers would corrupt,
    or with one that makes a release wait for another worker's post; against a progress thread that
    occupies a core; and against transfer threads that wait for one UCX worker, since NIXL's own
    ``num_threads`` are subtracted from the total."""
    if given is not None:
        monkeypatch.setenv(PROGRESS_DELAY, given)
    with configured_agents(workers):
        agent = api.nixl_agent(api.nixl_agent_config(backends=["UCX"], num_threads=3))
    assert agent.config.sync_mode is RW
    assert agent.config.options == {"backends": ["UCX"], "num_threads": 3}
    assert (agent.settings.pthrDelay, agent.settings.other) == (delay, 7)
    assert isinstance(agent, Agent) and isinstance(agent.settings, AgentConfig)
    assert agent.backend == ("UCX", {"num_threads": "3", **options})
    assert_restored(api)


def test_only_the_pause_for_a_later_release(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against replacing the settings of SGLang 0.5.23's own agents, and against settings
    that stay in the binding."""
    monkeypatch.setenv(PROGRESS_DELAY, "250")
    with pytest.raises(ZeroDivisionError), pausing_agents():
        agent = api.nixl_agent(api.nixl_agent_config(sync_mode="strict", backends=["UCX"]))
        raise ZeroDivisionError
    assert agent.config.sync_mode == "strict"
    assert agent.backend == ("UCX", {"num_threads": "3"})
    assert (agent.settings.pthrDelay, agent.settings.other) == (250, 7)
    assert_restored(api)
    with pytest.raises(ZeroDivisionError), configured_agents():
        raise ZeroDivisionError
    assert_restored(api)


@pytest.mark.hazard("wrong-counts")
@pytest.mark.parametrize("value", ["", "soon", "-1", "1.5"])
def test_a_wrong_pause(api: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Guards against a typing error that silently means the default."""
    monkeypatch.setenv(PROGRESS_DELAY, value)
    with pytest.raises(ValueError, match=PROGRESS_DELAY), configured_agents():
        pass
    assert_restored(api)


@pytest.mark.parametrize("missing", ["binding", "settings", "pthrDelay"])
def test_a_binding_without_the_pause(
    api: Any, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    """Guards against a server that does not start, or silently spins."""

    class Bare:
        pass

    if missing == "binding":
        del api.nixlBind
    elif missing == "settings":
        del api.nixlBind.nixlAgentConfig
    else:
        api.nixlBind.nixlAgentConfig = Bare
    with configured_agents():
        assert api.nixl_agent_config().sync_mode is RW
    assert PROGRESS_DELAY in caplog.text and "polls without a pause" in caplog.text
    assert api.nixl_agent_config is Config


def test_the_installed_binding_has_what_is_used() -> None:
    """Guards against another version of NIXL in which these settings have no effect."""
    api = pytest.importorskip("nixl")._api
    assert hasattr(api.nixl_thread_sync_t, "NIXL_THREAD_SYNC_RW")
    binding = sys.modules[api.nixl_agent.__module__].nixlBind
    assert hasattr(binding.nixlAgentConfig, "pthrDelay")


# ---- accepted versions of NIXL ----


def agent_of_today() -> Any:
    """Return the installed binding's class, with all attributes in use."""
    return pytest.importorskip("nixl")._api.nixl_agent


def new_config(sync_mode: Any = None) -> None:
    """Stand in for ``nixl_agent_config`` of this NIXL."""


def old_config(backends: Any = None) -> None:
    """Stand in for ``nixl_agent_config`` of an older one."""


@pytest.fixture
def nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a NIXL with the given version and interface."""

    whole = type("Whole", (agent_of_today(),), {"__module__": "nixl._api"})

    def install(version: str, **changes: Any) -> None:
        info = tmp_path / f"nixl-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nixl\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        package: Any = ModuleType("nixl")
        modes = SimpleNamespace(NIXL_THREAD_SYNC_RW=1)
        api = {"nixl_agent": whole, "nixl_agent_config": new_config, "nixl_thread_sync_t": modes}
        package._api = SimpleNamespace(**api | changes)
        monkeypatch.setitem(sys.modules, "nixl", package)

    return install


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("0.9.0", False), ("1.0.1", False), ("1.4.1", False)]
    + [("1.5.0", True), ("1.5.1", True), ("1.10", True), ("2.0", True)],
)
def test_versions(nixl: Any, version: str, is_taken: bool) -> None:
    """Guards against a check that refuses a working version, a list of names that the installed
    NIXL lacks, and a server that ends at its start because of its library."""
    assert obstacle() == ""
    nixl(version)
    too_old = f"nixl {version} is installed, {NEEDED} or newer is needed"
    assert obstacle() == ("" if is_taken else too_old)


@pytest.mark.parametrize("backend", ["LIBFABRIC", "UCX_MO"])
def test_a_backend_whose_order_is_unknown(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Guards against a note that overtakes the KV that it announces: decode would answer from pages
    that have not arrived."""
    name = "SGLANG_DISAGGREGATION_NIXL_BACKEND"
    monkeypatch.setenv(name, "UCX")
    assert obstacle() == ""
    monkeypatch.setenv(name, backend)
    assert obstacle().startswith(f"{name} is {backend}: ")


def test_the_version_is_that_of_the_implementation(nixl: Any, tmp_path: Path) -> None:
    """Guards against checking the shim's version, which may load another version's classes."""
    info = tmp_path / "nixl_cu12-1.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nixl-cu12\nVersion: 1.1.0\n")
    nixl("1.5.1", nixl_agent=type("Agent", (agent_of_today(),), {"__module__": "nixl_cu12._api"}))
    assert obstacle() == f"nixl-cu12 1.1.0 is installed, {NEEDED} or newer is needed"


class Bare:
    """An agent of a NIXL with other names."""

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
    """Guards against a build whose version does not show a missing function."""
    nixl("1.5.1", **changes)
    assert obstacle().startswith("nixl 1.5.1 has no ") and named in obstacle()


def test_no_nixl_at_all(nixl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an exception if the library is broken or missing."""
    nixl("1.5.1")
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert "cannot be imported" in obstacle()


def test_the_extras_ask_for_it() -> None:
    """Guards against an installation that satisfies pip but stays stock."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    for extra, cuda in ("cuda12", 12), ("cuda13", 13), ("cpu", 12), ("cpu13", 13):
        found = [Requirement(line) for line in project["optional-dependencies"][extra]]
        nixl = [each for each in found if each.name.startswith("nixl")]
        assert {each.name for each in nixl} == {"nixl", f"nixl-cu{cuda}"}
        for each in nixl:
            assert str(each.specifier) == f">={NEEDED}"
            assert pinned[each.name] in each.specifier
