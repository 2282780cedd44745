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


@pytest.mark.hazard("racing-peer-tables")
@pytest.mark.parametrize(("given", "delay"), [(None, 1000), ("0", 0), ("250", 250)])
def test_what_is_asked_for(
    api: Any, monkeypatch: pytest.MonkeyPatch, given: str | None, delay: int
) -> None:
    """Guards against an agent without thread synchronisation, which several workers would corrupt,
    or with one that has a release wait for another worker's post; and against a progress thread
    that takes a core for itself."""
    if given is not None:
        monkeypatch.setenv(PROGRESS_DELAY, given)
    with configured_agents():
        agent = api.nixl_agent(api.nixl_agent_config(backends=["UCX"], num_threads=3))
    assert agent.config.sync_mode is RW and agent.config.capture_telemetry
    assert agent.config.options == {"backends": ["UCX"], "num_threads": 3}
    assert (agent.settings.pthrDelay, agent.settings.other) == (delay, 7)
    assert isinstance(agent.settings, AgentConfig)
    assert agent.backend == ("UCX", {"num_threads": "3"})
    assert_restored(api)


@pytest.mark.parametrize(("backend", "asked"), [("UCX", {"num_workers": "5"}), ("OTHER", {})])
def test_a_ucx_worker_for_each_thread(api: Any, backend: str, asked: dict[str, str]) -> None:
    """Guards against posts of several threads that wait for one UCX worker, and against an option
    that another backend does not know."""
    with configured_agents(4):
        agent = api.nixl_agent(api.nixl_agent_config(backends=[backend], num_threads=3))
    assert agent.backend == (backend, {"num_threads": "3", **asked})
    assert isinstance(agent, Agent)
    assert_restored(api)


def test_restored_after_an_error(api: Any) -> None:
    """Guards against settings that stay in the binding when an agent could not be made."""
    with pytest.raises(ZeroDivisionError), configured_agents():
        raise ZeroDivisionError
    assert_restored(api)


@pytest.mark.parametrize(("sends", "nice"), [(True, 10), (False, 0)])
def test_only_the_pause_for_a_later_release(
    api: Any, monkeypatch: pytest.MonkeyPatch, sends: bool, nice: int
) -> None:
    """Guards against settings of SGLang 0.5.23's own agents that are replaced with ours, against
    ones that stay in the binding, and against threads that take the scheduler's core."""
    asked: list[int] = []
    scheduling = lambda nice=0: nullcontext(asked.append(nice))  # noqa: E731
    monkeypatch.setattr(agent_module, "batch_scheduling", scheduling)
    monkeypatch.setenv(PROGRESS_DELAY, "250")
    with pytest.raises(ZeroDivisionError), pausing_agents(sends=sends):
        agent = api.nixl_agent(api.nixl_agent_config(sync_mode="strict", backends=["UCX"]))
        raise ZeroDivisionError
    assert agent.config.sync_mode == "strict" and not agent.config.capture_telemetry
    assert agent.backend == ("UCX", {"num_threads": "3"})
    assert (agent.settings.pthrDelay, agent.settings.other) == (250, 7)
    assert asked == [nice]
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


def test_only_the_backends_own_threads_are_nicer(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a receiving agent, or the sockets that SGLang opens beside an agent, that get
    little of a core; and against copying threads that get as much of it as the scheduler."""
    told: list[int] = []

    def batch_scheduling(nice: int = 0) -> Any:
        told.append(nice)
        return nullcontext()

    monkeypatch.setattr(agent_module, "batch_scheduling", batch_scheduling)
    for workers in (0, 4):
        with configured_agents(workers):
            told.clear()
            api.nixl_agent(api.nixl_agent_config(backends=["UCX"]))
        assert told == ([agent_module._NICE] if workers else [])
