"""How SGLang's NIXL agent is made, with a binding that notes what it is told."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang.srt.disaggregation.delta.nixl import agent as agent_module
from sglang.srt.disaggregation.delta.nixl.agent import configured_agents, pausing_agents
from sglang.srt.patchset.environment import NIXL_PROGRESS_DELAY

PROGRESS_DELAY = NIXL_PROGRESS_DELAY.name

RW = object()


class Config:
    """The binding's ``nixl_agent_config``."""

    def __init__(self, sync_mode: Any = None, capture_telemetry: bool = False, **options: Any):
        self.sync_mode, self.capture_telemetry, self.options = sync_mode, capture_telemetry, options


class AgentConfig:
    """The binding's own settings, which an agent fills when it is made."""

    pthrDelay = 0  # noqa: N815
    other = 0


class Agent:
    """As the binding's: makes its settings in its constructor."""

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
    """The module that SGLang takes its classes from."""
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
    """NIXL is what it was, for whoever else uses it in this process."""
    assert api.nixl_agent_config is Config and api.nixl_agent is Agent
    assert api.nixlBind.nixlAgentConfig is AgentConfig


@pytest.fixture
def nicer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By how much the threads were made nicer that an agent started, each time it was asked."""
    asked: list[int] = []

    def batch_scheduling(nice: int = 0) -> Any:
        asked.append(nice)
        return nullcontext()

    monkeypatch.setattr(agent_module, "batch_scheduling", batch_scheduling)
    return asked


@pytest.mark.hazard("racing-peer-tables")
@pytest.mark.parametrize(
    ("given", "delay", "workers", "backend", "options"),
    [
        (None, 1000, 0, "UCX", {}),
        ("0", 0, 0, "UCX", {}),
        ("250", 250, 4, "UCX", {"num_workers": "5"}),
        (None, 1000, 4, "OTHER", {}),
    ],
)
def test_what_is_asked_for(
    api: Any,
    monkeypatch: pytest.MonkeyPatch,
    nicer: list[int],
    given: str | None,
    delay: int,
    workers: int,
    backend: str,
    options: dict[str, str],
) -> None:
    """Guards against an agent without thread synchronisation, which several workers would corrupt,
    or with one that has a release wait for another worker's post; against a progress thread that
    takes a core for itself; against posts of several threads that wait for one UCX worker; and
    against a receiving agent, or the sockets that SGLang opens beside one, with little of a core,
    and copying threads with as much of it as the scheduler."""
    if given is not None:
        monkeypatch.setenv(PROGRESS_DELAY, given)
    with configured_agents(workers):
        nicer.clear()
        agent = api.nixl_agent(api.nixl_agent_config(backends=[backend], num_threads=3))
    assert agent.config.sync_mode is RW and agent.config.capture_telemetry
    assert agent.config.options == {"backends": [backend], "num_threads": 3}
    assert (agent.settings.pthrDelay, agent.settings.other) == (delay, 7)
    assert isinstance(agent, Agent) and isinstance(agent.settings, AgentConfig)
    assert agent.backend == (backend, {"num_threads": "3", **options})
    assert nicer == ([10] if workers else [])
    assert_restored(api)


@pytest.mark.parametrize(("sends", "nice"), [(True, 10), (False, 0)])
def test_only_the_pause_for_a_later_release(
    api: Any, monkeypatch: pytest.MonkeyPatch, nicer: list[int], sends: bool, nice: int
) -> None:
    """Guards against settings of SGLang 0.5.23's own agents that are replaced with ours, against
    ones that stay in the binding, and against threads that take the scheduler's core."""
    monkeypatch.setenv(PROGRESS_DELAY, "250")
    with pytest.raises(ZeroDivisionError), pausing_agents(sends=sends):
        agent = api.nixl_agent(api.nixl_agent_config(sync_mode="strict", backends=["UCX"]))
        raise ZeroDivisionError
    assert agent.config.sync_mode == "strict" and not agent.config.capture_telemetry
    assert agent.backend == ("UCX", {"num_threads": "3"})
    assert (agent.settings.pthrDelay, agent.settings.other) == (250, 7)
    assert nicer == [nice]
    assert_restored(api)
    with pytest.raises(ZeroDivisionError), configured_agents():
        raise ZeroDivisionError
    assert_restored(api)


@pytest.mark.hazard("wrong-counts")
def test_an_older_nixl(api: Any) -> None:
    """Guards against workers on an agent that is not safe for them; the text says what to do."""
    del api.nixl_thread_sync_t
    text = r"thread synchronisation modes .*constraints\.txt"
    with pytest.raises(RuntimeError, match=text), configured_agents():
        pass
    assert_restored(api)


@pytest.mark.hazard("wrong-counts")
@pytest.mark.parametrize("value", ["", "soon", "-1", "1.5"])
def test_a_wrong_pause(api: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Guards against a typing error that is taken for the default."""
    monkeypatch.setenv(PROGRESS_DELAY, value)
    with pytest.raises(ValueError, match=PROGRESS_DELAY), configured_agents():
        pass
    assert_restored(api)


@pytest.mark.parametrize("missing", ["binding", "settings", "pthrDelay"])
def test_a_binding_without_the_pause(
    api: Any, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    """Guards against a server that does not start, or spins without a word."""

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
    """Guards against a NIXL of another version in which nothing of this has any effect."""
    api = pytest.importorskip("nixl")._api
    assert hasattr(api.nixl_thread_sync_t, "NIXL_THREAD_SYNC_RW")
    binding = sys.modules[api.nixl_agent.__module__].nixlBind
    assert hasattr(binding.nixlAgentConfig, "pthrDelay")
